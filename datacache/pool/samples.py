"""Samples in the files of a store: metadata words, columns, and a heap for those that vary.

The metadata word of a sample shows whether it is ready, with its checksum and the boot of its last
verification. Only these words determine which bytes of the columns and the heap are in use.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import mmap
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from datacache.native import gather, mark_words
from datacache.pool.folder import TAIL_BYTES, Folder
from datacache.pool.spec import Arrays, Component, Layout
from datacache.system.descriptors import lock_byte, opened_again
from datacache.system.room import means_full, reserve

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
READY = 1 << 32
"""Bit that is set once a sample is complete; the bits below contain the CRC-32 of its bytes."""
CHECKSUM = READY - 1
NOT_READY = np.uint64(0)
CONTENT = np.uint64(READY | CHECKSUM)
"""Bits that change only when the sample itself is written or cleared."""
BOOT_SHIFT = np.uint64(33)
"""First of the bits with the boot number in which a process verified the checksum."""
# np.uint64, because NumPy 1 cannot shift an unsigned integer by a Python int.
CHUNK_BYTES = 2**24
"""Bytes that are reserved at a time: a power of two that holds many samples."""
NEXT_OFFSET, RESERVED_END, GAP_END, REFUSED_BYTES = range(4)
"""Indices into the shared file `end`, all int64: offset of the next sample; end of the reserved
disk space; end of the gap that is being filled; shortest length that did not fit."""
NONE_REFUSED = np.iinfo(np.int64).max


@functools.cache
def boot_number() -> np.uint64:
    """Returns a number from 1 to 2^31 - 1 that, with high probability, differs between boots."""
    # Equal in all processes and containers of the machine, which share the kernel. It is never 0,
    # which represents "in no boot", and fits into the upper bits of a word.
    digits = hashlib.sha256(BOOT_ID.read_bytes()).hexdigest()
    return np.uint64(int(digits, 16) % (2**31 - 1) + 1)


class SampleWords:
    """The `words` file of a store, one 64-bit word per slot, shared by all processes.

    A checksum is verified once per boot and not once per process: memory does not change while the
    machine runs, but data that a disk had not yet written at a power loss are corrupted. A word
    therefore also holds the number of the boot of its last verification.
    """

    def __init__(self, mapping: mmap.mmap, slots: int) -> None:
        # Other processes may write the words, `[slots]` uint64, at any time.
        self.array = np.ndarray((slots,), np.uint64, mapping)
        self._boot = boot_number()
        self._verified_mark = self._boot << BOOT_SHIFT
        # Slots that this process wrote, or verified where words cannot be marked.
        self._trusted = np.zeros(slots, bool)

    def withdraw(self, index: int) -> None:
        """Marks a slot as not ready; must precede any change of its bytes."""
        self.array[index] = 0

    def publish(self, index: int, checksum: int) -> None:
        """Marks a slot as ready; must follow all writes of its bytes."""
        # Not marked as verified: other processes must verify the data of this process. If it is
        # killed earlier, the slot is not ready, and needs no cleanup.
        self.array[index] = READY | checksum
        self._trusted[index] = True

    def clear(self) -> None:
        """Marks all slots as not ready."""
        self.array[:] = 0
        self._trusted[:] = False

    def unverified(self, indices: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Returns which of these slots have not been verified in this boot, `[n]` bool."""
        return ~self._trusted[indices] & (words >> BOOT_SHIFT != self._boot)

    def unchanged(self, indices: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Returns which slots were ready, and neither cleared nor rewritten since, `[n]` bool."""
        return (words >= READY) & ((self.array[indices] ^ words) & CONTENT == 0)

    def settle(self, indices: np.ndarray, words: np.ndarray, intact: np.ndarray) -> np.ndarray:
        """Marks intact slots as verified, and corrupted ones as not ready; returns the corrupted.

        A slot that another process has cleared or rewritten since is skipped: the read bytes were a
        mixture of both versions, and do not show whether either is intact.
        """
        unchanged = mark_words(self.array, indices, words, intact, CONTENT, self._verified_mark)
        if unchanged is None:
            # NumPy has no compare-and-swap, so a concurrent write of a word could be lost. Only 0
            # is safe to write: at worst, a sample is produced again.
            unchanged = self.unchanged(indices, words)
            self.array[indices[unchanged & ~intact]] = NOT_READY
            self._trusted[indices[unchanged & intact]] = True
        corrupt = unchanged & ~intact & (words >= READY)
        # Another process may rewrite them, and this process has not verified the new bytes.
        self._trusted[indices[corrupt]] = False
        return corrupt


def match_checksums(words: np.ndarray, checksums: np.ndarray) -> np.ndarray:
    """Returns which samples are ready and match the checksum of their write, `[n]` bool."""
    return (words & CHECKSUM == checksums) & (words >= READY)


class Heap:
    """The `heap` file of a store.

    Samples are appended. At the end of the space, gaps are filled: samples that were cleared,
    corrupted or never finished. Nothing has to be freed explicitly, and a killed process leaves at
    most a gap.
    """

    def __init__(self, folder: Folder) -> None:
        self._lock = threading.Lock()
        # Only the metadata words determine which bytes are in use. The shared cursor merely saves
        # the search: zeros are an empty gap, which makes the next sample search.
        self._file, self._end = folder.open("heap"), folder.open("end")
        self.capacity_bytes = os.fstat(self._file.fileno()).st_size - TAIL_BYTES
        self._bytes = folder.map_file("heap")
        values = (os.fstat(self._end.fileno()).st_size - TAIL_BYTES) // 8
        self._state = np.ndarray((values,), np.int64, folder.map_file("end"))
        # After a power loss, samples on a disk may be newer than the cursor. Another process may be
        # adding.
        with self.adding():
            self._state[:] = 0, 0, 0, NONE_REFUSED

    @contextlib.contextmanager
    def adding(self) -> Iterator[None]:
        """Locks the heap among all threads and processes, until added bytes are published."""
        # Other processes treat bytes that no word publishes as gaps.
        # The first lock is for threads of this process, which then need not open the file to wait.
        with self._lock, opened_again(self._end) as handle:
            # Use a separate open file description: the kernel releases the lock when it is closed.
            lock_byte(handle, 0, wait=True)
            yield

    def add(self, content: bytes, extents: Callable[[], np.ndarray]) -> int | None:
        """Adds bytes within `adding`; returns their offset, or `None` without space."""
        length = len(content)
        # Without this, a full heap would be searched for each sample of each epoch.
        if length >= self._state[REFUSED_BYTES]:
            return None
        offset = self._append(length)
        if offset is None:
            offset = self._find_gap(length, extents())
        if offset is None:
            self._state[REFUSED_BYTES] = length
            return None
        self._bytes[offset : offset + length] = content
        return offset

    def note_freed(self) -> None:
        """Records that there may be free space, so that the next sample searches for it."""
        self._state[REFUSED_BYTES] = NONE_REFUSED

    def content(self, offset: int, length: int) -> memoryview | None:
        """Returns the bytes at an offset without a copy, or `None` if they are out of bounds."""
        if not 0 <= offset <= offset + length <= self.capacity_bytes:
            return None
        return memoryview(self._bytes)[offset : offset + length]

    def _append(self, length: int) -> int | None:
        """Takes space after the last sample; returns its offset, or `None` if it does not fit."""
        begin, reserved, end = map(int, self._state[[NEXT_OFFSET, RESERVED_END, GAP_END]])
        # An invalid cursor is treated as an empty gap.
        if not 0 <= begin <= begin + length <= end <= self.capacity_bytes:
            return None
        if begin + length > reserved:
            reserved = self._reserve(reserved, begin + length, end)
        if begin + length > reserved:
            return None
        self._state[RESERVED_END] = reserved
        self._state[NEXT_OFFSET] = begin + length
        return begin

    def _reserve(self, begin: int, needed: int, end: int) -> int:
        """Reserves space for many samples, or else for the needed bytes; returns its end."""
        # The file is sparse, and a write into a hole on a full disk would kill the process
        # (SIGBUS).
        for target in (min(max(needed, begin + CHUNK_BYTES), end), needed):
            try:
                reserve(self._file, begin, target - begin)
            except OSError as error:
                if not means_full(error):
                    raise
            else:
                return target
        return begin

    def _find_gap(self, length: int, extents: np.ndarray) -> int | None:
        """Takes space in a gap, which becomes the current one; returns the offset."""
        for begin, end in find_gaps(extents, self.capacity_bytes, length):
            # Reserve space in the gap again, because it may be a hole in the file; this does not
            # change allocated bytes.
            self._state[[NEXT_OFFSET, RESERVED_END, GAP_END]] = begin, begin, end
            offset = self._append(length)
            if offset is not None:
                return offset
        return None


def find_gaps(extents: np.ndarray, capacity: int, length: int = 1) -> list[tuple[int, int]]:
    """Returns start and end of each gap, the shortest first: long ones are left for long samples.

    Example:
      >>> find_gaps(np.array([[4, 2], [0, 1], [5, 3], [90, 20]]), 100)
      [(1, 4), (8, 100)]
    """
    begins, lengths = extents.T
    # Compared without `begins + lengths`, which could overflow.
    inside = (begins >= 0) & (lengths > 0) & (lengths <= capacity) & (begins <= capacity - lengths)
    begins, lengths = begins[inside], lengths[inside]
    order = np.argsort(begins)
    # Corrupted extents may overlap, so each end is the maximum of all before it.
    begins, ends = begins[order], np.maximum.accumulate((begins + lengths)[order])
    free = np.stack([np.append(0, ends), np.append(begins, capacity)], axis=1)
    sizes = free[:, 1] - free[:, 0]
    order = np.argsort(sizes, kind="stable")
    return [(int(begin), int(end)) for begin, end in free[order[sizes[order] >= length]]]


class Columns:
    """The `samples` file of a store: a column per component, so that a batch is one copy each.

    Components that differ in size lie in a heap; their columns contain its offset and length, and
    the dimensions. `arrays` are the columns, each `[slots, ...]`, and `pages` is the mapping of the
    file.
    """

    def __init__(self, folder: Folder, layout: Layout, numbers: np.ndarray) -> None:
        self._layout, self._numbers = layout, numbers
        self.pages = folder.map_file("samples")
        self.arrays = layout.columns(self.pages, len(numbers))
        self.heap = Heap(folder) if layout.varies else None

    def write(self, index: int, rows: Sequence[np.ndarray]) -> int:
        """Writes a sample to its slot; returns the CRC-32 of its bytes."""
        for column, row in zip(self.arrays, rows, strict=True):
            column[index] = row
        # Computed from the mapping, which readers will see, not from the arrays.
        (checksum,), _ = self.checksums(np.array([index]))
        return int(checksum)

    def add_to_heap(self, arrays: Arrays, extents: Callable[[], np.ndarray]) -> Arrays | None:
        """Adds components within `heap.adding`; returns the rows, or `None` without space."""
        assert self.heap is not None
        pairs = list(zip(self._layout.components, arrays, strict=True))
        contents = [
            component.encode(array) if component.varies else b"" for component, array in pairs
        ]
        # In one piece, so that a sample that does not fit is not written partially.
        begin = self.heap.add(b"".join(contents), extents)
        if begin is None:
            return None
        # There is one more offset than components: the end of the last one.
        offsets = itertools.accumulate(map(len, contents), initial=begin)
        return [
            np.array([offset, len(content), *array.shape]) if component.varies else array
            for (component, array), content, offset in zip(pairs, contents, offsets, strict=False)
        ]

    def extents(self, ready: np.ndarray) -> np.ndarray:
        """Returns offset and length in the heap of components of some slots, `[k, 2]` int64."""
        pairs = zip(self.arrays, self._layout.components, strict=True)
        return np.concatenate(
            [column[ready, :2] for column, component in pairs if component.varies]
        )

    def copy(
        self,
        indices: np.ndarray,
        into: Sequence[np.ndarray] | None = None,
        checksums: np.ndarray | None = None,
    ) -> Arrays:
        """Copies rows into one array `[n, *shape]` per component; no component may vary."""
        if into is None:
            into = [
                np.empty((len(indices), *column.shape[1:]), column.dtype) for column in self.arrays
            ]
        for column, target in zip(self.arrays, into, strict=True):
            gather(column, indices, target, checksums)
        return list(into)

    def views(self, index: int) -> Arrays:
        """Returns the row of each column, without a copy."""
        return [column[index] for column in self.arrays]

    def read(self, index: int) -> tuple[Arrays, list[bytes | None]]:
        """Returns copies of a sample's rows, and of its contents in the heap, not verified."""
        rows = [np.array(row) for row in self.views(index)]
        return rows, list(map(self._heap_content, rows, self._layout.components))

    def _heap_content(self, row: np.ndarray, component: Component) -> bytes | None:
        if not component.varies or self.heap is None:
            return b""
        content = self.heap.content(*row[:2].tolist())
        return None if content is None else bytes(content)

    def decode(self, rows: Arrays, contents: Sequence[bytes | None]) -> Arrays:
        """Returns the components of a sample from the result of `read`."""
        return [
            component.decode(content, row[2:].tolist()) if component.varies else row
            for component, content, row in zip(self._layout.components, contents, rows, strict=True)
        ]

    def begin_checksums(self, indices: np.ndarray) -> np.ndarray:
        """Returns checksums of the samples' indices, `[n]` uint32, to update with their bytes."""
        # Including the index makes an intact sample in the slot of another one corrupted.
        return self._number_checksums[indices]

    @functools.cached_property
    def _number_checksums(self) -> np.ndarray:
        checksums = np.zeros(len(self._numbers), np.uint32)
        gather(self._numbers, np.arange(len(self._numbers)), None, checksums)
        return checksums

    def checksums(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns checksums of samples, `[n]` uint32, and which lie inside the heap, `[n]` bool."""
        checksums, inside = self.begin_checksums(indices), np.ones(len(indices), bool)
        for column, component in zip(self.arrays, self._layout.components, strict=True):
            gather(column, indices, None, checksums)
            for i, index in enumerate(indices if component.varies else ()):
                assert self.heap is not None
                content = self.heap.content(*map(int, column[index, :2]))
                inside[i] &= content is not None
                checksums[i] = zlib.crc32(content or b"", int(checksums[i]))
        return checksums, inside

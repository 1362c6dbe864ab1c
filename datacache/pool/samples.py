"""Manages the metadata of samples, and the heap for samples that differ in size.

The metadata word of a sample contains its checksum and whether it is ready. Only these words
determine which bytes of the columns and the heap are in use.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from datacache.pool.folder import StoreFile
from datacache.system.room import means_full, reserve

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
READY = 1 << 32
"""Bit that is set once a sample is complete; the bits below contain the CRC-32 of its bytes."""
CHECKSUM = READY - 1
BOOT_SHIFT = 33
"""Index of the first bit of the boot number in a verified word."""
CHUNK_BYTES = 2**24
"""Number of bytes that are reserved at a time: a power of two that holds many samples."""
NEXT_OFFSET, RESERVED_END, GAP_END, REFUSED_BYTES = range(4)
"""Indices into the shared state of a heap, all int64: offset of the next sample; end of the
reserved disk space; end of the gap that is being filled; shortest length that did not fit."""
NONE_REFUSED = np.iinfo(np.int64).max


@functools.cache
def boot_number() -> int:
    """Returns a number from 1 to 2^31 - 1 that, with high probability, differs between boots."""
    # The number is equal in all processes and containers of the machine, which share the kernel. It
    # is never 0, so that the verified word of a new store matches no word.
    digits = hashlib.sha256(BOOT_ID.read_bytes()).hexdigest()
    return int(digits, 16) % (2**31 - 1) + 1


class SampleWords:
    """Two 64-bit metadata words per slot, shared by all processes: current and last verified word.

    A checksum is verified once per boot and not once per process: memory does not change while the
    machine runs, but a power failure corrupts data that a disk has not yet written. The verified
    word also contains the number of the boot.
    """

    def __init__(self, section: np.ndarray) -> None:
        # Other processes may write the words at any time.
        self.array, self._verified = section.view(np.uint64).reshape(2, -1)
        # Use np.uint64, because NumPy 1 cannot combine an unsigned integer with a Python int.
        self._boot = np.uint64(boot_number() << BOOT_SHIFT)
        # This process need not verify the slots that it wrote itself.
        self._trusted = np.zeros(len(self.array), bool)

    def withdraw(self, index: int) -> None:
        """Marks a slot as not ready; must precede any change of its bytes."""
        self.array[index] = self._verified[index] = 0

    def publish(self, index: int, checksum: int) -> None:
        """Marks a slot as ready; must follow all writes of its bytes."""
        # Do not mark the slot as verified: other processes must verify the written bytes. If this
        # process is killed before this line, the slot is not ready and needs no cleanup.
        self.array[index] = READY | checksum
        self._trusted[index] = True

    def clear(self) -> None:
        """Marks all slots as not ready."""
        self.array[:] = self._verified[:] = 0
        self._trusted[:] = False

    def unverified(self, indices: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Returns which of these slots have not been verified in this boot, `[n]` bool."""
        return ~self._trusted[indices] & (self._verified[indices] != words | self._boot)

    def unchanged(self, indices: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Returns which slots were ready, and neither cleared nor rewritten since, `[n]` bool."""
        return (words >= READY) & (self.array[indices] == words)

    def settle(self, indices: np.ndarray, words: np.ndarray, intact: np.ndarray) -> np.ndarray:
        """Marks intact slots as verified, and corrupted ones as not ready.

        A slot that another process has cleared or rewritten since is skipped: the bytes may be a
        mixture of both versions, and do not show whether either is intact. Returns which slots are
        corrupted, `[n]` bool.
        """
        # If a word has changed since, this mark does not match it and has no effect.
        self._verified[indices[intact]] = words[intact] | self._boot
        corrupt = self.unchanged(indices, words) & ~intact
        # NumPy has no compare-and-swap, so a concurrent write of a word could be lost. Only 0 is
        # safe to write: at worst, a sample is produced again.
        self.array[indices[corrupt]] = 0
        # Another process may rewrite these slots, and this process must verify the new bytes.
        self._trusted[indices[corrupt]] = False
        return corrupt


def match_checksums(words: np.ndarray, checksums: np.ndarray) -> np.ndarray:
    """Returns which samples are ready and match the checksums in their words, `[n]` bool."""
    return (words & CHECKSUM == checksums) & (words >= READY)


class Heap:
    """The heap of a store, for packed samples that differ in size.

    Samples are appended. Once the heap has no space at its end, new samples fill the gaps that
    cleared, corrupted and unfinished samples leave. Nothing has to be freed explicitly, and a
    killed process leaves at most a gap.
    """

    def __init__(self, file: StoreFile) -> None:
        self._file, self._lock = file, threading.Lock()
        self._bytes = file.sections["heap"]
        self.capacity_bytes = len(self._bytes)
        self._state = file.sections["heap_state"].view(np.int64)
        # Reset the shared cursor, because after a power failure samples on a disk may be newer than
        # the cursor. Zeros are an empty gap, so the next `add` searches for a gap.
        with self.adding():
            self._state[:] = 0, 0, 0, NONE_REFUSED

    @contextlib.contextmanager
    def adding(self) -> Iterator[None]:
        """Locks the heap against other threads and processes until added bytes are published."""
        # Without the lock, other processes would treat bytes that are not yet published as a gap.
        # The first lock lets threads of this process wait without opening the file. The second one
        # locks the byte after the bytes of the claims.
        byte = self._file.spec.shard.kept_samples + 1
        with self._lock, self._file.locked_bytes([byte], wait=True):
            yield

    def add(self, content: bytes, extents: Callable[[], np.ndarray]) -> int | None:
        """Adds bytes within `adding`; returns their offset, or `None` if they do not fit."""
        length = len(content)
        # Without this check, a full heap would be searched for each sample of each epoch.
        if length >= self._state[REFUSED_BYTES]:
            return None
        offset = self._append(length)
        for begin, end in (
            find_gaps(extents(), self.capacity_bytes, length) if offset is None else ()
        ):
            # Reserve space in the gap again, because it may be a hole in the file; this does not
            # change allocated bytes.
            self._state[[NEXT_OFFSET, RESERVED_END, GAP_END]] = begin, begin, end
            offset = self._append(length)
            if offset is not None:
                break
        if offset is None:
            self._state[REFUSED_BYTES] = length
        else:
            self._bytes[offset : offset + length] = np.frombuffer(content, np.uint8)
        return offset

    def note_freed(self) -> None:
        """Records that there may be free space, so that the next sample searches for it."""
        self._state[REFUSED_BYTES] = NONE_REFUSED

    def content(self, offset: int, length: int) -> memoryview | None:
        """Returns the bytes at an offset without a copy, or `None` if they are out of bounds."""
        if not 0 <= offset <= offset + length <= self.capacity_bytes:
            return None
        return self._bytes.data[offset : offset + length]

    def _append(self, length: int) -> int | None:
        """Takes space at the cursor; returns its offset, or `None` if the length does not fit."""
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
        """Reserves a chunk, or only up to `needed` if it does not fit; returns the reserved end."""
        # The file is sparse: writing into a hole on a full disk would kill the process (SIGBUS).
        for target in (min(max(needed, begin + CHUNK_BYTES), end), needed):
            try:
                reserve(self._file.file, self._file.heap_begin + begin, target - begin)
                return target
            except OSError as error:
                if not means_full(error):
                    raise
        return begin


def find_gaps(extents: np.ndarray, capacity: int, length: int = 1) -> list[tuple[int, int]]:
    """Returns start and end of each gap, shortest first, to leave long gaps for long samples.

    Example:
      >>> find_gaps(np.array([[4, 2], [0, 1], [5, 3], [90, 20]]), 100)
      [(1, 4), (8, 100)]
    """
    begins, lengths = extents.T
    # Do not compare `begins + lengths`, which could overflow.
    inside = (begins >= 0) & (lengths > 0) & (lengths <= capacity) & (begins <= capacity - lengths)
    begins, lengths = begins[inside], lengths[inside]
    order = np.argsort(begins)
    # Corrupted extents may overlap, so each end is the maximum of all before it.
    begins, ends = begins[order], np.maximum.accumulate((begins + lengths)[order])
    free = np.stack([np.append(0, ends), np.append(begins, capacity)], axis=1)
    sizes = free[:, 1] - free[:, 0]
    order = np.argsort(sizes, kind="stable")
    return [(int(begin), int(end)) for begin, end in free[order[sizes[order] >= length]]]

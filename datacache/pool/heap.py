"""Bytes of samples that differ in size: never moved, mapped by all processes of a node."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator

import numpy as np

from datacache.pool.folder import Folder, lock_byte
from datacache.pool.header import TAIL_BYTES
from datacache.system.boot import boot_number
from datacache.system.forks import opened_again
from datacache.system.room import means_full, reserve

CHUNK_BYTES = 2**24
"""Bytes that are reserved at a time: a power of two that holds many samples."""
NEXT_OFFSET, RESERVED_END, GAP_END, REFUSED_BYTES, USED_BYTES, BOOT = range(6)
"""Indices of what processes share in the file `end`, all int64: where the next sample goes; up to
where room on the disk is reserved; where the gap ends that is being filled; the shortest length
that found no room; bytes of samples without gaps; the boot in which all this was written, which
pools of older versions do not have."""
STATE_BYTES = 6 * 8
NONE_REFUSED = np.iinfo(np.int64).max


class Heap:
    """The `heap` file of a pool.

    Samples are added one after the other. When that room ends, the gaps are found that others have
    left: samples that were cleared, corrupt or never finished. So nothing has to be given back, and
    a process that is killed leaves no more than a gap.

    The words of the pool alone decide what is in use. What processes share besides is a cursor that
    saves the search, and is thrown away where it may be older than the words.

    Attributes:
      capacity_bytes: Size limit of the heap.
    """

    def __init__(self, folder: Folder) -> None:
        self._lock = threading.Lock()
        self._handle = folder.directory.open("heap")
        self.capacity_bytes = os.fstat(self._handle).st_size - TAIL_BYTES
        self._bytes = mmap.mmap(self._handle, 0)
        self._end = folder.directory.open("end")
        values = (os.fstat(self._end).st_size - TAIL_BYTES) // 8
        self._state = np.ndarray((values,), np.int64, mmap.mmap(self._end, 0))
        # A new file holds zeros, which would refuse every sample.
        self.note_freed()

    @property
    def used_bytes(self) -> int:
        """Bytes of samples, with those that were cleared or found corrupt since the last search."""
        return int(self._state[USED_BYTES])

    def reset(self, extents: np.ndarray) -> None:
        """Discards the cursor of earlier processes, whose machine may have lost its power."""
        with self.adding():
            # An empty gap: the next sample searches.
            self._state[[NEXT_OFFSET, RESERVED_END, GAP_END]] = 0
            self._state[USED_BYTES] = extents[:, 1].sum()

    @contextlib.contextmanager
    def adding(self) -> Iterator[None]:
        """Locks the heap for adding, among all threads and processes.

        Bytes that are added must be published in the pool's words before the lock is released:
        to others, all that is not published is a gap.
        """
        # The first lock is for threads of this process, which then need not open the file to wait.
        with self._lock, opened_again(self._end) as handle:
            # Of a description of its own, with whose end the kernel ends the lock.
            lock_byte(handle, 0, wait=True)
            self._begin_boot()
            yield

    def _begin_boot(self) -> None:
        """Discards the cursor if an earlier boot wrote it: the disk may hold newer samples."""
        boot = int(boot_number())
        if len(self._state) > BOOT and self._state[BOOT] != boot:
            self._state[[NEXT_OFFSET, RESERVED_END, GAP_END]] = 0
            self.note_freed()
            self._state[BOOT] = boot

    def add(self, content: bytes, extents: Callable[[], np.ndarray]) -> int | None:
        """Adds bytes; called within `adding`.

        Returns:
          Offset of the bytes in the heap, or `None` if no gap is long enough or the disk is full.
        """
        length = len(content)
        # A full heap would be searched for each sample of each epoch.
        if length >= self._state[REFUSED_BYTES]:
            return None
        offset = self._append(length)
        if offset is None:
            offset = self._find_gap(length, extents())
        if offset is None:
            self._state[REFUSED_BYTES] = length
            return None
        self._bytes[offset : offset + length] = content
        self._state[USED_BYTES] += length
        return offset

    def note_freed(self) -> None:
        """Says that there may be room again, so that the next sample searches for it."""
        self._state[REFUSED_BYTES] = NONE_REFUSED

    def content(self, offset: int, length: int) -> memoryview | None:
        """Returns the bytes at an offset without a copy, or `None` if they reach outside."""
        if not 0 <= offset <= offset + length <= self.capacity_bytes:
            return None
        return memoryview(self._bytes)[offset : offset + length]

    def close(self) -> None:
        """Closes the file; arrays into it keep the mapping."""
        os.close(self._handle)
        os.close(self._end)

    def _append(self, length: int) -> int | None:
        """Takes room behind the last sample; returns its offset, or `None` without room there."""
        begin, reserved, end = map(int, self._state[[NEXT_OFFSET, RESERVED_END, GAP_END]])
        # A cursor that makes no sense is treated as an empty gap.
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
        """Reserves room for many samples, or else for what is needed; returns where it ends.

        The file has holes, and a write into a hole of a full disk would end the process (SIGBUS).
        """
        for target in (min(max(needed, begin + CHUNK_BYTES), end), needed):
            try:
                reserve(self._handle, begin, target - begin)
            except OSError as error:
                if not means_full(error):
                    raise
            else:
                return target
        return begin

    def _find_gap(self, length: int, extents: np.ndarray) -> int | None:
        """Takes room in a gap, which is then filled from there on; returns the offset."""
        self._state[USED_BYTES] = extents[:, 1].sum()
        for begin, end in find_gaps(extents, self.capacity_bytes, length):
            # Room in a gap is reserved again, as the gap may be a hole in the file; to reserve what
            # is there changes nothing.
            self._state[[NEXT_OFFSET, RESERVED_END, GAP_END]] = begin, begin, end
            offset = self._append(length)
            if offset is not None:
                return offset
        return None


def find_gaps(extents: np.ndarray, capacity: int, length: int = 1) -> list[tuple[int, int]]:
    """Returns begin and end of each gap, the shortest first.

    Filling short gaps first keeps long ones for long samples.

    Example:
      >>> find_gaps(np.array([[4, 2], [0, 1], [5, 3], [90, 20]]), 100)
      [(1, 4), (8, 100)]
    """
    begins, lengths = extents.T
    # Compared without `begins + lengths`, which could overflow.
    inside = (begins >= 0) & (lengths > 0) & (lengths <= capacity) & (begins <= capacity - lengths)
    begins, lengths = begins[inside], lengths[inside]
    order = np.argsort(begins)
    # Corrupt extents may overlap, so each end is that of all before it.
    begins, ends = begins[order], np.maximum.accumulate((begins + lengths)[order])
    free = np.stack([np.append(0, ends), np.append(begins, capacity)], axis=1)
    sizes = free[:, 1] - free[:, 0]
    order = np.argsort(sizes, kind="stable")
    return [(int(begin), int(end)) for begin, end in free[order[sizes[order] >= length]]]

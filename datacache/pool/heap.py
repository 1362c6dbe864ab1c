"""Bytes of samples that differ in size: never moved, mapped by all processes of a node."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

import numpy as np

from datacache.pool.folder import Folder
from datacache.pool.header import TAIL_BYTES
from datacache.system.descriptors import lock_byte, opened_again
from datacache.system.room import means_full, reserve

CHUNK_BYTES = 2**24
"""Bytes that are reserved at a time: a power of two that holds many samples."""
NEXT_OFFSET, RESERVED_END, GAP_END, REFUSED_BYTES = range(4)
"""Indices into the shared file `end`, all int64: offset of the next sample; end of the reserved
disk space; end of the gap that is being filled; shortest length that did not fit."""
NONE_REFUSED = np.iinfo(np.int64).max


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
        # A new file contains zeros, which would refuse every sample.
        self.note_freed()

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

"""Bytes of samples that differ in size: never moved, mapped by all processes of a node."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator

import numpy as np

from datacache.pool.folder import Folder, lock_byte
from datacache.pool.header import TAIL
from datacache.system.boot import boot_number
from datacache.system.forks import unshared
from datacache.system.room import reserve, says_full

CHUNK = 2**24
"""Bytes of which the room is taken at a time: a power of two that holds many samples."""
NEXT, TAKEN, END, REFUSED, USED, BOOT = range(6)
"""What processes share: where the next sample goes, how far room is taken, where the gap ends that is being filled; the
shortest length that found no room; bytes of samples, gaps left out; in which boot all of this was written, which pools
of older versions do not say."""
STATE_BYTES = 6 * 8
NONE = np.iinfo(np.int64).max


class Heap:
    """The `heap` file of a pool.

    Samples are added one behind the other. At the end of that room the gaps are found that others have left: samples
    that were cleared, torn or never finished. So nothing has to be given back, and a kill leaves a gap until then.

    Args:
      folder: Of the pool.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._handle = folder.directory.open("heap")
        self.capacity = os.fstat(self._handle).st_size - TAIL
        self._bytes = mmap.mmap(self._handle, 0)
        with self._ends() as handle:
            values = (os.fstat(handle).st_size - TAIL) // 8
            self._state = np.ndarray((values,), np.int64, mmap.mmap(handle, 0))
        self.freed()

    def begin(self, extents: np.ndarray) -> None:
        """Believes nothing of what earlier processes have left, who may have lost their power, but what is in use."""
        with self.adding():
            self._state[[NEXT, TAKEN, END]] = 0
            self._state[USED] = extents[:, 1].sum()

    @contextlib.contextmanager
    def adding(self) -> Iterator[None]:
        """Within it nobody else adds anything: what is added is in use or a gap, and nothing in between."""
        with self._lock, self._ends() as handle:
            lock_byte(handle, 0, wait=True)
            self._begin_boot()
            yield

    def _begin_boot(self) -> None:
        """What an earlier boot has left may be older than samples: whoever adds first believes nothing of it."""
        boot = int(boot_number())
        if len(self._state) > BOOT and self._state[BOOT] != boot:
            self._state[[NEXT, TAKEN, END]] = 0
            self.freed()
            self._state[BOOT] = boot

    def add(self, content: bytes, extents: Callable[[], np.ndarray]) -> int | None:
        """Where it lies from now on, or `None` if no gap is long enough, or the disk is full; within `adding`.

        Args:
          content: Anything.
          extents: Begin and length of all that is in use, `[n, 2]` int64, in any order.
        """
        length = len(content)
        if length >= self._state[REFUSED]:
            return None
        offset = self._behind_the_last(length)
        if offset is None:
            offset = self._in_a_gap(length, extents())
        if offset is None:
            self._state[REFUSED] = length
            return None
        self._bytes[offset : offset + length] = content
        self._state[USED] += length
        return offset

    def freed(self) -> None:
        """Says that there may be room again."""
        self._state[REFUSED] = NONE

    def content(self, offset: int, length: int) -> memoryview | None:
        """What lies there, without a copy, or `None` if that is outside."""
        if not 0 <= offset <= offset + length <= self.capacity:
            return None
        return memoryview(self._bytes)[offset : offset + length]

    @property
    def used(self) -> int:
        """Bytes of samples, with those that were cleared or torn since gaps were looked for."""
        return int(self._state[USED])

    def close(self) -> None:
        """Ends it for this object; arrays into it keep the mapping."""
        os.close(self._handle)

    def _ends(self) -> contextlib.AbstractContextManager[int]:
        # A description of its own, with which the kernel ends the lock.
        return unshared(lambda: self._folder.directory.open("end"))

    def _behind_the_last(self, length: int) -> int | None:
        begin, taken, end = map(int, self._state[[NEXT, TAKEN, END]])
        if not 0 <= begin <= begin + length <= end <= self.capacity:
            return None
        if begin + length > taken:
            taken = self._take(taken, begin + length, end)
        if begin + length > taken:
            return None
        self._state[TAKEN] = taken
        self._state[NEXT] = begin + length
        return begin

    def _take(self, begin: int, needed: int, end: int) -> int:
        """Takes room for many samples, or for what is needed; returns up to where there is room."""
        for target in (min(max(needed, begin + CHUNK), end), needed):
            try:
                reserve(self._handle, begin, target - begin)
            except OSError as error:
                if not says_full(error):
                    raise
            else:
                return target
        return begin

    def _in_a_gap(self, length: int, extents: np.ndarray) -> int | None:
        self._state[USED] = extents[:, 1].sum()
        for begin, end in gaps(extents, self.capacity, length):
            self._state[[NEXT, TAKEN, END]] = begin, begin, end
            offset = self._behind_the_last(length)
            if offset is not None:
                return offset
        return None


def gaps(extents: np.ndarray, capacity: int, length: int = 1) -> list[tuple[int, int]]:
    """Where nothing lies, the shortest first, which leaves the long ones for what needs them: begin and end of each.

    Args:
      extents: Begin and length of what lies, `[n, 2]`. What reaches outside is not believed.
      capacity: Where all ends.
      length: Of the shortest gap that is wanted.

    Example:
    >>> gaps(np.array([[4, 2], [0, 1], [5, 3], [90, 20]]), 100)
    [(1, 4), (8, 100)]
    """
    begins, lengths = extents.T
    inside = (begins >= 0) & (lengths > 0) & (lengths <= capacity) & (begins <= capacity - lengths)
    begins, lengths = begins[inside], lengths[inside]
    order = np.argsort(begins)
    begins, ends = begins[order], np.maximum.accumulate((begins + lengths)[order])
    free = np.stack([np.append(0, ends), np.append(begins, capacity)], axis=1)
    sizes = free[:, 1] - free[:, 0]
    order = np.argsort(sizes, kind="stable")
    return [(int(begin), int(end)) for begin, end in free[order[sizes[order] >= length]]]

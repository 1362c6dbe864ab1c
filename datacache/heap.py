"""Bytes of samples that differ in size: added at the end, never moved, mapped by all processes of a node."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import numpy as np

from datacache.folder import lock_byte, reserve, says_full, unlock_byte

CHUNK = 2**24
"""Bytes by which the file grows: a power of two that holds many samples."""


class Heap:
    """The `heap` file of a pool, and where it ends in `end`.

    A process that is killed while it adds leaves a gap, no more.

    Args:
      folder: Of the pool.
    """

    def __init__(self, folder: Path) -> None:
        self._handle = os.open(folder / "heap", os.O_RDWR)
        self.capacity = os.fstat(self._handle).st_size
        self._bytes = mmap.mmap(self._handle, self.capacity)
        self._lock, self._locks = threading.Lock(), os.open(folder / "end", os.O_RDWR)
        self._end = np.ndarray((2,), np.int64, mmap.mmap(self._locks, 16))

    @staticmethod
    def make(folder: Path, capacity: int) -> None:
        """Files with no room taken yet, for at most so many bytes."""
        for name, size in (("heap", max(capacity, 1)), ("end", 16)):
            with (folder / name).open("wb") as stream:
                os.ftruncate(stream.fileno(), size)

    def add(self, content: bytes) -> int | None:
        """Where it lies from now on, or `None` if the disk or the capacity is full."""
        offset = self._take(len(content))
        if offset is not None:
            self._bytes[offset : offset + len(content)] = content
        return offset

    def content(self, offset: int, length: int) -> memoryview | None:
        """What lies there, without a copy, or `None` if that is outside."""
        if not 0 <= offset <= offset + length <= self._end[0]:
            return None
        return memoryview(self._bytes)[offset : offset + length]

    @property
    def used(self) -> int:
        """Bytes up to the end."""
        return int(self._end[0])

    def close(self) -> None:
        """Ends it for this object; arrays into it keep the mapping."""
        os.close(self._handle)
        os.close(self._locks)

    def _take(self, length: int) -> int | None:
        with self._lock:
            lock_byte(self._locks, 0, wait=True)
            try:
                end, reserved = map(int, self._end)
                if end + length > self.capacity:
                    return None
                if end + length > reserved:
                    size = min(max(length, CHUNK), self.capacity - reserved)
                    reserve(self._handle, reserved, size)
                    self._end[1] = reserved + size
                self._end[0] = end + length
                return end
            except OSError as error:
                if not says_full(error):
                    raise
                return None
            finally:
                unlock_byte(self._locks, 0)

"""Manages the heap of a store, for samples that differ in size."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import numpy as np

from datacache.pool.folder import StoreFile
from datacache.system.room import means_full, reserve

CHUNK_BYTES = 2**24
"""Number of bytes that are reserved at a time: a power of two that holds many samples."""
UNKNOWN = -1
"""State of a heap whose end must be computed from its samples."""


class Heap:
    """The heap of a store, to which packed samples are appended.

    The space of a corrupted sample is free again once the store is cleared. Nothing has to be
    repaired after a process is killed: the next sample overwrites the unfinished sample.
    """

    def __init__(self, file: StoreFile) -> None:
        self._file, self._lock = file, threading.Lock()
        self._bytes = file.sections["heap"]
        self._state = file.sections["heap_state"].view(np.int64)
        self._reserved = range(0)
        # After a power failure, samples on a disk may be newer than the stored end.
        self.forget_end()

    @contextlib.contextmanager
    def adding(self) -> Iterator[None]:
        """Locks the heap against other threads and processes until added bytes are published."""
        # Another process must not allocate bytes that are not yet published. The second lock is on
        # the byte after those that `claim` and `claim_all` lock.
        byte = self._file.spec.shard.kept_samples + 1
        with self._lock, self._file.locked_bytes([byte], wait=True):
            yield

    def add(self, content: bytes, places: Callable[[], np.ndarray]) -> int | None:
        """Adds bytes within `adding`; returns their offset, or `None` if they do not fit.

        `places` returns offset and length of all ready samples, `[n, 2]` int64.
        """
        begin = int(self._state[0])
        if not 0 <= begin <= len(self._bytes):
            begin = _end(places(), len(self._bytes))
        end = begin + len(content)
        self._state[0] = begin
        if end > len(self._bytes) or not self._reserve(begin, end):
            return None
        self._bytes[begin:end] = np.frombuffer(content, np.uint8)
        self._state[0] = end
        return begin

    def forget_end(self) -> None:
        """Makes the next `add` compute the end from the samples that are ready."""
        self._state[0] = UNKNOWN

    def content(self, offset: int, length: int) -> memoryview | None:
        """Returns the bytes at an offset without a copy, or `None` if they are out of bounds."""
        if not 0 <= offset <= offset + length <= len(self._bytes):
            return None
        return self._bytes.data[offset : offset + length]

    def _reserve(self, begin: int, end: int) -> bool:
        """Reserves a chunk, or only up to `end` if space is short; returns whether it succeeds."""
        if self._reserved.start <= begin and end <= self._reserved.stop:
            return True
        # Writing into a hole of the sparse file on a full disk would kill the process (SIGBUS).
        for target in (min(max(end, begin + CHUNK_BYTES), len(self._bytes)), end):
            try:
                reserve(self._file.file, self._file.heap_begin + begin, target - begin)
                self._reserved = range(begin, target)
                return True
            except OSError as error:
                if not means_full(error):
                    raise
        return False


def _end(places: np.ndarray, capacity: int) -> int:
    """Returns the largest end offset of the samples that are within the capacity."""
    offsets, lengths = places.T
    # Do not compare `offsets + lengths`, which could overflow.
    inside = (
        (offsets >= 0) & (lengths > 0) & (lengths <= capacity) & (offsets <= capacity - lengths)
    )
    return int((offsets + lengths)[inside].max(initial=0))

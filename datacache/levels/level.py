"""Interface of the levels of a node."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

import numpy as np

from datacache.errors import CacheError
from datacache.pool.layout import Arrays

Stream = Callable[[Collection[int]], Iterator[tuple[int, Arrays]]]
"""Reads all samples in order, and yields index and components of those in the collection. The
others are skipped before they are decoded."""


class Level(Protocol):
    """Samples in one form, on top of the level that has what this one lacks.

    A level answers from what it holds and asks the level below for the rest. Calls go down only: no
    level knows which one is above it. The source is the last.

    Attributes:
      stream: Function that reads the samples of a source which has them one after the other only.
        `None` where any sample can be had by its index.
    """

    stream: Stream | None

    def samples(self, indices: np.ndarray) -> list[Arrays]:
        """Returns the components of samples, in the order of `indices`."""
        ...

    def put(self, index: int, arrays: Arrays) -> bool:
        """Keeps a sample that came from elsewhere, on each level below that has room, and on this.

        Returns:
          True if this level holds the sample now.
        """
        return False  # Levels without a pool keep nothing.

    def clear(self) -> None:
        """Forgets all cached samples of this level and of those below; stored samples stay."""
        return  # Levels without a pool hold none.

    def close(self) -> None:
        """Ends threads and mappings of this level and of those below."""
        ...


class Opener:
    """The process that opened a cache, which alone can make samples."""

    def __init__(self) -> None:
        self._process = os.getpid()

    def refuse_in_child(self, indices: np.ndarray) -> None:
        """Refuses to make samples in a forked child."""
        if indices.size and os.getpid() != self._process:
            raise CacheError(
                "Samples must be made by the process that opened the cache: neither threads nor "
                f"TensorFlow survive a fork. Received: sample {indices[0]}, which is not in "
                f"memory, in process {os.getpid()}, forked from {self._process}. Call cache.warm() "
                "before, or read in threads, as cache.pydataset(..., workers=4) does: copying lets "
                "others run."
            )

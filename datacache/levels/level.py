"""What the levels of a node have in common."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

import numpy as np

from datacache.errors import CacheError
from datacache.pool.layout import Arrays

Stream = Callable[[Collection[int]], Iterator[tuple[int, Arrays]]]


class Level(Protocol):
    """Samples in one form, and the level below that has what this one lacks.

    A level answers from what it holds and asks the level below for the rest. Calls go down only: no level knows
    which one is above it. The source is the last.

    Attributes:
      stream: Reads a source that has its samples one after the other only, from its beginning to its end: given the
        indices of the samples that are needed, yields index and components of each. `None` where samples can be had
        by index; otherwise `samples` raises.
    """

    @property
    def stream(self) -> Stream | None:
        """Reads a source that has its samples one after the other only."""
        ...

    def samples(self, indices: np.ndarray) -> list[Arrays]:
        """Returns the components of samples.

        Args:
          indices: Indices of the samples, `[n]` int64, each at most once.

        Raises:
          SourceError: If a sample cannot be had; the error names it.
        """
        ...

    def close(self) -> None:
        """Ends the threads and mappings of this level and of those below."""
        ...


class Opener:
    """The process that opened a cache: no other one can make samples."""

    def __init__(self) -> None:
        self._process = os.getpid()

    def check(self, indices: np.ndarray) -> None:
        """Raises an error in a forked child.

        Args:
          indices: Indices of the samples to be made; without any there is nothing to refuse.

        Raises:
          CacheError: If there are any, and this process was forked from the one that opened the cache.
        """
        if indices.size and os.getpid() != self._process:
            raise CacheError(
                "Samples must be made by the process that opened the cache: neither threads nor "
                f"TensorFlow survive a fork. Received: sample {indices[0]}, which is not in "
                f"memory, in process {os.getpid()}, forked from {self._process}. Call cache.warm() "
                "before, or read in threads, as cache.pydataset(..., workers=4) does: copying lets "
                "others run."
            )

"""Interface of the storage tiers of a node."""

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
    """Samples in one form, on top of a tier that supplies missing samples.

    Calls only go down: no tier knows the one above it, and the source is the last. `stream` reads
    the samples of a source without random access; it is `None` if any sample can be read by its
    index.
    """

    stream: Stream | None

    def samples(self, indices: np.ndarray) -> list[Arrays]:
        """Returns the components of samples, in the order of `indices`."""
        ...

    def put(self, index: int, arrays: Arrays) -> bool:
        """Stores an externally produced sample in this and all lower tiers with free space.

        Returns whether this tier holds the sample now.
        """
        return False  # Tiers without a store hold nothing.

    def clear(self) -> None:
        """Removes all cached samples of this tier and of those below; stored samples stay."""
        return  # Tiers without a store hold none.

    def close(self) -> None:
        """Ends threads and mappings of this tier and of those below."""
        ...


class Opener:
    """Process that opened a cache; only this process can produce samples."""

    def __init__(self) -> None:
        self._process = os.getpid()

    def refuse_in_child(self, indices: np.ndarray) -> None:
        """Raises `CacheError` if a forked child would have to produce samples."""
        if indices.size and os.getpid() != self._process:
            raise CacheError(
                "Samples must be produced by the process that opened the cache: neither threads "
                f"nor TensorFlow survive a fork. Received: sample {indices[0]}, which is not in "
                f"memory, in process {os.getpid()}, forked from {self._process}. Call cache.warm() "
                "before the fork, or read in threads, as cache.pydataset(..., workers=4) does: "
                "other threads run during a copy."
            )

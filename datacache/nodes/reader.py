"""Readers of batches: from the tiers of this node, and from other nodes that share the samples."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from typing_extensions import override

from datacache.errors import Closed
from datacache.levels.levels import Levels
from datacache.pool.layout import Arrays, stack_samples


class Reader(ABC):
    """Reads batches from memory, after loading missing samples into it."""

    def __init__(self, levels: Levels) -> None:
        self.levels, self._counts = levels, levels.counts

    @abstractmethod
    def look_ahead(self, shares: Sequence[np.ndarray]) -> Callable[[int], None]:
        """Prepares an epoch; returns a function to call with each step before its batch is read."""

    @abstractmethod
    def fill(self, indices: np.ndarray) -> dict[int, Arrays]:
        """Loads samples into memory; returns by index those that memory did not accept."""

    @abstractmethod
    def close(self) -> None:
        """Ends threads and mappings."""

    def _close_levels(self) -> None:
        self.levels.close()
        self.levels = cast("Levels", Closed())

    def batch(self, indices: np.ndarray, into: Sequence[np.ndarray] | None = None) -> Arrays:
        """Returns an array `[n, *shape]` per component, padded at the end where components vary."""
        if self.levels.can_copy(indices):
            return self._copy(indices, into)
        missing = self.levels.missing(indices)
        self._count(indices, len(missing))
        made = self._timed_fill(missing)
        return stack_samples(self.levels.collect(indices, made), self.levels.layout)

    def _copy(self, indices: np.ndarray, into: Sequence[np.ndarray] | None) -> Arrays:
        """Copies a batch whose samples all have space, and repeats until all of them are intact."""
        made = 0
        while True:
            # Verification happens in the pass over the bytes that copies them.
            missing = self.levels.not_ready(indices)
            made += len(missing)
            self._timed_fill(missing)
            arrays = self.levels.gather(indices, into)
            if arrays is not None:
                self._count(indices, made)
                return arrays

    def _timed_fill(self, indices: np.ndarray) -> dict[int, Arrays]:
        if not indices.size:
            return {}
        begin = time.perf_counter()
        made = self.fill(indices)
        self._counts.add(wait_s=time.perf_counter() - begin)
        return made

    def _count(self, indices: np.ndarray, made: int) -> None:
        self._counts.add(memory_hits=len(indices) - made, memory_misses=made)


class LocalReader(Reader):
    """Reads from the tiers of this node only."""

    @override
    def look_ahead(self, shares: Sequence[np.ndarray]) -> Callable[[int], None]:
        # Batches are prefetched in any case, which is early enough for a source.
        return lambda step: None

    @override
    def fill(self, indices: np.ndarray) -> dict[int, Arrays]:
        return self.levels.fill(indices)

    @override
    def close(self) -> None:
        self._close_levels()

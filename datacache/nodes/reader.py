"""Where batches come from: the levels of this node, and those of others where nodes share the samples."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from datacache.levels.levels import Levels
from datacache.pool.layout import Arrays, stack_samples


class Reader(ABC):
    """Reads batches from memory, after it has filled what memory lacks.

    Args:
      levels: Of this node.
    """

    def __init__(self, levels: Levels) -> None:
        self.levels, self._counts = levels, levels.counts

    @abstractmethod
    def look_ahead(self, shares: Sequence[np.ndarray]) -> Callable[[int], None]:
        """Prepares for an epoch.

        Args:
          shares: Indices of the samples of each step, int64.

        Returns:
          What to call with the index of a step before that step is read.
        """

    @abstractmethod
    def fill(self, indices: np.ndarray) -> dict[int, Arrays]:
        """Brings samples to memory; see `Levels.fill`."""

    @abstractmethod
    def close(self) -> None:
        """Ends threads and mappings."""

    def batch(self, indices: np.ndarray, into: Sequence[np.ndarray] | None = None) -> Arrays:
        """Reads a batch.

        Args:
          indices: Indices of the samples, `[n]` int64.
          into: Arrays to use for a batch that is one copy from memory.

        Returns:
          One array per component, `[n, *shape]`; components that vary are padded at their ends.

        Raises:
          SourceError: If a sample cannot be read; the error names it.
        """
        if self.levels.can_copy(indices):
            return self._copied(indices, into)
        missing = self.levels.missing(indices)
        self._count(indices, len(missing))
        made = self._timed_fill(missing)
        return stack_samples(self.levels.collect(indices, made), self.levels.layout)

    def _copied(self, indices: np.ndarray, into: Sequence[np.ndarray] | None) -> Arrays:
        """Copies samples that all have room; whether they are whole is seen on the way."""
        made = 0
        while True:
            not_ready = self.levels.not_ready(indices)
            made += len(not_ready)
            self._timed_fill(not_ready)
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
    """Reads from the levels of this node alone."""

    def look_ahead(self, shares: Sequence[np.ndarray]) -> Callable[[int], None]:
        """Does nothing: batches are read ahead anyway."""
        return lambda step: None

    def fill(self, indices: np.ndarray) -> dict[int, Arrays]:
        """See `Levels.fill`."""
        return self.levels.fill(indices)

    def close(self) -> None:
        """Closes the levels."""
        self.levels.close()

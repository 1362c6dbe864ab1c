"""Source of batches: the levels of this node, and other nodes where they share the samples."""

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
    """Reads batches from memory, and first brings there what it lacks.

    Attributes:
      levels: Levels of this node.
    """

    def __init__(self, levels: Levels) -> None:
        self.levels, self._counts = levels, levels.counts

    @abstractmethod
    def look_ahead(self, shares: Sequence[np.ndarray]) -> Callable[[int], None]:
        """Gets ready for the batches of an epoch.

        Returns:
          A function to call with the index of a step before its batch is read.
        """

    @abstractmethod
    def fill(self, indices: np.ndarray) -> dict[int, Arrays]:
        """Brings samples to memory.

        Returns:
          The samples that memory did not take, by index.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends threads and mappings."""

    def _close_levels(self) -> None:
        self.levels.close()
        self.levels = cast("Levels", Closed())

    def batch(self, indices: np.ndarray, into: Sequence[np.ndarray] | None = None) -> Arrays:
        """Reads a batch.

        Returns:
          An array `[n, *shape]` for each component; components that vary are padded at their end.
        """
        if self.levels.can_copy(indices):
            return self._copy(indices, into)
        missing = self.levels.missing(indices)
        self._count(indices, len(missing))
        made = self._timed_fill(missing)
        return stack_samples(self.levels.collect(indices, made), self.levels.layout)

    def _copy(self, indices: np.ndarray, into: Sequence[np.ndarray] | None) -> Arrays:
        """Copies a batch whose samples all have room, until all of them were whole."""
        made = 0
        while True:
            # Not verified here, but in the same pass over the bytes that copies them.
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
    """Reads from the levels of this node alone."""

    @override
    def look_ahead(self, shares: Sequence[np.ndarray]) -> Callable[[int], None]:
        # Batches are read ahead anyway, which is soon enough for a source.
        return lambda step: None

    @override
    def fill(self, indices: np.ndarray) -> dict[int, Arrays]:
        return self.levels.fill(indices)

    @override
    def close(self) -> None:
        self._close_levels()

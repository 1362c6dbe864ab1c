"""The levels of one node, from memory down to the source."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from datacache.levels.level import Level, Opener
from datacache.levels.pool_level import PoolLevel
from datacache.pool.layout import Arrays, Layout
from datacache.pool.pool import Pool
from datacache.statistics import Counts
from datacache.windows import windows


class Levels:
    """The chain of a node's levels, as those who read batches see it.

    Args:
      memory: Level of the pool in memory, if there is room for one.
      below: The level below memory: that of decoded samples on a disk, or the one that makes them.
      layout: Of cached samples.
      counts: Where all levels count.
      opener: Refuses to make samples in a forked child.
    """

    def __init__(
        self,
        memory: PoolLevel | None,
        below: Level,
        layout: Layout,
        counts: Counts,
        opener: Opener,
    ) -> None:
        self._memory, self._below = memory, below
        self.layout, self.counts, self.opener = layout, counts, opener

    @property
    def memory(self) -> Pool | None:
        """The pool in memory, if there is one."""
        return None if self._memory is None else self._memory.pool

    @property
    def is_complete(self) -> bool:
        """Whether memory holds all samples there are."""
        return self.memory is not None and self.memory.filled == self.memory.plan.part.samples

    def lacking(self, indices: np.ndarray) -> np.ndarray:
        """Returns those of these indices whose samples memory does not hold whole."""
        return indices if self._memory is None else self._memory.lacking(indices)

    def absent(self, indices: np.ndarray) -> np.ndarray:
        """Returns those of these indices whose samples memory does not hold, whole or not."""
        return indices if self._memory is None else self._memory.absent(indices)

    def copies(self, indices: np.ndarray) -> bool:
        """Returns whether a batch is one copy from memory once it holds these samples."""
        return self.memory is not None and self.memory.copies(indices)

    def copied(self, indices: np.ndarray, into: Sequence[np.ndarray] | None) -> Arrays | None:
        """Returns a batch where `copies` says so, see `PoolLevel.copied`."""
        assert self._memory is not None
        return self._memory.copied(indices, into)

    def collect(self, indices: np.ndarray, made: dict[int, Arrays]) -> list[Arrays]:
        """Returns samples that were just made, and others from memory, see `PoolLevel.collect`."""
        if self._memory is None:
            return [made[sample] for sample in indices.tolist()]
        return self._memory.collect(indices, made)

    def fill(self, indices: np.ndarray) -> dict[int, Arrays]:
        """Makes samples.

        Args:
          indices: Indices of the samples, `[n]` int64, each at most once.

        Returns:
          Those that memory has no room for, by index.

        Raises:
          CacheError: In a forked child.
          SourceError: If a sample cannot be read; the error names it.
        """
        self.opener.check(indices)
        unkept: dict[int, Arrays] = {}
        for window in windows(indices):
            unkept |= self._fill_window(window)
        return unkept

    def put(self, index: int, arrays: Arrays) -> bool:
        """Puts a sample that came from elsewhere where there is room; returns whether memory holds it now."""
        if isinstance(self._below, PoolLevel):
            self._below.put(index, arrays)
        return self._memory is not None and self._memory.put(index, arrays)

    def clear(self) -> None:
        """Forgets all cached samples in memory and on disk."""
        for level in (self._memory, self._below):
            if isinstance(level, PoolLevel):
                level.pool.clear()

    def close(self) -> None:
        """Ends threads and mappings of all levels."""
        (self._memory or self._below).close()

    def _fill_window(self, window: np.ndarray) -> dict[int, Arrays]:
        if self._memory is None:
            made = dict(zip(window.tolist(), self._below.samples(window), strict=True))
            kept: set[int] = set()
        else:
            made, kept = self._memory.fill(window)
        self.counts.add(unkept=len(window) - len(kept))
        return {sample: arrays for sample, arrays in made.items() if sample not in kept}

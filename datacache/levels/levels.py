"""Tiers of one node, from memory down to the source."""

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
    """Tiers in the form in which readers of batches use them: memory, if any, and the tiers below.

    `layout` is that of cached samples, and `counts` are the counters of this process.
    """

    def __init__(
        self,
        memory: PoolLevel | None,
        below: Level,
        layout: Layout,
        counts: Counts,
        opener: Opener,
    ) -> None:
        self._memory, self._below, self._opener = memory, below, opener
        self._top: Level = memory or below
        self.layout, self.counts = layout, counts

    @property
    def memory(self) -> Pool | None:
        """Store in memory, if any."""
        return None if self._memory is None else self._memory.pool

    @property
    def is_complete(self) -> bool:
        """True if memory holds all samples of the source."""
        return self.memory is not None and self.memory.filled == self.memory.spec.shard.samples

    def refuse_in_child(self, indices: np.ndarray) -> None:
        """Raises `CacheError` if a forked child would have to produce samples."""
        self._opener.refuse_in_child(indices)

    def missing(self, indices: np.ndarray) -> np.ndarray:
        """Returns the samples that memory lacks or holds corrupted, `[k]` int64."""
        return indices if self._memory is None else self._memory.missing(indices)

    def not_ready(self, indices: np.ndarray) -> np.ndarray:
        """Returns the samples that memory lacks, without verifying the others, `[k]` int64."""
        return indices if self._memory is None else self._memory.not_ready(indices)

    def can_copy(self, indices: np.ndarray) -> bool:
        """Returns whether `gather` can copy a batch once memory holds all its samples."""
        return self.memory is not None and self.memory.can_copy(indices)

    def gather(self, indices: np.ndarray, into: Sequence[np.ndarray] | None) -> Arrays | None:
        """Copies a batch from memory; see `PoolLevel.gather`."""
        assert self._memory is not None
        return self._memory.gather(indices, into)

    def collect(self, indices: np.ndarray, made: dict[int, Arrays]) -> list[Arrays]:
        """Returns samples from `made`, and all others from memory."""
        if self._memory is None:
            return [made[sample] for sample in indices.tolist()]
        return self._memory.collect(indices, made)

    def fill(self, indices: np.ndarray) -> dict[int, Arrays]:
        """Loads samples into memory; returns by index those that memory did not accept."""
        untaken: dict[int, Arrays] = {}
        for window in windows(indices):
            untaken |= self._fill_window(window)
        return untaken

    def put(self, index: int, arrays: Arrays) -> bool:
        """Stores an externally produced sample; returns whether memory holds it now."""
        return self._top.put(index, arrays) and self._memory is not None

    def clear(self) -> None:
        """Removes all cached samples, in memory and on disk; stored samples stay."""
        self._top.clear()

    def close(self) -> None:
        """Ends threads and mappings of all tiers."""
        self._top.close()

    def _fill_window(self, window: np.ndarray) -> dict[int, Arrays]:
        if self._memory is None:
            made = dict(zip(window.tolist(), self._below.samples(window), strict=True))
            kept: set[int] = set()
        else:
            made, kept = self._memory.fill(window)
        self.counts.add(unkept=len(window) - len(kept))
        # Drop samples that memory accepted, and read them from there: a large fill would otherwise
        # hold every sample twice.
        return {sample: arrays for sample, arrays in made.items() if sample not in kept}

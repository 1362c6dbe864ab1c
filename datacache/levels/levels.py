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
    """Chain of levels as readers of batches see it: memory, if there is any, and what is below.

    Attributes:
      layout: Layout of cached samples.
      counts: Counters of this process.
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
        """Pool in memory, if there is one."""
        return None if self._memory is None else self._memory.pool

    @property
    def is_complete(self) -> bool:
        """True if memory holds all samples of the source."""
        return self.memory is not None and self.memory.filled == self.memory.spec.shard.samples

    def refuse_in_child(self, indices: np.ndarray) -> None:
        """Refuses to make samples in a forked child; see `Opener.refuse_in_child`."""
        self._opener.refuse_in_child(indices)

    def missing(self, indices: np.ndarray) -> np.ndarray:
        """Returns which samples memory does not hold, or holds corrupt, `[k]` int64."""
        return indices if self._memory is None else self._memory.missing(indices)

    def not_ready(self, indices: np.ndarray) -> np.ndarray:
        """Returns which samples memory does not hold, without verifying the others, `[k]` int64."""
        return indices if self._memory is None else self._memory.not_ready(indices)

    def can_copy(self, indices: np.ndarray) -> bool:
        """Returns whether `gather` can copy a batch, once memory holds all its samples."""
        return self.memory is not None and self.memory.can_copy(indices)

    def gather(self, indices: np.ndarray, into: Sequence[np.ndarray] | None) -> Arrays | None:
        """Copies a batch from memory; see `PoolLevel.gather`.

        Returns:
          An array `[n, *shape]` for each component; `None` if some samples are not ready any more.
        """
        assert self._memory is not None
        return self._memory.gather(indices, into)

    def collect(self, indices: np.ndarray, made: dict[int, Arrays]) -> list[Arrays]:
        """Returns samples that were just made, and the others from memory."""
        if self._memory is None:
            return [made[sample] for sample in indices.tolist()]
        return self._memory.collect(indices, made)

    def fill(self, indices: np.ndarray) -> dict[int, Arrays]:
        """Brings samples to memory.

        Returns:
          The samples that memory did not take, by index.
        """
        untaken: dict[int, Arrays] = {}
        for window in windows(indices):
            untaken |= self._fill_window(window)
        return untaken

    def put(self, index: int, arrays: Arrays) -> bool:
        """Puts a sample that came from elsewhere into the pools of cached samples.

        Returns:
          `True` if memory holds the sample now.
        """
        return self._top.put(index, arrays) and self._memory is not None

    def clear(self) -> None:
        """Forgets all cached samples, in memory and on disk; stored samples stay."""
        self._top.clear()

    def close(self) -> None:
        """Ends threads and mappings of all levels."""
        self._top.close()

    def _fill_window(self, window: np.ndarray) -> dict[int, Arrays]:
        if self._memory is None:
            made = dict(zip(window.tolist(), self._below.samples(window), strict=True))
            kept: set[int] = set()
        else:
            made, kept = self._memory.fill(window)
        self.counts.add(unkept=len(window) - len(kept))
        # What memory took is read from there: a large fill would hold everything twice.
        return {sample: arrays for sample, arrays in made.items() if sample not in kept}

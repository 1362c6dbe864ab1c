"""A level that keeps samples in a pool, each put there by one process of the node."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from datacache.levels.level import Level, Opener, Stream
from datacache.pool.layout import Arrays
from datacache.pool.pool import Pool
from datacache.statistics import Counts

log = logging.getLogger("datacache")
POLL_S = 0.002
Verify = Literal["first", "always", "never"]


class PoolLevel:
    """A pool, and the level below for the samples that it lacks; what comes from there is kept.

    Args:
      pool: Where samples are kept.
      below: Has all samples, or streams them.
      verify: When checksums are looked at, as in `Cache`.
      counts: Where this level counts.
      hits: The count of the samples that `samples` finds in the pool; `None` does not count them.
      opener: Refuses to fill the pool in a forked child.
    """

    stream: Stream | None = None

    def __init__(
        self,
        pool: Pool,
        below: Level,
        verify: Verify,
        counts: Counts,
        hits: str | None = None,
        opener: Opener | None = None,
    ) -> None:
        self.pool, self._below, self._verify = pool, below, verify
        self._counts, self._hits, self._opener = counts, hits, opener or Opener()
        self._is_full = False

    def samples(self, indices: np.ndarray) -> list[Arrays]:
        """See `Level.samples`."""
        made, _ = self.fill(indices)
        if self._hits is not None:
            self._counts.add(**{self._hits: len(indices) - len(made)})
        return self.collect(indices, made)

    def collect(self, indices: np.ndarray, made: dict[int, Arrays]) -> list[Arrays]:
        """Returns samples that were just made, and others from the pool.

        Args:
          indices: Indices of the samples, `[n]` int64.
          made: Samples by index; the pool holds the others, unless another process has cleared them since.
        """
        found = dict(made)
        while left := [sample for sample in indices.tolist() if sample not in found]:
            held = {sample: self.pool.sample(sample) for sample in left}
            found |= {sample: arrays for sample, arrays in held.items() if arrays is not None}
            if lost := [sample for sample in left if sample not in found]:
                found |= self.fill(np.array(lost))[0]
        return [found[sample] for sample in indices.tolist()]

    def fill(self, indices: np.ndarray) -> tuple[dict[int, Arrays], set[int]]:
        """Puts samples into the pool unless they are there; whoever comes second to one waits for it.

        Args:
          indices: Indices of the samples, `[n]` int64.

        Returns:
          The samples that this call made, by index, and the indices of those that the pool holds now.

        Raises:
          CacheError: In a forked child.
          SourceError: If a sample cannot be had.
        """
        self._opener.check(indices)
        if self._below.stream is not None:
            self._pour(self._below.stream, indices)
        return self._keep(indices, self._below.samples)

    def put(self, index: int, arrays: Arrays) -> bool:
        """Keeps a sample that came from elsewhere; returns whether the pool holds it now."""
        return index in self._keep(np.array([index]), lambda _: [arrays])[1]

    def lacking(self, indices: np.ndarray) -> np.ndarray:
        """Returns those of these indices whose samples the pool does not hold whole."""
        if self._verify == "never":
            return self.absent(indices)
        corrupt = self.pool.torn(indices[self.pool.ready(indices)], again=self._verify == "always")
        self._note(corrupt)
        # Asked again: another process may have cleared some in the meantime.
        return indices[~self.pool.ready(indices) | np.isin(indices, corrupt)]

    def absent(self, indices: np.ndarray) -> np.ndarray:
        """Returns those of these indices whose samples the pool does not hold, whole or not."""
        return indices[~self.pool.ready(indices)]

    def copied(self, indices: np.ndarray, into: Sequence[np.ndarray] | None) -> Arrays | None:
        """Returns a batch of samples that the pool holds.

        Args:
          indices: Indices of the samples, `[n]` int64.
          into: Arrays to copy to, in place of new ones.

        Returns:
          One array per component, `[n, *shape]`; `None` if samples were corrupt or cleared, which are absent now.
        """
        if self._verify == "never":
            return self.pool.gather(indices, into)
        arrays, corrupt = self.pool.gather_whole(indices, into, again=self._verify == "always")
        self._note(corrupt)
        return arrays

    def close(self) -> None:
        """See `Level.close`."""
        self._below.close()
        self.pool.close()

    def _keep(
        self, indices: np.ndarray, make: Callable[[np.ndarray], list[Arrays]]
    ) -> tuple[dict[int, Arrays], set[int]]:
        room = self.pool.has_room(indices)
        made = _by_index(indices[~room], make)
        kept = set(indices[room].tolist())
        left = indices[room]
        while (left := self.lacking(left)).size:
            with self.pool.claim(left) as mine:
                new = _by_index(mine, make)
                kept -= self._put_all(new)
            made |= new
            left = left[~np.isin(left, mine)]
            # Nothing of this pool is held while others finish what they hold.
            if left.size and not mine.size:
                time.sleep(POLL_S)
        return made, kept

    def _put_all(self, made: dict[int, Arrays]) -> set[int]:
        """Returns the indices of those that had no room."""
        unkept = {sample for sample, arrays in made.items() if not self.pool.put(sample, arrays)}
        if unkept and not self._is_full:
            self._is_full = True
            log.warning(
                "datacache: no more room in %s: what it does not hold is read through. Make room "
                "(python -m datacache ls), or give a larger `budget` to a new one.",
                self.pool.folder,
            )
        return unkept

    def _pour(self, stream: Stream, indices: np.ndarray) -> None:
        """Reads a stream from its beginning into this pool, one process of the node for all."""
        while self.lacking(indices[self.pool.has_room(indices)]).size:
            with self.pool.claim_all() as mine:
                if mine:
                    everything = np.arange(self.pool.plan.part.samples)
                    lacking = self.lacking(everything[self.pool.has_room(everything)])
                    for sample, arrays in stream(set(lacking.tolist())):
                        self.pool.put(sample, arrays)
                    return
            time.sleep(POLL_S)

    def _note(self, corrupt: np.ndarray) -> None:
        if corrupt.size:
            self._counts.add(healed=len(corrupt))
            log.warning(
                "datacache: torn in %s, and made again: samples %s",
                self.pool.folder,
                corrupt.tolist(),
            )


def _by_index(indices: np.ndarray, make: Callable[[np.ndarray], list[Arrays]]) -> dict[int, Arrays]:
    return dict(zip(indices.tolist(), make(indices), strict=True)) if indices.size else {}

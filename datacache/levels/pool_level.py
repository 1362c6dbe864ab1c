"""Tier that stores samples for all processes of a node; one process produces each sample."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from typing_extensions import override

from datacache.levels.level import Level, Opener, Stream
from datacache.pool.layout import Arrays
from datacache.pool.pool import Pool
from datacache.statistics import Counts

log = logging.getLogger("datacache")
POLL_S = 0.002
"""Pause between two checks for samples that other processes are producing. A kernel lock can wait
for one process only, but several may be producing samples of a batch."""
Verify = Literal["first", "always", "never"]


class PoolLevel(Level):
    """Samples in a store that takes missing samples from the tier below."""

    # The store has random access, even if the source below streams.
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
        self._reported_full = False

    @override
    def samples(self, indices: np.ndarray) -> list[Arrays]:
        made, _ = self.fill(indices)
        if self._hits is not None:
            self._counts.add(**{self._hits: len(indices) - len(made)})
        return self.collect(indices, made)

    def collect(self, indices: np.ndarray, made: dict[int, Arrays]) -> list[Arrays]:
        """Returns samples from `made`, and all others from the store."""
        found = dict(made)
        while left := [sample for sample in indices.tolist() if sample not in found]:
            read = {sample: self.pool.read_sample(sample) for sample in left}
            found |= {sample: arrays for sample, arrays in read.items() if arrays is not None}
            if cleared := [sample for sample in left if sample not in found]:
                found |= self.fill(np.array(cleared))[0]
        return [found[sample] for sample in indices.tolist()]

    def fill(self, indices: np.ndarray) -> tuple[dict[int, Arrays], set[int]]:
        """Stores missing samples; returns those made here, and the indices of those it holds.

        If several processes request the same sample, the first produces it and the others wait.
        """
        # Must precede any claim: a child shares the locks of its parent.
        self._opener.refuse_in_child(indices)
        if self._below.stream is not None:
            self._fill_from_stream(self._below.stream, indices)
        return self._keep(indices, self._below.samples)

    @override
    def put(self, index: int, arrays: Arrays) -> bool:
        self._below.put(index, arrays)
        return index in self._keep(np.array([index]), lambda _: [arrays])[1]

    @override
    def clear(self) -> None:
        # Start at the bottom, so that a concurrent reader does not refill this tier with a sample
        # that is about to be cleared.
        self._below.clear()
        self.pool.clear()

    def missing(self, indices: np.ndarray) -> np.ndarray:
        """Returns the samples that the store lacks or holds corrupted, `[k]` int64."""
        if self._verify == "never":
            return self.not_ready(indices)
        ready = indices[self.pool.ready(indices)]
        corrupt = self.pool.find_corrupt(ready, recheck=self._verify == "always")
        self._report_corrupt(corrupt)
        # Check again, because another process may have cleared samples in the meantime.
        return indices[~self.pool.ready(indices) | np.isin(indices, corrupt)]

    def not_ready(self, indices: np.ndarray) -> np.ndarray:
        """Returns the samples that the store lacks, without verifying the others, `[k]` int64."""
        return indices[~self.pool.ready(indices)]

    def gather(self, indices: np.ndarray, into: Sequence[np.ndarray] | None) -> Arrays | None:
        """Copies a batch of samples that are ready, and verifies them in the same pass.

        Returns an array `[n, *shape]` for each component, or `None` if some samples were corrupted
        or cleared, which are not ready any more.
        """
        if self._verify == "never":
            return self.pool.gather(indices, into)
        arrays, corrupt = self.pool.gather_verified(indices, into, recheck=self._verify == "always")
        self._report_corrupt(corrupt)
        return arrays

    @override
    def close(self) -> None:
        self._below.close()
        self.pool.close()

    def _keep(
        self, indices: np.ndarray, make: Callable[[np.ndarray], list[Arrays]]
    ) -> tuple[dict[int, Arrays], set[int]]:
        """Stores the results of `make` for missing samples; returns what `fill` does."""
        has_room = self.pool.has_room(indices)
        made = _by_index(indices[~has_room], make)
        kept = set(indices[has_room].tolist())
        left = indices[has_room]
        while (left := self.missing(left)).size:
            with self.pool.claim(left) as claimed:
                new = _by_index(claimed, make)
                kept -= self._put_all(new)
            made |= new
            left = left[~np.isin(left, claimed)]
            # Waits without claims: two processes that wait for each other's claims would deadlock.
            if left.size and not claimed.size:
                time.sleep(POLL_S)
        return made, kept

    def _put_all(self, made: dict[int, Arrays]) -> set[int]:
        """Stores samples, and returns the indices of those that were refused."""
        refused = {sample for sample, arrays in made.items() if not self.pool.put(sample, arrays)}
        if refused and not self._reported_full:
            self._reported_full = True
            log.warning(
                "datacache: the store %s is full, so other samples are read from slower tiers. "
                "Free space (python -m datacache ls), or create a store with a larger `budget`.",
                self.pool.folder,
            )
        return refused

    def _fill_from_stream(self, stream: Stream, indices: np.ndarray) -> None:
        """Reads a stream once for all samples with space if any of `indices` is missing.

        One process of the node reads it for all; the others wait until it is done.
        """
        while self.missing(indices[self.pool.has_room(indices)]).size:
            with self.pool.claim_all() as claimed:
                if claimed:
                    every = np.arange(self.pool.spec.shard.samples)
                    kept = every[self.pool.has_room(every)]
                    missing = self.missing(kept)
                    if not missing.size:
                        # Another process has filled the store since the check.
                        return
                    if len(missing) < len(kept):
                        # The others come from an earlier pass, which may have had a different
                        # order.
                        self.pool.clear()
                    for sample, arrays in stream(set(kept.tolist())):
                        self.pool.put(sample, arrays)
                    return
            time.sleep(POLL_S)

    def _report_corrupt(self, corrupt: np.ndarray) -> None:
        if corrupt.size:
            self._counts.add(healed=len(corrupt))
            log.warning(
                "datacache: the store %s has corrupted samples, which are regenerated: %s",
                self.pool.folder,
                corrupt.tolist(),
            )


def _by_index(indices: np.ndarray, make: Callable[[np.ndarray], list[Arrays]]) -> dict[int, Arrays]:
    # Skip empty requests: lower tiers would count them and wake their threads.
    return dict(zip(indices.tolist(), make(indices), strict=True)) if indices.size else {}

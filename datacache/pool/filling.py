"""Putting samples into a pool, each by one process of the node."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from datacache.errors import CacheError
from datacache.pool.pool import Pool
from datacache.statistics import Counts

log = logging.getLogger("datacache")
POLL_S = 0.002
Arrays = list[np.ndarray]
Verify = Literal["first", "always", "never"]


class Filling:
    """How pools are filled, and when their checksums are looked at."""

    def __init__(self, verify: Verify, counts: Counts) -> None:
        self._verify, self.counts = verify, counts
        self._full: set[Path] = set()
        self._process = os.getpid()

    def refuse_in_child(self, samples: np.ndarray) -> None:
        """Looks whether samples can be made here.

        Raises:
          CacheError: If there are any, and this process was forked from the one that opened the cache.
        """
        if samples.size and os.getpid() != self._process:
            raise CacheError(
                "Samples must be made by the process that opened the cache: neither threads nor TensorFlow survive a "
                f"fork. Received: sample {samples[0]}, which is not in memory, in process {os.getpid()}, forked from "
                f"{self._process}. Call cache.warm() before, or read in threads, as cache.pydataset(..., workers=4) "
                "does: copying lets others run."
            )

    def get_ready(self, pool: Pool | None) -> None:
        """Does what a warm pool needs before it is read at full speed, on a thread."""
        if pool is not None:
            pool.get_ready(look=self._verify == "first")

    def lacking(self, pool: Pool | None, samples: np.ndarray) -> np.ndarray:
        """Those of these samples that a pool does not hold whole."""
        if pool is None:
            return samples
        if self._verify == "never":
            return self.absent(pool, samples)
        torn = pool.torn(samples[pool.ready(samples)], again=self._verify == "always")
        self._note(pool, torn)
        # Asked again: another process may have cleared some in the meantime.
        return samples[~pool.ready(samples) | np.isin(samples, torn)]

    def absent(self, pool: Pool | None, samples: np.ndarray) -> np.ndarray:
        """Those of these samples that a pool does not hold, whole or not."""
        return samples if pool is None else samples[~pool.ready(samples)]

    def gathered(
        self, pool: Pool, samples: np.ndarray, into: Sequence[np.ndarray] | None
    ) -> Arrays | None:
        """A batch of samples that a pool holds; `None` if some were torn or cleared, which are absent now."""
        if self._verify == "never":
            return pool.gather(samples, into)
        arrays, torn = pool.gather_whole(samples, into, again=self._verify == "always")
        self._note(pool, torn)
        return arrays

    def _note(self, pool: Pool, torn: np.ndarray) -> None:
        if torn.size:
            self.counts.add(healed=len(torn))
            log.warning(
                "datacache: torn in %s, and made again: samples %s", pool.folder, torn.tolist()
            )

    def through(
        self, pool: Pool | None, samples: np.ndarray, below: Callable[[np.ndarray], list[Arrays]]
    ) -> tuple[dict[int, Arrays], set[int]]:
        """Puts samples into a pool unless they are there; whoever comes second to one waits for it.

        Returns:
          What was made, by number, and those that the pool has now.
        """
        room = np.zeros(len(samples), bool) if pool is None else pool.has_room(samples)
        made = _by_number(samples[~room], below)
        if pool is None:
            return made, set()
        kept = set(samples[room].tolist())
        left = samples[room]
        while (left := self.lacking(pool, left)).size:
            with pool.claim(left) as mine:
                new = _by_number(mine, below)
                if unkept := {
                    sample for sample, arrays in new.items() if not pool.put(sample, arrays)
                }:
                    self._say_full(pool)
                kept -= unkept
            made |= new
            left = left[~np.isin(left, mine)]
            # Nothing of this pool is held while others finish what they hold.
            if left.size and not mine.size:
                time.sleep(POLL_S)
        return made, kept

    def _say_full(self, pool: Pool) -> None:
        if pool.folder not in self._full:
            self._full.add(pool.folder)
            log.warning(
                "datacache: no more room in %s: what it does not hold is read through. Make room (python -m datacache "
                "ls), or give a larger `budget` to a new one.",
                pool.folder,
            )


def _by_number(
    samples: np.ndarray, below: Callable[[np.ndarray], list[Arrays]]
) -> dict[int, Arrays]:
    return dict(zip(samples.tolist(), below(samples), strict=True)) if samples.size else {}

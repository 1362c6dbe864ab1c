"""Putting samples into a pool, each by one process of the node."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal

import numpy as np

from datacache.pool import Pool
from datacache.statistics import Counts

log = logging.getLogger("tfposeidon")
POLL_S = 0.002
Arrays = list[np.ndarray]
Verify = Literal["first", "always", "never"]


class Filling:
    """How pools are filled, and when their checksums are looked at."""

    def __init__(self, verify: Verify, counts: Counts) -> None:
        self._verify, self.counts = verify, counts

    def lacking(self, pool: Pool | None, samples: np.ndarray) -> np.ndarray:
        """Those of these samples that a pool does not hold whole."""
        if pool is None:
            return samples
        ready = pool.ready(samples)
        if self._verify == "never":
            return samples[~ready]
        torn = pool.torn(samples[ready], again=self._verify == "always")
        if torn.size:
            self.counts.add(healed=len(torn))
            log.warning("datacache: torn in %s, and made again: samples %s", pool.folder, torn.tolist())
        return np.concatenate([samples[~ready], torn])

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
                kept -= {sample for sample, arrays in new.items() if not pool.put(sample, arrays)}
            made |= new
            left = left[~np.isin(left, mine)]
            # Nothing of this pool is held while others finish what they hold.
            if left.size and not mine.size:
                time.sleep(POLL_S)
        return made, kept


def _by_number(samples: np.ndarray, below: Callable[[np.ndarray], list[Arrays]]) -> dict[int, Arrays]:
    return dict(zip(samples.tolist(), below(samples), strict=True)) if samples.size else {}

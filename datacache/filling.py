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

    def through(self, pool: Pool | None, sample: int, below: Callable[[int], Arrays]) -> tuple[Arrays | None, bool]:
        """Puts a sample into a pool unless it is there; whoever comes second waits.

        Returns:
          What was made, or `None` if the pool had it; and whether the pool has it now.
        """
        one = np.array([sample])
        if pool is None or not pool.has_room(one)[0]:
            return below(sample), False
        while self.lacking(pool, one).size:
            with pool.claim(sample) as mine:
                # Whoever had claimed it before may have just finished.
                if mine and not pool.ready(one)[0]:
                    arrays = below(sample)
                    return arrays, pool.put(sample, arrays)
            if not mine:
                time.sleep(POLL_S)
        return None, True

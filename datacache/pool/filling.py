"""Putting samples into pools: each sample is made by one process of the node."""

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
"""Pause between two looks at samples that another process is making. Kernel locks could wait for
one process only, and samples of a batch may be in the hands of several."""
Arrays = list[np.ndarray]
"""Components of one sample, or of a batch."""
Verify = Literal["first", "always", "never"]


class Filling:
    """Policy of a cache for filling its pools and for verifying checksums.

    Args:
      verify: When checksums are verified: before the "first" use in each boot, "always" or "never".
      counts: Counters of this process.

    Attributes:
      counts: Counters of this process.
    """

    def __init__(self, verify: Verify, counts: Counts) -> None:
        self._verify, self.counts = verify, counts
        self._full: set[Path] = set()
        self._process = os.getpid()

    def refuse_in_child(self, samples: np.ndarray) -> None:
        """Refuses to make samples in a forked child.

        Args:
          samples: Numbers of the samples to make, `[n]` int64.

        Raises:
          CacheError: If there are any, and this process was forked from the one that opened the
            cache.
        """
        if samples.size and os.getpid() != self._process:
            raise CacheError(
                "Samples must be made by the process that opened the cache: neither threads nor "
                f"TensorFlow survive a fork. Received: sample {samples[0]}, which is not in "
                f"memory, in process {os.getpid()}, forked from {self._process}. Call cache.warm() "
                "before, or read in threads, as cache.pydataset(..., workers=4) does: copying lets "
                "others run."
            )

    def prepare(self, pool: Pool | None) -> None:
        """Gets a full pool ready for reading at full speed, on a thread.

        Args:
          pool: The pool, if there is one.
        """
        if pool is not None:
            pool.prepare(verify=self._verify == "first")

    def missing(self, pool: Pool | None, samples: np.ndarray) -> np.ndarray:
        """Returns which samples a pool does not hold, or holds corrupt, `[k]` int64.

        Args:
          pool: The pool; without one all samples are missing.
          samples: Their numbers, `[n]` int64.
        """
        if pool is None:
            return samples
        if self._verify == "never":
            return self.not_ready(pool, samples)
        ready = samples[pool.ready(samples)]
        corrupt = pool.find_corrupt(ready, recheck=self._verify == "always")
        self._report_corrupt(pool, corrupt)
        # Asked again, because another process may have cleared some in the meantime.
        return samples[~pool.ready(samples) | np.isin(samples, corrupt)]

    def not_ready(self, pool: Pool | None, samples: np.ndarray) -> np.ndarray:
        """Returns which samples a pool does not hold, without verifying the others, `[k]` int64.

        Args:
          pool: The pool; without one no sample is ready.
          samples: Their numbers, `[n]` int64.
        """
        return samples if pool is None else samples[~pool.ready(samples)]

    def gather(
        self, pool: Pool, samples: np.ndarray, into: Sequence[np.ndarray] | None
    ) -> Arrays | None:
        """Copies a batch of samples that are ready, and verifies them on the way.

        Args:
          pool: The pool.
          samples: Their numbers, `[n]` int64.
          into: Arrays to copy to in place of new ones.

        Returns:
          An array `[n, *shape]` for each component; `None` if some samples were corrupt or cleared,
          which are not ready any more.
        """
        if self._verify == "never":
            return pool.gather(samples, into)
        arrays, corrupt = pool.gather_verified(samples, into, recheck=self._verify == "always")
        self._report_corrupt(pool, corrupt)
        return arrays

    def _report_corrupt(self, pool: Pool, corrupt: np.ndarray) -> None:
        if corrupt.size:
            self.counts.add(healed=len(corrupt))
            log.warning(
                "datacache: corrupt in %s, and made again: samples %s",
                pool.folder,
                corrupt.tolist(),
            )

    def read_through(
        self, pool: Pool | None, samples: np.ndarray, below: Callable[[np.ndarray], list[Arrays]]
    ) -> tuple[dict[int, Arrays], set[int]]:
        """Puts samples into a pool unless they are there; whoever comes second to one waits for it.

        Args:
          pool: The pool; without one all samples are made and none is kept.
          samples: Their numbers, `[n]` int64.
          below: Makes samples, given their numbers.

        Returns:
          A tuple of two: the samples that were made here, by number, and the numbers of those that
          the pool has now.
        """
        room = np.zeros(len(samples), bool) if pool is None else pool.has_room(samples)
        made = _by_number(samples[~room], below)
        if pool is None:
            return made, set()
        kept = set(samples[room].tolist())
        left = samples[room]
        while (left := self.missing(pool, left)).size:
            with pool.claim(left) as mine:
                new = _by_number(mine, below)
                if unkept := {
                    sample for sample, arrays in new.items() if not pool.put(sample, arrays)
                }:
                    self._report_full(pool)
                kept -= unkept
            made |= new
            left = left[~np.isin(left, mine)]
            # Waits without claims: two processes that wait for each other's would never end.
            if left.size and not mine.size:
                time.sleep(POLL_S)
        return made, kept

    def _report_full(self, pool: Pool) -> None:
        if pool.folder not in self._full:
            self._full.add(pool.folder)
            log.warning(
                "datacache: no more room in %s: what it does not hold is read through. Make room "
                "(python -m datacache ls), or give a larger `budget` to a new one.",
                pool.folder,
            )


def _by_number(
    samples: np.ndarray, below: Callable[[np.ndarray], list[Arrays]]
) -> dict[int, Arrays]:
    return dict(zip(samples.tolist(), below(samples), strict=True)) if samples.size else {}

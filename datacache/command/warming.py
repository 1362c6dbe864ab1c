"""Copies stored samples to a local disk before a job needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from datacache.levels.opening import open_stored_pool
from datacache.levels.pool_level import PoolLevel
from datacache.levels.source_level import SourceLevel
from datacache.sources.source import RandomSource
from datacache.statistics import Counts, Statistics
from datacache.system.access import PRIVATE, Access
from datacache.windows import done_in_windows


@dataclass(frozen=True, kw_only=True)
class Warmed:
    """Outcome of `warm`: `ready` of `samples` are on the disk now; `counts` are of this run."""

    folder: Path
    samples: int
    ready: int
    counts: Statistics


def warm(
    source: RandomSource,
    disk: Path,
    started: Callable[[int], Callable[[int], None]],
    access: Access = PRIVATE,
) -> Warmed:
    """Reads the samples that a disk lacks, as `datacache.Cache(..., disk=disk)` would."""
    pool = open_stored_pool(source, disk, access)
    # Checksums are verified when samples are used, or by `verify`.
    counts = Counts()
    stored = PoolLevel(pool, SourceLevel(source, counts), "never", counts, "disk_hits")
    try:
        samples = np.arange(len(source))
        lacking = stored.missing(samples[pool.has_room(samples)])
        done = started(len(lacking))
        for count in done_in_windows(stored.samples, lacking):
            done(count)
        return Warmed(
            folder=pool.folder, samples=len(source), ready=pool.filled, counts=counts.now()
        )
    finally:
        stored.close()

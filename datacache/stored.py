"""Stored samples: the source, and a pool of what was read from it on a local disk."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np

from datacache.filling import Arrays, Filling
from datacache.pool import Pool
from datacache.sources.source import RandomSource, Source, SourceError, StreamSource

TRIES = 4
FIRST_PAUSE_S = 0.1


class Stored:
    """Samples as the source has them.

    Args:
      source: Of all samples.
      pool: Keeps what was read, if asked for.
      filling: How.
    """

    def __init__(self, source: Source, pool: Pool | None, filling: Filling) -> None:
        self.source, self.pool, self._filling = source, pool, filling
        self._counts = filling.counts
        # Looked at once: what protocols ask takes as long as a small read.
        self.streams = isinstance(source, StreamSource)
        self._read_one = source.read if isinstance(source, RandomSource) else None

    def samples(self, samples: np.ndarray) -> list[Arrays]:
        """The components of each.

        Raises:
          SourceError: If one cannot be read; it names the sample.
        """
        if self.pool is None:
            return self._read_all(samples)
        made, _ = self._filling.through(self.pool, samples, self._read_all)
        self._counts.add(disk_hits=len(samples) - len(made))
        return self.pool.samples(samples, made)

    def all(self) -> Iterable[Arrays]:
        """Those of a source that has them one after the other only."""
        assert isinstance(self.source, StreamSource)
        for arrays in self.source.stream():
            self._count(arrays)
            yield arrays

    def _read_all(self, samples: np.ndarray) -> list[Arrays]:
        return [self._read(sample) for sample in samples.tolist()]

    def _read(self, sample: int) -> Arrays:
        if self._read_one is None:
            raise SourceError(
                f"Samples of a dataset that do not fit in memory must fit on a disk. Received: no room for "
                f"{self.source.name(sample)}. Pass `disk`, or a larger `budget`."
            )
        for attempt in range(TRIES):
            try:
                arrays = self._read_one(sample)
                self._count(arrays)
                return arrays
            except OSError as error:
                if attempt == TRIES - 1:
                    raise SourceError(
                        f"A sample must be readable. Received: {error} for {self.source.name(sample)}, {TRIES} times. "
                        "Check the file and the mount; what is cached so far stays."
                    ) from error
                self._counts.add(retries=1)
                time.sleep(FIRST_PAUSE_S * 2**attempt)
        raise AssertionError

    def _count(self, arrays: Arrays) -> None:
        self._counts.add(source_reads=1, source_bytes=sum(map(_bytes, arrays)))


def _bytes(array: np.ndarray) -> int:
    return sum(map(len, array.reshape(-1))) if array.dtype == object else np.asarray(array).nbytes

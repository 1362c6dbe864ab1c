"""Stored samples: the source, and a pool of what was read from it on a local disk."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from datacache.pool.filling import Arrays, Filling
from datacache.pool.pool import Pool
from datacache.sources.source import RandomSource, Source, SourceError, StreamSource
from datacache.windows import windows

READERS = 32
"""Threads that read a cold source: a network file system answers many at once."""
AT_ONCE = 2
"""Samples that a reader takes at a time: all of them read one batch, and then the next. Batches that share a source
evenly would end together, and nobody would read while they are decoded."""
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
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="datacache")
        self._read_one = source.read if isinstance(source, RandomSource) else None

    def samples(self, samples: np.ndarray) -> list[Arrays]:
        """The components of each.

        Raises:
          SourceError: If one cannot be read; it names the sample.
        """
        if self.pool is None:
            return self._read_all(samples)
        made = self._through(samples)
        self._counts.add(disk_hits=len(samples) - len(made))
        return self.pool.read_samples(samples, made, self._through)

    def _through(self, samples: np.ndarray) -> dict[int, Arrays]:
        return self._filling.read_through(self.pool, samples, self._read_all)[0]

    def all(self) -> Iterable[Arrays]:
        """Those of a source that has them one after the other only."""
        assert isinstance(self.source, StreamSource)
        for arrays in self.source.stream():
            self._count([arrays])
            yield arrays

    def close(self) -> None:
        """Ends threads and mappings."""
        self._readers.shutdown(cancel_futures=True)
        if self.pool is not None:
            self.pool.close()

    def _read_all(self, samples: np.ndarray) -> list[Arrays]:
        parts = windows(samples, AT_ONCE)
        try:
            read = self._readers.map(self._read_some, parts)
        except RuntimeError:
            # The interpreter is ending and takes no more work, but other ranks may still ask.
            read = map(self._read_some, parts)
        return [arrays for part in read for arrays in part]

    def _read_some(self, samples: np.ndarray) -> list[Arrays]:
        found = [self._read(sample) for sample in samples.tolist()]
        self._count(found)
        return found

    def _read(self, sample: int) -> Arrays:
        if self._read_one is None:
            raise SourceError(
                f"Samples of a dataset that do not fit in memory must fit on a disk. Received: no room for "
                f"{self.source.name(sample)}. Pass `disk`, or a larger `budget`."
            )
        for attempt in range(TRIES):
            try:
                return self._read_one(sample)
            except OSError as error:
                if attempt == TRIES - 1:
                    raise SourceError(
                        f"A sample must be readable. Received: {error} for {self.source.name(sample)}, {TRIES} times. "
                        "Check the file and the mount; what is cached so far stays."
                    ) from error
                self._counts.add(retries=1)
                time.sleep(FIRST_PAUSE_S * 2**attempt)
        raise AssertionError

    def _count(self, samples: list[Arrays]) -> None:
        self._counts.add(
            source_reads=len(samples),
            source_bytes=sum(_bytes(array) for arrays in samples for array in arrays),
        )


def _bytes(array: np.ndarray) -> int:
    return sum(map(len, array.reshape(-1))) if array.dtype == object else array.nbytes

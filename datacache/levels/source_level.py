"""The last level: the source, read by many threads, and again where a read fails."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from datacache.levels.level import Stream
from datacache.pool.layout import Arrays
from datacache.sources.source import RandomSource, Source, SourceError, StreamSource
from datacache.statistics import Counts
from datacache.windows import windows

READERS = 32
"""Threads that read a cold source: a network file system answers many at once."""
AT_ONCE = 2
"""Samples that a reader takes at a time: all of them read one batch, and then the next. Batches that share a source
evenly would end together, and nobody would read while they are decoded."""
TRIES = 4
FIRST_PAUSE_S = 0.1


class SourceLevel:
    """Stored samples as the source has them.

    Args:
      source: Of all samples.
      counts: Where reads are counted.
    """

    def __init__(self, source: Source, counts: Counts) -> None:
        self.source, self._counts = source, counts
        # Looked at once: what protocols ask takes as long as a small read.
        self._read_one = source.read if isinstance(source, RandomSource) else None
        self.stream: Stream | None = self._stream if isinstance(source, StreamSource) else None
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="datacache")

    def samples(self, indices: np.ndarray) -> list[Arrays]:
        """See `Level.samples`."""
        parts = windows(indices, AT_ONCE)
        try:
            read = self._readers.map(self._read_some, parts)
        except RuntimeError:
            # The interpreter is ending and takes no more work, but other ranks may still ask.
            read = map(self._read_some, parts)
        return [arrays for part in read for arrays in part]

    def close(self) -> None:
        """Ends the threads."""
        self._readers.shutdown(cancel_futures=True)

    def _stream(self, indices: Collection[int]) -> Iterator[tuple[int, Arrays]]:
        assert isinstance(self.source, StreamSource)
        for sample, arrays in enumerate(self.source.stream()):
            self._count([arrays])
            if sample in indices:
                yield sample, arrays

    def _read_some(self, indices: np.ndarray) -> list[Arrays]:
        found = [self._read(sample) for sample in indices.tolist()]
        self._count(found)
        return found

    def _read(self, sample: int) -> Arrays:
        if self._read_one is None:
            raise SourceError(
                "Samples of a dataset that do not fit in memory must fit on a disk. Received: no "
                f"room for {self.source.name(sample)}. Pass `disk`, or a larger `budget`."
            )
        for attempt in range(TRIES):
            try:
                return self._read_one(sample)
            except OSError as error:
                if attempt == TRIES - 1:
                    raise SourceError(
                        f"A sample must be readable. Received: {error} for "
                        f"{self.source.name(sample)}, {TRIES} times. Check the file and the mount; "
                        "what is cached so far stays."
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

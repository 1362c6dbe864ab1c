"""Last tier: the source, read by many threads, with retries after errors."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import numpy as np
from typing_extensions import override

from datacache.levels.level import Level, Stream
from datacache.pool.layout import Arrays
from datacache.sources.source import Source, SourceError, StreamSource, stored_components
from datacache.statistics import Counts
from datacache.windows import windows

READERS = 32
"""Threads that read a cold source: a network file system serves many requests at once."""
SAMPLES_PER_TASK = 2
"""Samples that a thread reads at a time. A small number makes all threads read one batch and then
the next: if batches shared the threads evenly, all would be decoded at the same time while no
thread reads."""
TRIES = 4
"""Attempts to read a sample before it counts as unreadable."""
FIRST_PAUSE_S = 0.1
"""Pause after the first failed read of a sample, doubled after each further failure."""


class SourceLevel(Level):
    """Stored samples of the source."""

    def __init__(self, source: Source, counts: Counts) -> None:
        self._source, self._counts = source, counts
        # Not `isinstance`, which from Python 3.12 on ignores methods that a wrapper of a source
        # forwards by `__getattr__`.
        self._read_one = source.read if hasattr(source, "read") else None
        self.stream: Stream | None = self._stream if hasattr(source, "stream") else None
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="datacache")

    @override
    def samples(self, indices: np.ndarray) -> list[Arrays]:
        tasks = windows(indices, SAMPLES_PER_TASK)
        try:
            read = self._readers.map(self._read_some, tasks)
        except RuntimeError:
            # The interpreter is exiting and accepts no more work, but other ranks may still request
            # samples.
            read = map(self._read_some, tasks)
        return [arrays for some in read for arrays in some]

    @override
    def close(self) -> None:
        self._readers.shutdown(cancel_futures=True)

    def _stream(self, indices: Collection[int]) -> Iterator[tuple[int, Arrays]]:
        sample = -1
        for sample, read in enumerate(cast("StreamSource", self._source).stream()):
            if sample == len(self._source):
                break
            arrays = stored_components(self._source, sample, read)
            self._count([arrays])
            if sample in indices:
                yield sample, arrays
        if sample + 1 != len(self._source):
            how_many = "more" if sample == len(self._source) else str(sample + 1)
            raise SourceError(
                "A source must have as many samples as its length. Received: "
                f"{how_many} samples from {self._source}, expected {len(self._source)}. "
                "Correct the length."
            )

    def _read_some(self, indices: np.ndarray) -> list[Arrays]:
        read = [self._read(sample) for sample in indices.tolist()]
        self._count(read)
        return read

    def _read(self, sample: int) -> Arrays:
        if self._read_one is None:
            raise SourceError(
                "Samples of a dataset that do not fit in memory must fit on a disk. Received: no "
                f"space for {self._source.name(sample)}. Pass `disk`, or a larger `budget`."
            )
        for attempt in range(TRIES):
            try:
                return stored_components(self._source, sample, self._read_one(sample))
            except OSError as error:
                if attempt == TRIES - 1:
                    raise SourceError(
                        f"A sample must be readable. Received: {error} for "
                        f"{self._source.name(sample)}, {TRIES} times. Check the file and the "
                        "mount. Cached samples are retained."
                    ) from error
                self._counts.add(retries=1)
                time.sleep(FIRST_PAUSE_S * 2**attempt)
        raise AssertionError("The last attempt returns or raises.")

    def _count(self, samples: list[Arrays]) -> None:
        self._counts.add(
            source_reads=len(samples),
            source_bytes=sum(_content_bytes(array) for arrays in samples for array in arrays),
        )


def _content_bytes(array: np.ndarray) -> int:
    # `nbytes` of an object array counts its pointers.
    return sum(map(len, array.reshape(-1))) if array.dtype == object else array.nbytes

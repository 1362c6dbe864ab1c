"""Chains the tiers of a node: each serves its own samples, and requests others from the tier below.

Think of the chain as memory -> decoded samples on a disk -> preprocessing -> stored samples on a
disk -> source. Calls only go down: no tier calls the tier above it.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, cast

import numpy as np
from typing_extensions import override

from datacache.errors import CacheError
from datacache.pool.pool import Pool
from datacache.pool.spec import Arrays, Layout
from datacache.sources.source import Source, SourceError, StreamSource, stored_components
from datacache.statistics import Counts
from datacache.system.descriptors import Owner

log = logging.getLogger("datacache")
WINDOW_SAMPLES = 64
"""Number of samples filled together: enough to amortize the Python overhead per window."""
POLL_S = 0.002
"""Seconds between two checks for samples that other processes are producing. A kernel lock can wait
for one process only, but several may be producing samples of a batch."""
READERS = 32
"""Number of threads that read the source: a network file system serves many requests at once."""
SAMPLES_PER_TASK = 2
"""Number of samples that a thread reads at a time. It is small, so that all threads read one batch
and then the next. If batches shared the threads evenly, all would be decoded at the same time while
no thread reads."""
TRIES = 4
"""Number of attempts to read a sample before it counts as unreadable."""
FIRST_PAUSE_S = 0.1
"""Seconds to wait after the first failed read of a sample, doubled after each further failure."""
Verify = Literal["first", "always", "never"]
Stream = Callable[[Collection[int]], Iterator[tuple[int, Arrays]]]
"""Reads all samples in order, and yields index and components of the samples in the collection.
Other samples are skipped before they are decoded."""


class Tier(Owner):
    """Stored or cached samples, on top of a tier that supplies missing samples.

    `stream` reads a source without random access; it is `None` if any sample can be read by its
    index. A `SourceTier` has no `layout`.
    """

    stream: Stream | None = None
    layout: Layout

    @abstractmethod
    def samples(self, indices: np.ndarray) -> list[Arrays]:
        """Returns the components of samples, in the order of `indices`."""


class SourceTier(Tier):
    """Stored samples of the source, read by many threads, with retries after errors."""

    def __init__(self, source: Source, counts: Counts) -> None:
        self._source, self._counts = source, counts
        # `isinstance` ignores methods that a wrapper of a source forwards by `__getattr__`.
        self._read_one = source.read if hasattr(source, "read") else None
        self.stream = self._stream if hasattr(source, "stream") else None
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="datacache")

    @override
    def samples(self, indices: np.ndarray) -> list[Arrays]:
        tasks = windows(indices, SAMPLES_PER_TASK)
        try:
            read = self._readers.map(self._read_some, tasks)
        except RuntimeError:
            # The thread pool accepts no work while Python exits, but other ranks may need samples.
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
            self._count(arrays)
            if sample in indices:
                yield sample, arrays
        if sample + 1 != len(self._source):
            how_many = "more" if sample == len(self._source) else str(sample + 1)
            raise SourceError(
                "A source must have as many samples as its length. Received: "
                f"{how_many} samples from {self._source}, expected {len(self._source)}. "
                "Correct the `__len__` of the source, or the asserted cardinality of the dataset."
            )

    def _read_some(self, indices: np.ndarray) -> list[Arrays]:
        return [self._read(sample) for sample in indices.tolist()]

    def _read(self, sample: int, attempt: int = 1) -> Arrays:
        if self._read_one is None:
            raise SourceError(
                "Samples of a dataset that do not fit in memory must fit on a disk. Received: no "
                f"space for {self._source.name(sample)}. Pass `disk`, or a larger `budget`."
            )
        try:
            arrays = stored_components(self._source, sample, self._read_one(sample))
        except OSError as error:
            if attempt == TRIES:
                raise SourceError(
                    f"A sample must be readable. Received: {error} for "
                    f"{self._source.name(sample)}, {TRIES} times. Check the file and the mount. "
                    "Cached samples are retained."
                ) from error
            self._counts.add(retries=1)
            time.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            return self._read(sample, attempt + 1)
        self._count(arrays)
        return arrays

    def _count(self, arrays: Arrays) -> None:
        # Sum the lengths of texts, because `nbytes` of an object array counts its pointers.
        sizes = [
            sum(map(len, array.reshape(-1))) if array.dtype == object else array.nbytes
            for array in arrays
        ]
        self._counts.add(source_reads=1, source_bytes=sum(sizes))


class PreprocessingTier(Tier):
    """Cached samples, computed on each request from the stored samples of the tier below."""

    def __init__(
        self,
        below: Tier,
        preprocess: Callable[[list[Arrays], np.ndarray], list[Arrays]],
        layout: Layout,
        name: Callable[[int], str],
    ) -> None:
        self._below, self._preprocess, self.layout, self._name = below, preprocess, layout, name
        self.stream = self._stream if below.stream else None

    @override
    def samples(self, indices: np.ndarray) -> list[Arrays]:
        return self._make(self._below.samples(indices), indices)

    @override
    def close(self) -> None:
        self._below.close()

    def _stream(self, indices: Collection[int]) -> Iterator[tuple[int, Arrays]]:
        assert self._below.stream is not None
        for sample, stored in self._below.stream(indices):
            (arrays,) = self._make([stored], np.array([sample]))
            yield sample, arrays

    def _make(self, stored: list[Arrays], indices: np.ndarray) -> list[Arrays]:
        made = zip(self._preprocess(stored, indices), indices.tolist(), strict=True)
        return [self.layout.check(arrays, self._name, sample) for arrays, sample in made]


class StoreTier(Tier):
    """Samples in a store, and missing samples from the tier below.

    If `pool` is `None`, all samples come from the tier below. `hits` is the name of the counter of
    samples found in the store.
    """

    def __init__(
        self,
        pool: Pool | None,
        below: Tier,
        counts: Counts,
        verify: Verify = "first",
        hits: str | None = None,
    ) -> None:
        self.pool, self.counts, self._process = pool, counts, os.getpid()
        self._below, self._verify, self._hits = below, verify, hits
        # Only the store in memory is directly above another store, that of decoded samples.
        self._next = below if isinstance(below, StoreTier) else None
        self.layout = pool.layout if pool else below.layout
        # A store has random access, even if the source below does not.
        self.stream = None if pool else below.stream
        # Cache the call, so that a full store is reported only once.
        self._warn_full = functools.cache(log.warning)

    @property
    def is_complete(self) -> bool:
        """True if the store holds all samples of the source."""
        return self.pool is not None and self.pool.filled == self.pool.spec.shard.samples

    def refuse_in_child(self, indices: np.ndarray) -> None:
        """Raises `CacheError` if a forked child would have to produce samples."""
        if indices.size and os.getpid() != self._process:
            raise CacheError(
                "Samples must be produced by the process that opened the cache: neither threads "
                f"nor TensorFlow survive a fork. Received: sample {indices[0]}, which is not in "
                f"memory, in process {os.getpid()}, forked from {self._process}. Call cache.warm() "
                "before the fork, or read in threads, which copy batches concurrently: "
                "cache.pydataset(..., workers=4)."
            )

    @override
    def samples(self, indices: np.ndarray) -> list[Arrays]:
        made, _ = self._fill(indices)
        if self._hits is not None and self.pool is not None:
            self.counts.add(**{self._hits: len(indices) - len(made)})
        return self.collect(indices, made)

    def collect(self, indices: np.ndarray, made: dict[int, Arrays]) -> list[Arrays]:
        """Returns samples from `made`, and all others from the store."""
        found = dict(made)
        while left := [sample for sample in indices.tolist() if sample not in found]:
            assert self.pool is not None
            read = {sample: self.pool.read_sample(sample) for sample in left}
            found |= {sample: arrays for sample, arrays in read.items() if arrays is not None}
            if cleared := [sample for sample in left if sample not in found]:
                found |= self._fill(np.array(cleared))[0]
        return [found[sample] for sample in indices.tolist()]

    def fill(self, indices: np.ndarray) -> dict[int, Arrays]:
        """Loads samples into the store; returns the samples that did not fit there, by index."""
        untaken: dict[int, Arrays] = {}
        for window in windows(indices):
            made, kept = self._fill(window)
            self.counts.add(unkept=len(window) - len(kept))
            # Return no accepted samples, because memory would then hold a large fill twice.
            untaken |= {sample: arrays for sample, arrays in made.items() if sample not in kept}
        return untaken

    def put(self, index: int, arrays: Arrays) -> bool:
        """Stores a sample here and in the store of decoded samples below, if any.

        Returns whether this store accepted the sample.
        """
        if self._next:
            self._next.put(index, arrays)
        return index in self._keep(np.array([index]), lambda _: [arrays])[1]

    def clear(self) -> None:
        """Removes the samples of this store, and of the store of decoded samples below, if any."""
        # Start at the bottom, because a reader could refill this tier with samples from below.
        if self._next:
            self._next.clear()
        if self.pool:
            self.pool.clear()

    def missing(self, indices: np.ndarray) -> np.ndarray:
        """Returns the samples that are missing from the store or corrupted in it, `[k]` int64."""
        if self.pool is None or self._verify == "never":
            return self.not_ready(indices)
        ready = indices[self.pool.ready(indices)]
        corrupt = self.pool.find_corrupt(ready, recheck=self._verify == "always")
        self._report_corrupt(corrupt)
        # Check again, because another process may have cleared samples in the meantime.
        return indices[~self.pool.ready(indices) | np.isin(indices, corrupt)]

    def not_ready(self, indices: np.ndarray) -> np.ndarray:
        """Returns the samples missing from the store, `[k]` int64, without verifying the others."""
        return indices if self.pool is None else indices[~self.pool.ready(indices)]

    def lacks(self, indices: np.ndarray) -> np.ndarray:
        """Returns the samples that are in no store of preprocessed samples, `[k]` int64."""
        lacking = self.not_ready(indices)
        return self._next.lacks(lacking) if self._next else lacking

    @property
    def first_pool(self) -> Pool | None:
        """The store of this tier, or else the store of decoded samples below it."""
        return self.pool or (self._next.first_pool if self._next else None)

    def has_room(self, indices: np.ndarray) -> np.ndarray:
        """Returns which of these samples have a slot in the store, `[n]` bool."""
        return np.zeros(len(indices), bool) if self.pool is None else self.pool.has_room(indices)

    def can_copy(self, indices: np.ndarray) -> bool:
        """Returns whether `gather` can copy a batch once the store holds all its samples."""
        return self.pool is not None and self.pool.can_copy(indices)

    def gather(self, indices: np.ndarray, into: Sequence[np.ndarray] | None) -> Arrays | None:
        """Copies and verifies ready samples; returns `None` if one was corrupted or cleared."""
        assert self.pool is not None
        if self._verify == "never":
            return self.pool.gather(indices, into)
        arrays, corrupt = self.pool.gather_verified(indices, into, recheck=self._verify == "always")
        self._report_corrupt(corrupt)
        return arrays

    @override
    def close(self) -> None:
        self._below.close()
        if self.pool:
            self.pool.close()

    def _fill(self, indices: np.ndarray) -> tuple[dict[int, Arrays], set[int]]:
        """Stores missing samples.

        Returns the samples that this process produced, and the indices of samples in the store.
        """
        # Refuse forked children before any claim, because a child shares the locks of its parent.
        self.refuse_in_child(indices)
        if self.pool is not None and self._below.stream is not None:
            self._fill_from_stream(self.pool, self._below.stream, indices)
        return self._keep(indices, self._below.samples)

    def _keep(
        self, indices: np.ndarray, make: Callable[[np.ndarray], list[Arrays]]
    ) -> tuple[dict[int, Arrays], set[int]]:
        """Stores the results of `make` for missing samples; returns the same as `_fill`."""
        # If several processes request the same sample, the first produces it and the others wait.
        has_room = self.has_room(indices)
        made = _by_index(indices[~has_room], make)
        kept = set(indices[has_room].tolist())
        left = indices[has_room]
        while self.pool is not None and (left := self.missing(left)).size:
            with self.pool.claim(left) as claimed:
                new = _by_index(claimed, make)
                refused = {n for n, arrays in new.items() if not self.pool.put(n, arrays)}
            if refused:
                self._warn_full(
                    "datacache: the store %s is full, so other samples are read from slower tiers. "
                    "Free space (python -m datacache ls), or create a store with a larger "
                    "`budget`.",
                    self.pool.folder,
                )
            kept -= refused
            made |= new
            left = left[~np.isin(left, claimed)]
            # Wait without claims, because processes that wait for each other would deadlock.
            if left.size and not claimed.size:
                time.sleep(POLL_S)
        return made, kept

    def _fill_from_stream(self, pool: Pool, stream: Stream, indices: np.ndarray) -> None:
        """Reads a stream once and stores all samples that fit, if any of `indices` is missing."""
        # One process of the node reads the stream for all; the others wait until it has finished.
        while self.missing(indices[pool.has_room(indices)]).size:
            with pool.claim_all() as claimed:
                if claimed:
                    every = np.arange(pool.spec.shard.samples)
                    kept = every[pool.has_room(every)]
                    # Another process may have filled the store since the check.
                    if missing := len(self.missing(kept)):
                        if missing < len(kept):
                            # Clear samples of an earlier pass, which may have had another order.
                            pool.clear()
                        # Read the stream again if another process has cleared the store meanwhile.
                        if False in {pool.put(*one) for one in stream(set(kept.tolist()))}:
                            return
            time.sleep(POLL_S)

    def _report_corrupt(self, corrupt: np.ndarray) -> None:
        if corrupt.size and self.pool:
            self.counts.add(healed=len(corrupt))
            log.warning(
                "datacache: the store %s has corrupted samples, which are regenerated: %s",
                self.pool.folder,
                corrupt.tolist(),
            )


def windows(samples: np.ndarray, size: int = WINDOW_SAMPLES) -> list[np.ndarray]:
    """Splits samples into windows of nearly equal size, each of at most `size` samples."""
    return np.array_split(samples, -(-len(samples) // size)) if len(samples) else []


def _by_index(indices: np.ndarray, make: Callable[[np.ndarray], list[Arrays]]) -> dict[int, Arrays]:
    # Skip empty requests, because lower tiers would count them and wake their threads.
    return dict(zip(indices.tolist(), make(indices), strict=True)) if indices.size else {}

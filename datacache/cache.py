"""Caches decoded samples, and yields batches for Keras.

Think of a cache as a chain of tiers, from shared memory down to the source. Each dataset of a cache
has its own position in the order of samples.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, cast, get_args

import keras
import numpy as np
import tensorflow as tf

from datacache.batches import IN_FLIGHT, CachePyDataset, RandomAccess, batches, keep_order
from datacache.epochs import EpochIterator, Positions, length, steps_ahead
from datacache.errors import Closed
from datacache.from_tfposeidon import ProgressBar, process_rank
from datacache.nodes import reader
from datacache.nodes.reader import Partitioning
from datacache.order import Order
from datacache.pool.folder import own_memory
from datacache.sources.source import Source, check_source, digest
from datacache.statistics import Counts, Statistics
from datacache.system.room import budget_bytes
from datacache.tiers.opening import open_tiers
from datacache.tiers.preprocessing import Preprocessing
from datacache.tiers.tier import Verify, windows

log = logging.getLogger("datacache")


class Cache:
    """Reads and preprocesses samples once per node; every epoch contains each sample exactly once.

    The first epoch reads the source. Later epochs read memory that all ranks and jobs on a node
    share. Samples that do not fit in memory are read from slower tiers. The cache never
    serves outdated samples: a different source, `preprocess` or `version` uses a different folder.

    Args:
      source: Result of `from_folder`, `from_tfds`, `from_tfrecords` or `from_dataset`, or an object
        with the methods of `datacache.sources.source.Source` and `read` or `stream`.
      preprocess: Function that computes the cached sample from a stored sample with TensorFlow ops,
        such as decoding and resizing. Retain the decoder's dtype (uint8), because normalized
        float32 samples need four times the space. Augment after the cache. `None` caches the
        decoded samples of the source.
      memory: Folder of the store in memory; "auto" selects `default_memory()`. `None` disables it.
      disk: Folder on a local disk for copies of the stored samples, which other runs also read if
        their resolution or `preprocess` differs. `None` disables it.
      decoded: Folder on a local disk for preprocessed samples, so that no sample is decoded again
        after a restart of the machine. `None` disables it.
      budget: Size of the store in memory on each node: a number of bytes, a size such as "20GB", or
        a share of the free memory of the machine and its container, such as "80%".
      partition: "replicate" stores all samples on each node. "split" stores a part on each node,
        and nodes send samples to each other. "auto" replicates if all samples fit in the budget of
        every node, and otherwise splits. Ranks must open the same caches in the same order.
      verify: Policy for checksums: "first" verifies samples of other processes before their first
        use in this process; "always" verifies before each use; "never" disables verification.
      version: Version of the samples, JSON-serializable; each version has its own cache. Change it
        when the samples change in a way that the graph of `preprocess` does not show.
      variable_shapes: True if samples may differ in the dimensions that are unknown in the graph.
        Batches of such samples are padded at the end. Lengths of texts may always differ.

    Attributes:
      fingerprint: SHA-256 of everything that determines the samples, in hexadecimal.

    Raises:
      RuntimeError: In methods with an argument `data`, if the cache has no dataset, or has several
        and `data` does not identify one of them.
      ValueError: If an argument is out of range, or ranks open different caches.
      CacheError: If a folder has other content, or a store has a newer format or another owner.
      SourceError: If the source is incomplete or empty, or its first sample cannot be read.

    Example:
      >>> import tempfile
      >>> class Squares:
      ...     identity, signature = "squares", [tf.TensorSpec([], tf.int64)]
      ...     def __len__(self): return 8
      ...     def name(self, sample): return f"the square of {sample}"
      ...     def read(self, sample): return [np.array(sample**2)]
      ...     def decode(self, square): return square
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     cache = Cache(Squares(), lambda square: -square, memory=f"{folder}/memory")
      ...     for epoch in range(2):
      ...         for batch in cache.dataset(4, shuffle=False):
      ...             print(batch.numpy())
      ...     print(cache.stats().source_reads)
      ...     cache.close()
      [ 0 -1 -4 -9]
      [-16 -25 -36 -49]
      [ 0 -1 -4 -9]
      [-16 -25 -36 -49]
      8
    """

    def __init__(
        self,
        source: Source,
        preprocess: Callable[..., Any] | None = None,
        *,
        memory: str | os.PathLike[str] | None = "auto",
        disk: str | os.PathLike[str] | None = None,
        decoded: str | os.PathLike[str] | None = None,
        budget: int | str = "80%",
        partition: Partitioning = "auto",
        verify: Verify = "first",
        version: Any = 1,
        variable_shapes: bool = False,
    ) -> None:
        for name, value, kinds in (
            ("verify", verify, get_args(Verify)),
            ("partition", partition, get_args(Partitioning)),
        ):
            if value not in kinds:
                raise ValueError(
                    f"`{name}` must be one of {', '.join(kinds)}. Received: {name}={value!r}. "
                    f"Leave it out for {kinds[0]!r}."
                )
        # Refuse an invalid budget before reading the source.
        budget_bytes(budget, 1)
        check_source(source)
        if memory == "auto":
            memory = own_memory()
        self._source, self._make = source, Preprocessing(source, preprocess, variable_shapes)
        # Include TensorFlow's version, because releases may decode images to different pixels.
        traced = [repr(self._make.structure), self._make.fingerprint, tf.__version__]
        self.fingerprint = digest([source.identity, *traced, [version, variable_shapes]])
        self._counts, self._positions, self._closed = Counts(), Positions(), False
        self._keeps_any = memory is not None or decoded is not None
        self._tiers = open_tiers(
            source,
            self._make,
            self.fingerprint,
            memory=memory,
            disk=disk,
            decoded=decoded,
            budget=budget,
            verify=verify,
            counts=self._counts,
            choose_shard=lambda fits: reader.choose_shard(self.fingerprint, fits, partition),
        )
        with contextlib.ExitStack() as on_error:
            on_error.push(self._tiers)
            self._reader = reader.open_reader(self._tiers, len(source), self._keeps_any)
            on_error.pop_all()
        log.info("%s", self)

    def dataset(
        self,
        global_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        state: dict[str, Any] | None = None,
    ) -> tf.data.Dataset:
        """Returns this rank's share of each global batch as a dataset.

        Each epoch is a different permutation of all samples, which depends on the seed but not on
        the number of ranks. Each iteration over the dataset is the next epoch, with the same number
        of steps on every rank. Each dataset has its own position: reading a validation dataset does
        not change the position of the training dataset.

        Args:
          global_batch: Number of samples of one step over all ranks.
          seed: Seed of the permutations.
          shuffle: True to permute the samples in each epoch; False to retain the source's order.
          state: State to resume from, as returned by `state_dict`. The first iteration is the rest
            of the saved epoch. `None` starts at epoch 0.

        Returns:
          A dataset whose elements have the structure of a sample, with a leading batch dimension.

        Raises:
          ValueError: If a batch has fewer samples than there are ranks, or `state` was saved for
            another number of samples, `seed` or `shuffle`.
        """
        epochs = self._new_epochs(global_batch, seed, shuffle, state)
        data = batches(epochs, self._tiers.layout, self._make.structure, self._reader)
        return self._positions.add(data, epochs)

    def pydataset(
        self,
        global_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        state: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> keras.utils.PyDataset:
        """Returns the batches of `dataset` as a Keras `PyDataset` of NumPy arrays.

        `fit` trains on these batches in order, regardless of its argument `shuffle`.

        Args:
          global_batch: Number of samples of one step over all ranks; see `dataset`.
          seed: Seed of the permutations; see `dataset`.
          shuffle: True to permute; see `dataset`.
          state: State to resume from; see `dataset`.
          **arguments: Arguments of `keras.utils.PyDataset`. `workers` is the number of threads that
            read batches concurrently.

        Returns:
          A `PyDataset` whose elements have the structure of a sample, with a leading batch
          dimension.

        Raises:
          ValueError: For the same reasons as in `dataset`, or if `use_multiprocessing` is True.
        """
        if arguments.get("use_multiprocessing"):
            raise ValueError(
                "Batches of a cache must be read in threads, because TensorFlow and the cache's "
                "threads do not work in forked processes. Received: use_multiprocessing=True. Omit "
                "`use_multiprocessing`; `workers` threads copy batches concurrently."
            )
        keep_order()
        epochs = self._new_epochs(global_batch, seed, shuffle, state)
        data = CachePyDataset(epochs, self._reader, self._nested_batch, arguments)
        return self._positions.add(data, epochs)

    def random_access(self) -> RandomAccess:
        """Returns the samples as a sequence, for Grain's `MapDataset.source` or PyTorch."""
        return RandomAccess(self)

    def counted(self, data: Iterable[Any]) -> Iterator[Any]:
        """Iterates over the rest of an epoch and counts its batches as trained.

        A batch is counted when the next one is requested. Use `counted` in custom loops; in
        `fit`, the callback `keras_callbacks.CachePosition` counts the steps.

        Args:
          data: Dataset of this cache, or one derived from it by `map`.

        Yields:
          The elements of `data`.

        Raises:
          RuntimeError: If an earlier loop over the dataset stopped within an epoch, or `data` is
            repeated a finite number of times.
        """
        epochs = self._positions.of(data)
        epochs.go_on(length(data), steps_ahead(data))
        for batch in data:
            yield batch
            epochs.count(1)
        epochs.leave()

    def count(self, steps: int, data: Any = None) -> None:
        """Advances the position of training by a number of steps.

        Args:
          steps: Number of steps.
          data: Dataset of this cache, or one derived from it by `map`; required if the cache has
            several datasets.
        """
        self._positions.of(data).count(steps)

    def begin_epoch(
        self,
        epoch: int,
        data: Any = None,
        steps: int | None = None,
        *,
        steps_per_execution: int = 1,
        is_first: bool = True,
        begin: tuple[int, int] | None = None,
    ) -> None:
        """Starts an epoch of `fit`, as `CachePosition` does.

        If an epoch of `fit` reads all of `data`, epoch `e` of `fit` reads epoch `e` of the dataset.
        With `steps_per_epoch`, epoch `e` of `fit` starts after `e * steps_per_epoch` steps.

        Args:
          epoch: Index of the epoch.
          data: Dataset of this cache, or one derived from it by `map` or `repeat`; required if the
            cache has several datasets, or an epoch of `fit` does not read the whole dataset.
          steps: Number of steps of each epoch of `fit`; `None` for as many as the dataset has.
          steps_per_execution: Number of steps that Keras executes in one call.
          is_first: True for the first epoch of a call of `fit`.
          begin: Epoch and number of samples at which the epoch starts, from `state_dict`; `None` to
            compute them from `epoch`, as if earlier epochs had run on the same number of ranks.

        Raises:
          RuntimeError: If the next iteration starts within an epoch, or the position cannot be
            computed from `epoch`.
        """
        self._positions.of(data).begin_epoch(
            epoch,
            steps,
            length(data),
            steps_per_execution=steps_per_execution,
            is_first=is_first,
            ahead=steps_ahead(data),
            begin=begin,
        )

    def steps_per_epoch(self, data: Any = None) -> int:
        """Returns the number of steps of an epoch, which depends on the number of ranks.

        Args:
          data: Dataset in training; see `count`.
        """
        return self._positions.of(data).epoch_steps

    def leave(self, data: Any = None) -> None:
        """Ends training; later iterations over the dataset advance its position without a callback.

        Args:
          data: Dataset in training; see `count`.
        """
        self._positions.of(data).leave()

    def warm(self, progress: bool = True) -> Statistics:
        """Fills memory with all samples that fit; ranks of a node share the work.

        The call has no effect if the cache has neither `memory` nor `decoded`.

        Args:
          progress: True to show a progress bar.

        Returns:
          The counts of this process since it opened the cache.

        Raises:
          SourceError: If a sample cannot be read; the error names it.
        """
        samples = np.arange(len(self._source) if self._keeps_any else 0)
        if self._tiers.pool is not None:
            samples = samples[self._tiers.has_room(samples)]
        bar = ProgressBar(len(samples), "samples") if progress else None
        parts = windows(samples)
        with ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="datacache") as threads:
            # Check again for missing samples, because other ranks fill the same store.
            filled = threads.map(lambda part: self._reader.fill(self._tiers.missing(part)), parts)
            for part, _ in zip(parts, filled, strict=True):
                if bar:
                    bar.add(len(part))
        if bar:
            bar.close()
        return self.stats()

    def stats(self) -> Statistics:
        """Returns the counts of this process since it opened the cache."""
        return self._counts.now()

    def state_dict(self, data: Any = None) -> dict[str, Any]:
        """Returns the progress of training on a dataset, about a hundred bytes as JSON.

        A job with any number of ranks can resume from it: `dataset(..., state=state)`.

        Args:
          data: Dataset in training; see `count`.

        Returns:
          The state, as JSON-serializable values.

        Raises:
          RuntimeError: If the steps of training were not counted.
        """
        return self._positions.of(data).state_dict()

    def clear(self) -> None:
        """Removes all preprocessed samples, in memory and on disk.

        Copies of stored samples in the folder `disk` are retained.
        """
        self._tiers.clear()

    def close(self) -> None:
        """Ends threads and releases memory mappings; later reads raise an error.

        The cached samples are retained. A `with` block closes the cache at its end. On several
        nodes, `close` waits until all ranks have called it, because they may request samples until
        then.
        """
        if not self._closed:
            self._closed = True
            opened, closed = self._reader, cast("Any", Closed())
            self._source = self._tiers = self._reader = self._positions = self._counts = closed
            opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        # After an error, do not wait for the other ranks, which may not close their caches.
        if kind is not None and not self._closed and self._reader.waits_to_close:
            return
        self.close()

    def __len__(self) -> int:
        return len(self._source)

    def __reduce__(self) -> Any:
        raise TypeError(
            "A cache must be opened in the process that reads it. Received: a cache to pickle for "
            "another process. Open the cache there: processes of a node share its samples."
        )

    def __str__(self) -> str:
        if self._closed:
            return "datacache: closed"
        if (pool := self._tiers.pool) is None:
            return "datacache: no store in memory"
        return (
            f"datacache: the store {pool.folder} holds up to {pool.slots} of {len(self)} samples; "
            f"{pool.filled} samples are ready"
        )

    def _new_epochs(
        self, global_batch: int, seed: int, shuffle: bool, state: dict[str, Any] | None
    ) -> EpochIterator:
        order = Order(samples=len(self), global_batch=global_batch, seed=seed, shuffle=shuffle)
        return EpochIterator(order, process_rank().rank, process_rank().size, state)

    def _nested_batch(self, samples: np.ndarray) -> Any:
        return tf.nest.pack_sequence_as(self._make.structure, self._reader.batch(samples))

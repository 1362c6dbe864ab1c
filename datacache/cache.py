"""Cache of decoded samples, which hands out batches for Keras."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self, cast, get_args

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from datacache.batches import Iterations, batches
from datacache.epochs import EpochIterator
from datacache.errors import Closed
from datacache.from_tfposeidon import ProgressBar, process_rank
from datacache.levels.fingerprint import fingerprint, trace
from datacache.levels.opening import open_levels
from datacache.levels.pool_level import Verify
from datacache.nodes import partitioning
from datacache.nodes.partitioning import Partitioning
from datacache.nodes.reader import Reader
from datacache.order import Order, Position
from datacache.pool.budget import budget_bytes
from datacache.pool.folder import own_memory
from datacache.positions import Positions, length
from datacache.sources.source import Source, SourceError
from datacache.statistics import Counts, Statistics
from datacache.system.access import Access
from datacache.windows import done_in_windows

log = logging.getLogger("datacache")
Read = Callable[[np.ndarray], Any]


class Cache:
    """Samples that are read and preprocessed once per node, in an exact order of epochs.

    The first epoch reads the source; later ones read memory that all ranks of a node, and other
    jobs on it, share. Samples without room in memory are read through the levels below. Nothing
    stale is served: another source, `preprocess` or `version` has another folder.

    Args:
      source: Result of `from_folder`, `from_tfds`, `from_tfrecords` or `from_dataset`, or an object
        with the methods of `datacache.sources.source.Source` and `read` or `stream`.
      preprocess: Function from a stored sample to the one to keep, in TensorFlow ops: decoding,
        resizing. Keep the decoder's dtype (uint8), as normalised float32 samples take four times
        the room, and augment after the cache. `None` keeps what the source decodes.
      memory: Folder of the pool in memory; "auto" is `default_memory()`, or the folder of `group`.
        `None` goes without.
      disk: Folder on a local disk for the bytes as the source has them. Other runs, resolutions and
        functions then read them there.
      decoded: Folder on a local disk for preprocessed samples. After a restart of the machine
        nothing is decoded again.
      budget: Memory of the pool on each node: bytes, a size such as "20GB", or a share of what is
        free on the machine and in its container, such as "80%".
      partition: "replicate" keeps all samples on each node. "split" keeps a part on each, and nodes
        send each other what is needed. "auto" replicates what fits in the budget of every node.
        Ranks must open the same caches in the same order.
      verify: Policy for checksums: "first" verifies them before the first use of what another
        process wrote, once after each start of the machine; "always" before each use; "never" not
        at all.
      version: Version of the samples: anything that JSON can hold; another version is another
        cache. It is for changes that the graph of `preprocess` does not show.
      variable_shapes: True if dimensions that the graph does not know may differ between samples.
        Batches of such samples are padded at the end. Texts may always differ.
      group: Name or number of a group whose members may read and write the pools, too. By default
        only this user may.

    Attributes:
      fingerprint: SHA-256 of all that the samples depend on, in hexadecimal.

    Raises:
      ValueError: If an argument is out of range, or ranks open different caches.
      CacheError: If a folder holds something else, or a pool of a newer format or somebody else's.
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
        group: str | int | None = None,
    ) -> None:
        if verify not in get_args(Verify):
            raise ValueError(
                f'`verify` must be "first", "always" or "never". Received: verify={verify!r}'
            )
        if partition not in get_args(Partitioning):
            raise ValueError(
                '`partition` must be "auto", "replicate" or "split". Received: '
                f"partition={partition!r}"
            )
        # A budget that makes no sense is refused before anything is read.
        budget_bytes(budget, 1)
        _check_source(source)
        access = Access.of(group)
        if memory == "auto":
            memory = own_memory(access)
        self._source, self._traced = source, trace(source, preprocess)
        self.fingerprint = fingerprint(source, self._traced, [version, variable_shapes])
        self._counts = Counts()
        self._positions = Positions()
        self._closed = False
        self._levels = open_levels(
            source,
            self._traced,
            self.fingerprint,
            memory=memory,
            disk=disk,
            decoded=decoded,
            budget=budget,
            variable_shapes=variable_shapes,
            access=access,
            verify=verify,
            counts=self._counts,
            choose_shard=lambda fits: partitioning.choose_shard(self.fingerprint, fits, partition),
        )
        self._keeps_any = memory is not None or decoded is not None
        self._reader = partitioning.open_reader(self._levels, len(source), self._keeps_any)
        log.info("%s", self)

    def dataset(
        self,
        global_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        state: dict[str, Any] | None = None,
    ) -> tf.data.Dataset:
        """Returns this rank's share of each global batch as a dataset.

        An epoch is a permutation of all samples, another one each time, and the same for the same
        seed on any number of ranks. Each iteration over the dataset is the next epoch, with equally
        many steps on every rank. A dataset has a position of its own: one for validation does not
        move that of training.

        Args:
          global_batch: Number of samples of one step over all ranks.
          seed: Seed of the permutations.
          shuffle: True to permute; without it samples come in the order of the source.
          state: State to go on from, as `state_dict` returns it. The first iteration is the rest of
            that epoch.

        Returns:
          A dataset whose elements have the structure of a sample, with a dimension for the batch in
          front.

        Raises:
          ValueError: If a batch has fewer samples than there are ranks, or the state is of other
            samples or another order.
        """
        epochs = self._new_epochs(global_batch, seed, shuffle, state)
        memory = self._levels.memory
        warm = memory is not None and memory.is_whole
        data = batches(epochs, self._levels.layout, self._traced.structure, self._reader, warm)
        return self._positions.add(data, epochs)

    def pydataset(
        self,
        global_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        state: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> keras.utils.PyDataset:
        """Returns the same batches as a Keras `PyDataset` of NumPy arrays.

        `fit` trains on them in their order, whatever its `shuffle` is.

        Args:
          global_batch: Number of samples of one step over all ranks; see `dataset`.
          seed: Seed of the permutations; see `dataset`.
          shuffle: True to permute; see `dataset`.
          state: State to go on from; see `dataset`.
          **arguments: Arguments of `keras.utils.PyDataset`. Its `workers` are threads, which read
            so many batches at a time.

        Raises:
          ValueError: As `dataset`, and for `use_multiprocessing=True`.
        """
        if arguments.get("use_multiprocessing"):
            raise ValueError(
                "Batches of a cache must be read in threads: forked processes have neither "
                "TensorFlow nor the cache's threads, and would send each batch once more. "
                "Received: use_multiprocessing=True. Leave it out; `workers` threads copy batches "
                "at the same time."
            )
        _keep_order()
        epochs = self._new_epochs(global_batch, seed, shuffle, state)
        return self._positions.add(
            _PyDataset(epochs, self._reader, self._nested_batch, arguments), epochs
        )

    def random_access(self) -> RandomAccess:
        """Returns the samples as a sequence, for Grain's `MapDataset.source` or PyTorch."""
        return RandomAccess(self)

    def counted(self, data: Iterable[Any]) -> Iterator[Any]:
        """Iterates over the rest of an epoch and counts its batches as trained.

        A batch counts once the next one is asked for. This is for hand-written loops; in `fit` the
        callback `keras_callbacks.CachePosition` counts.

        Args:
          data: Dataset of this cache, or what `map` made of it.

        Yields:
          The elements of `data`.

        Raises:
          RuntimeError: If an iteration over the dataset was left within an epoch, or the data are
            several epochs that end.
        """
        epochs = self._positions.of(data)
        epochs.go_on(length(data))
        for batch in data:
            yield batch
            epochs.count(1)
        epochs.leave()

    def count(self, steps: int, data: Any = None) -> None:
        """Says that more steps were trained.

        Args:
          steps: Number of steps.
          data: Dataset of this cache, or what `map` made of it; needed if the cache has made
            several.

        Raises:
          RuntimeError: If the cache has made no dataset, or it is not clear which one is meant.
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
    ) -> None:
        """Says which epoch of `fit` begins, as `CachePosition` does.

        Where an epoch of `fit` is all of `data`, epoch `e` of `fit` reads epoch `e` of the dataset.
        With `steps_per_epoch` it goes on where training was: after `e` times so many steps.

        Args:
          epoch: Index of the epoch.
          data: Dataset of this cache, or what `map` or `repeat` made of it; needed if the cache has
            made several, or an epoch of `fit` is not all of it.
          steps: Number of steps of each epoch of `fit`; `None` for those of the dataset.
          steps_per_execution: Number of steps that Keras trains together.
          is_first: True for the first epoch of a call of `fit`.

        Raises:
          RuntimeError: If the next iteration begins within an epoch, the cache has made no dataset,
            it is not clear which one is meant, or the position does not follow from the epoch.
        """
        epochs = self._positions.of(data)
        epochs.begin_epoch(
            epoch,
            steps,
            length(data),
            steps_per_execution=steps_per_execution,
            is_first=is_first,
        )

    def leave(self, data: Any = None) -> None:
        """Says that training has ended, so that later iterations go on by themselves.

        Args:
          data: Dataset of this cache, or what `map` made of it; needed if the cache has made
            several.
        """
        self._positions.of(data).leave()

    def warm(self, progress: bool = True) -> Statistics:
        """Fills memory with all samples that have room; ranks of a node share the work.

        Without a folder to keep samples in, it does nothing.

        Args:
          progress: True to show a progress bar.

        Returns:
          The counts of this process since it opened the cache.

        Raises:
          SourceError: If a sample cannot be read; the error names it.
        """
        memory = self._levels.memory
        samples = np.arange(len(self._source) if self._keeps_any else 0)
        if memory is not None:
            samples = samples[memory.has_room(samples)]
        bar = ProgressBar(len(samples), "samples") if progress else None
        # Each window asks anew what is missing, as other ranks fill the same pool meanwhile.
        for count in done_in_windows(
            lambda window: self._reader.fill(self._levels.missing(window)), samples
        ):
            if bar:
                bar.add(count)
        if bar:
            bar.close()
        return self.stats()

    def stats(self) -> Statistics:
        """Returns the counts of this process since it opened the cache."""
        return self._counts.now()

    def state_dict(self, data: Any = None) -> dict[str, Any]:
        """Returns the progress of training on a dataset, in about a hundred bytes of JSON.

        It loads on any number of ranks: `dataset(..., state=state)`.

        Args:
          data: Dataset of this cache, or what `map` made of it; needed if the cache has made
            several.

        Raises:
          RuntimeError: If the cache has made no dataset, it is not clear which one is meant, or its
            steps were not counted.
        """
        return self._positions.of(data).state_dict()

    def clear(self) -> None:
        """Forgets all preprocessed samples, in memory and on disk.

        The bytes of the source in the folder `disk` stay.
        """
        self._levels.clear()

    def close(self) -> None:
        """Ends threads and mappings, and keeps the cached samples; later reads raise an error.

        A `with` block does it at its end. On several nodes it waits until all ranks have closed the
        cache: they may ask for samples.
        """
        if not self._closed:
            self._closed = True
            reader, closed = self._reader, cast("Any", Closed())
            self._source = self._levels = self._reader = self._positions = self._counts = closed
            reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._source)

    def __reduce__(self) -> Any:
        raise TypeError(
            "A cache must be opened in the process that reads it. Received: a cache to pickle, for "
            "another process. Open it there: processes of a node share its samples."
        )

    def __str__(self) -> str:
        if self._closed:
            return "datacache: closed"
        memory = self._levels.memory
        kept = (
            f"{memory.slots} of {len(self)} samples in {memory.folder}"
            if memory
            else "nothing in memory"
        )
        return f"datacache: {kept}, {memory.filled if memory else 0} ready"

    def _new_epochs(
        self, global_batch: int, seed: int, shuffle: bool, state: dict[str, Any] | None
    ) -> EpochIterator:
        order = Order(samples=len(self), global_batch=global_batch, seed=seed, shuffle=shuffle)
        own = process_rank()
        return EpochIterator(order, own.rank, own.size, state)

    def _nested_batch(self, samples: np.ndarray) -> Any:
        return tf.nest.pack_sequence_as(self._traced.structure, self._reader.batch(samples))


def _check_source(source: Any) -> None:
    missing = [
        name
        for name in ("identity", "signature", "name", "decode", "__len__")
        if not hasattr(source, name)
    ]
    if not hasattr(source, "read") and not hasattr(source, "stream"):
        missing.append("read")
    if missing:
        raise SourceError(
            "A source must have what datacache.sources.source.Source says. Received: "
            f"{type(source).__name__} without {', '.join(missing)}. Use from_folder, from_tfds or "
            "from_dataset, or add it."
        )
    if len(source) == 0:
        raise SourceError(f"A source must have samples. Received: {source}, with none.")


class RandomAccess:
    """Samples of a cache by index, as nested NumPy arrays; see `Cache.random_access`.

    Args:
      cache: Cache of the samples.

    Example:
      >>> import datacache, tempfile
      >>> source = datacache.from_dataset(tf.data.Dataset.range(5), key="range(5)")
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     cache = Cache(source, memory=f"{folder}/memory")
      ...     samples = cache.random_access()
      ...     print(len(samples), samples[3])
      ...     cache.close()
      5 3
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def __len__(self) -> int:
        return len(self._cache)

    def __getitem__(self, sample: int | slice) -> Any:
        """Returns a sample, or those of a slice, as a list does."""
        chosen = range(len(self))[sample]
        if isinstance(chosen, range):
            return [self[index] for index in chosen]
        return tf.nest.map_structure(
            lambda array: array[0], self._cache._nested_batch(np.array([chosen]))
        )


class _PyDataset(keras.utils.PyDataset):
    def __init__(
        self, epochs: EpochIterator, reader: Reader, read: Read, arguments: dict[str, Any]
    ) -> None:
        # To Keras there is one worker, which asks for one batch after the other.
        super().__init__(**arguments | {"workers": 1})
        self._epochs, self._read, self._lock = epochs, read, threading.Lock()
        self._iterations = Iterations(epochs, reader)
        self._ahead = max(1, arguments.get("workers", 1))
        self._threads = ThreadPoolExecutor(self._ahead, "datacache")
        self._begun: tuple[np.int64, np.int64] | None = None
        self._start: Position | None = None
        self._asked: set[int] = set()
        self._coming: dict[int, Future[Any]] = {}

    def __len__(self) -> int:
        return len(self._epochs)

    def __getitem__(self, step: int) -> Any:
        with self._lock:
            # The first request begins an epoch, whatever its step. Later requests read that epoch
            # until the position of training moves.
            if self._begun is None or self._epochs.start != self._start:
                self._start = self._epochs.start
                self._begun, self._coming = self._iterations.begin(), {}
                self._asked = set()
            number, steps = map(int, self._begun)
            step = range(steps)[step]
            self._asked.add(step)
            for coming in range(step, min(step + self._ahead, steps)):
                if coming not in self._coming:
                    samples = self._iterations.samples(number, coming)
                    self._coming[coming] = self._threads.submit(self._read, samples)
            batch = self._coming.pop(step)
        return batch.result()

    def on_epoch_end(self) -> None:
        # Keras looks at some batches before it trains, and says that an epoch has ended.
        if self._begun is not None and len(self._asked) == self._begun[1]:
            self._iterations.end(int(self._begun[0]))


@functools.cache
def _keep_order() -> None:
    """Makes `fit` ask for the batches of a cache in their order, as it does with `tf.data`.

    By default it shuffles those of each `PyDataset`, on each rank by itself.
    """
    make = PyDatasetAdapter.__init__

    @functools.wraps(make)
    def make_in_order(self: Any, x: Any, class_weight: Any = None, shuffle: bool = False) -> None:
        make(self, x, class_weight, shuffle and not isinstance(x, _PyDataset))

    PyDatasetAdapter.__init__ = make_in_order

"""Samples that are decoded once: levels, the order of epochs, and batches for Keras."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, get_args

import keras
import numpy as np
import tensorflow as tf

from datacache.batches import EpochIterator, batches
from datacache.from_tfposeidon import ProgressBar, place
from datacache.levels.fingerprint import fingerprint, trace
from datacache.levels.opening import open_levels
from datacache.levels.pool_level import Verify
from datacache.nodes import partitioning
from datacache.nodes.partitioning import Partitioning
from datacache.order import Order, Position
from datacache.pool.budget import budget_bytes
from datacache.pool.folder import own_memory
from datacache.positions import Positions
from datacache.sources.source import Source, SourceError
from datacache.statistics import Counts, Statistics
from datacache.system.access import Access
from datacache.windows import done_in_windows

log = logging.getLogger("datacache")


class Cache:
    """Samples read and pre-processed once per node, and once per epoch handed out in an exact order.

    The first epoch reads the source; later ones read memory that all ranks of a node, and other jobs on it, map. What
    has no room in memory is read through the levels below. Nothing stale is served: another source, `preprocess`
    or `version` has another folder.

    Args:
      source: From `from_folder`, `from_tfds` or `from_dataset`, or any object like `datacache.Source`.
      preprocess: From a stored sample to the one to keep, in TensorFlow ops: decode, resize. Keep the decoder's type
        (uint8): normalised float32 samples would take four times the room, and augmentation comes after the cache.
      memory: Folder of the pool in memory; `None` goes without.
      disk: Folder on a local disk for the source's bytes as read: other runs, resolutions or functions then open no
        file of the source again.
      decoded: Folder on a local disk for pre-processed samples: a restart of the machine decodes nothing again.
      budget: Of memory per node: bytes, "20GB", or a share of what is free, "80%", on the machine and in its container.
      partition: "replicate" keeps all samples on each node, "split" a part on each, and they send each other what is
        needed; "auto" replicates what fits in every node's budget. Ranks must open the same caches in the same order.
      verify: Look at checksums of samples before the "first" use after another process wrote them, or the machine was
        started; "always", or "never".
      version: Another number or text is another cache; for what the graph of `preprocess` does not show.
      variable_shapes: Whether dimensions that the graph does not know may differ between samples; batches of such are
        padded at the end. Texts may always differ.
      group: Name or number of a group whose members may read and write the pools, too; by default this user alone.

    Raises:
      ValueError: If an argument makes no sense.
      CacheError: If a folder is no cache, of a newer format, or somebody else's.
      SourceError: If the first sample cannot be read.
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
                f'`partition` must be "auto", "replicate" or "split". Received: partition={partition!r}'
            )
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
        self._reader = partitioning.open_reader(self._levels, len(source))
        log.info("%s", self)

    def dataset(
        self,
        global_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        state: dict[str, Any] | None = None,
    ) -> tf.data.Dataset:
        """Batches of this rank: its share of each global batch.

        An epoch is a permutation of all samples, another one each time, the same for the same seed on any number of
        ranks; each iteration over the dataset is the next epoch, and every rank has as many steps. A dataset has a
        position of its own: one for validation leaves that of training alone.

        Args:
          global_batch: Samples of one step over all ranks.
          seed: Of the permutations.
          shuffle: Without it, samples come in the source's order.
          state: Where to go on, from `state_dict`; the first pass is the rest of that epoch.

        Raises:
          ValueError: If a batch has fewer samples than there are ranks, or the state is of other samples or another
            order.
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
        """The same batches as a Keras `PyDataset` of NumPy arrays.

        Args:
          global_batch: As in `dataset`.
          seed: As in `dataset`.
          shuffle: As in `dataset`.
          state: As in `dataset`.
          arguments: Those of `keras.utils.PyDataset`; `workers` are threads.

        Raises:
          ValueError: As `dataset`, and for `use_multiprocessing=True`.
        """
        if arguments.get("use_multiprocessing"):
            raise ValueError(
                "Batches of a cache must be read in threads: forked processes have neither TensorFlow nor the cache's "
                "threads, and would send each batch once more. Received: use_multiprocessing=True. Leave it out; "
                "`workers` threads copy batches at the same time."
            )
        epochs = self._new_epochs(global_batch, seed, shuffle, state)
        return self._positions.add(_PyDataset(epochs, self._packed, arguments), epochs)

    def random_access(self) -> RandomAccess:
        """The samples by number: what Grain's `MapDataset.source` and PyTorch's data loaders take."""
        return RandomAccess(self)

    def counted(self, data: Iterable[Any]) -> Iterator[Any]:
        """Iterates over the rest of an epoch, and counts each batch as trained once the next one is asked for.

        For hand-written loops; in `fit` it is `keras_callbacks.CachePosition` that counts.

        Args:
          data: A dataset of this cache, or what `map` made of it.

        Raises:
          RuntimeError: If it was left within an epoch.
        """
        epochs = self._positions.of(data)
        epochs.go_on()
        for batch in data:
            yield batch
            epochs.count(1)

    def count(self, steps: int, data: Any = None) -> None:
        """Says that so many steps more were trained.

        Args:
          steps: How many.
          data: The dataset, or what `map` made of it; needed where the cache has made several.
        """
        self._positions.of(data).count(steps)

    def begin_epoch(self, epoch: int, data: Any = None) -> None:
        """The next pass over a dataset is that epoch: what `keras_callbacks.CachePosition` says.

        Args:
          epoch: Its number, from 0.
          data: The dataset, or what `map` made of it; needed where the cache has made several.

        Raises:
          RuntimeError: If the dataset goes on within an epoch.
        """
        self._positions.of(data).begin_epoch(epoch)

    def warm(self, progress: bool = True) -> Statistics:
        """Fills memory with all samples that have room; ranks of a node share the work."""
        memory = self._levels.memory
        samples = np.arange(len(self._source))
        if memory is not None:
            samples = samples[memory.has_room(samples)]
        bar = ProgressBar(len(samples), "samples") if progress else None
        for count in done_in_windows(
            lambda window: self._reader.fill(self._levels.missing(window)), samples
        ):
            if bar:
                bar.add(count)
        if bar:
            bar.close()
        return self.stats()

    def stats(self) -> Statistics:
        """What this process has counted."""
        return self._counts.now()

    def state_dict(self, data: Any = None) -> dict[str, Any]:
        """Where training on a dataset has come to, in about a hundred bytes of JSON.

        It loads on any number of ranks: `dataset(..., state=state)`.

        Args:
          data: The dataset, or what `map` made of it; needed where the cache has made several.

        Raises:
          RuntimeError: If no dataset was made, or its steps were not counted.
        """
        return self._positions.of(data).state_dict()

    def clear(self) -> None:
        """Forgets all pre-processed samples in memory and on disk; what the disk keeps of the source stays."""
        self._levels.clear()

    def close(self) -> None:
        """Ends threads and mappings; what is cached stays. On several nodes, once all ranks have closed."""
        if not self._closed:
            self._closed = True
            self._reader.close()

    def __len__(self) -> int:
        return len(self._source)

    def __reduce__(self) -> Any:
        raise TypeError(
            "A cache must be opened in the process that reads it. Received: a cache to pickle, for another process. "
            "Open it there: processes of a node share its samples."
        )

    def __str__(self) -> str:
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
        own = place()
        return EpochIterator(order, own.rank, own.size, state)

    def _packed(self, samples: np.ndarray) -> Any:
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
            f"A source must have what datacache.sources.source.Source says. Received: {type(source).__name__} without "
            f"{', '.join(missing)}. Use from_folder, from_tfds or from_dataset, or add it."
        )
    if len(source) == 0:
        raise SourceError(f"A source must have samples. Received: {source}, with none.")


class RandomAccess:
    """Samples of a cache by number, as nested NumPy arrays."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def __len__(self) -> int:
        return len(self._cache)

    def __getitem__(self, sample: int) -> Any:
        return tf.nest.map_structure(
            lambda array: array[0], self._cache._packed(np.array([sample]))
        )


class _PyDataset(keras.utils.PyDataset):
    def __init__(
        self, epochs: EpochIterator, packed: Callable[[np.ndarray], Any], arguments: dict[str, Any]
    ) -> None:
        super().__init__(**arguments)
        self._epochs, self._read, self._lock = epochs, packed, threading.Lock()
        self._begin: Position | None = None

    def __len__(self) -> int:
        return len(self._epochs)

    def __getitem__(self, step: int) -> Any:
        with self._lock:
            # Keras asks for the length, and maybe for a batch, before it says which epoch begins.
            if self._begin != self._epochs.position:
                self._begin, self._shares = self._epochs.begin()
            samples = self._shares[step]
        return self._read(samples)

    def on_epoch_end(self) -> None:
        if self._begin is not None:
            self._epochs.end(self._begin)

"""Reads batches for TensorFlow and Keras, given the indices of their samples."""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from typing_extensions import override

from datacache.epochs import EpochIterator
from datacache.nodes.reader import Reader
from datacache.order import Position
from datacache.pool.spec import Layout

IN_FLIGHT = 4
"""Number of windows or batches filled concurrently: some are read while another is decoded."""
HUGE_PAGE = 2**21
"""Size of a huge page of x86-64 in bytes."""


class Buffers:
    """Reuses memory for batches: allocating new memory would take as long as the copy into it."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self._lock = layout, threading.Lock()
        self._memory: list[np.ndarray] = []
        # Measure how many references Python reports for an array that only one list holds.
        self._bytes, self._idle_references = 0, sys.getrefcount((probe := [np.zeros(1)])[0])
        del probe

    def take(self, samples: int) -> list[np.ndarray]:
        """Returns an aligned array `[samples, *shape]` per component, in unused memory."""
        with self._lock:
            size = self._layout.offsets(samples)[-1]
            if size > self._bytes:
                self._memory, self._bytes = [], size
            # Every array or tensor that shares this memory holds a reference to its owner.
            for index in range(len(self._memory)):
                if sys.getrefcount(self._memory[index]) <= self._idle_references:
                    return self._columns(index, samples)
            self._memory.append(np.frombuffer(huge_pages(self._bytes), np.uint8))
            return self._columns(-1, samples)

    def _columns(self, index: int, samples: int) -> list[np.ndarray]:
        memory = self._memory[index]
        # Skip the memory before the first boundary of a huge page.
        return self._layout.columns(memory[-memory.ctypes.data % HUGE_PAGE :], samples)


def huge_pages(size: int) -> mmap.mmap:
    """Returns new memory, in huge pages if the kernel supports them."""
    # The page fault at the first access to a page of 4 KiB takes longer than filling the page.
    rounded = -(-size // HUGE_PAGE) * HUGE_PAGE
    # Map the pages privately, because a forked child must not see them change.
    pages = mmap.mmap(-1, rounded + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # The kernel may have been built without support for huge pages.
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def batches(
    epochs: EpochIterator, layout: Layout, structure: Any, reader: Reader
) -> tf.data.Dataset:
    """Returns a dataset of this rank's shares of global batches; each iteration is an epoch."""
    buffers = None if layout.varies else Buffers(layout)
    types = [tf.as_dtype(component.dtype) for component in layout.components]
    iterations = Iterations(epochs, reader)

    def read(number: np.ndarray, step: np.ndarray, steps: np.ndarray) -> Sequence[np.ndarray]:
        samples = iterations.samples(int(number), int(step))
        if step == steps - 1:
            iterations.end(int(number))
        return reader.batch(samples, buffers.take(len(samples)) if buffers else None)

    def fetch(*where: tf.Tensor) -> Any:
        # Set the shapes, which `numpy_function` loses and Keras needs to build models. In the debug
        # mode of tf.data, `numpy_function` returns a single array without a list around the array.
        arrays = tf.nest.flatten(tf.numpy_function(read, where, types))
        for array, component in zip(arrays, layout.components, strict=True):
            array.set_shape([None, *component.shape])
        return tf.nest.pack_sequence_as(structure, arrays)

    def steps(_: tf.Tensor) -> tf.data.Dataset:
        number, count = tf.numpy_function(iterations.begin, [], [tf.int64, tf.int64])
        return tf.data.Dataset.range(count).map(lambda step: (number, step, count))

    # Call Python only once per iteration and once per batch, because each call waits for the GIL.
    data = (
        tf.data.Dataset.from_tensors(0)
        .flat_map(steps)
        .map(fetch, num_parallel_calls=IN_FLIGHT, deterministic=True)
        .prefetch(1)
    )
    # TensorFlow would reject a first iteration that is shorter than the asserted length.
    if epochs.all_whole:
        data = data.apply(tf.data.experimental.assert_cardinality(len(epochs)))
    options = tf.data.Options()
    # Disable autotuning, which stalls the end of each epoch for seconds.
    options.autotune.enabled = False
    # A distribution strategy must not shard the batches, which are this rank's shares already.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return data.with_options(options)


class Iterations:
    """Started iterations over a dataset, by index."""

    def __init__(self, epochs: EpochIterator, reader: Reader) -> None:
        self._epochs, self._reader = epochs, reader
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._begun: dict[int, Position] = {}
        self._latest: dict[int, tuple[list[np.ndarray], Callable[[int], None]]] = {}

    def begin(self) -> tuple[np.int64, np.int64]:
        """Starts an iteration; returns its index and its number of steps."""
        with self._lock:
            number = next(self._numbers)
            begin, shares = self._epochs.begin()
            self._begun[number] = begin
            # Keep the previous iteration, which may have batches in flight.
            self._latest = {n: latest for n, latest in self._latest.items() if n == number - 1}
            self._latest[number] = shares, self._reader.look_ahead(shares)
        return np.int64(number), np.int64(len(shares))

    def samples(self, number: int, step: int) -> np.ndarray:
        """Returns the indices of the samples of a step."""
        with self._lock:
            if number not in self._latest:
                # The iteration was dropped, because three or more iterators are open.
                self._latest[number] = self._epochs.shares(self._begun[number]), lambda _: None
            shares, look_ahead = self._latest[number]
        look_ahead(step)
        return shares[step]

    def end(self, number: int) -> None:
        """Records the end of an iteration, so that the next iteration starts at its end."""
        self._epochs.end(self._begun[number])


class CachePyDataset(keras.utils.PyDataset):
    """Batches for Keras; a few threads read ahead of the batch that Keras requests."""

    def __init__(
        self,
        epochs: EpochIterator,
        reader: Reader,
        read: Callable[[np.ndarray], Any],
        arguments: dict[str, Any],
    ) -> None:
        # Limit Keras to one worker, which requests batches in order; `_threads` read concurrently.
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
            # The first request starts an epoch, regardless of its step. Later requests read that
            # epoch until the position of training changes.
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

    @override
    def on_epoch_end(self) -> None:
        # Keras also signals the end of an epoch after it has built a model from some batches.
        if self._begun is not None and len(self._asked) == self._begun[1]:
            self._iterations.end(int(self._begun[0]))


class RandomAccess:
    """Sequence of a cache's samples, as nested NumPy arrays; see `Cache.random_access`.

    Args:
      cache: Cache that the samples are read from.

    Example:
      >>> import datacache, tempfile
      >>> source = datacache.from_dataset(tf.data.Dataset.range(5), key="range(5)")
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     cache = datacache.Cache(source, memory=f"{folder}/memory")
      ...     samples = cache.random_access()
      ...     print(len(samples), samples[3])
      ...     cache.close()
      5 3
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __len__(self) -> int:
        return len(self._cache)

    def __getitem__(self, sample: int | slice) -> Any:
        """Returns a sample, or a list of the samples of a slice."""
        chosen = range(len(self))[sample]
        if isinstance(chosen, range):
            return [self[index] for index in chosen]
        return tf.nest.map_structure(
            lambda array: array[0], self._cache._nested_batch(np.array([chosen]))
        )


@functools.cache
def keep_order() -> None:
    """Makes `fit` request the batches of a cache in order, as it does with `tf.data`."""
    # By default, `fit` shuffles the batches of a `PyDataset` independently on each rank.
    make = PyDatasetAdapter.__init__

    @functools.wraps(make)
    def make_in_order(self: Any, x: Any, class_weight: Any = None, shuffle: bool = False) -> None:
        make(self, x, class_weight, shuffle and not isinstance(x, CachePyDataset))

    PyDatasetAdapter.__init__ = make_in_order

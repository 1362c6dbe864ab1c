"""Batches in TensorFlow, made of the indices of samples."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from datacache.nodes.reader import Reader
from datacache.order import Order, Position
from datacache.pool.layout import Layout
from datacache.system.background import BackgroundSteps, populate_page_tables
from datacache.windows import IN_FLIGHT

LARGE_PAGE = 2**21
"""Bytes of a large page of x86-64."""
BUFFERS = IN_FLIGHT + 3
"""Batches of one iteration that exist at a time: those in flight, one that waits, and two that
training holds."""
REMEDY = (
    "Give fit the callback keras_callbacks.CachePosition(cache, data), or iterate over "
    "cache.counted(data); data to validate on takes shuffle=False."
)


class EpochIterator:
    """Iterations of one rank over the samples, one epoch each, and the progress of training.

    Batches are read ahead, and Keras looks at one to build a model, so what was read does not tell
    what was trained. Whoever trains says which epoch begins (`begin_epoch` in `fit`, `go_on` in a
    loop) and counts steps. If nobody does, the iteration after a complete one is the next epoch,
    which ranks might see differently.

    Args:
      order: Order of the samples.
      rank: Index of this rank.
      ranks: Number of ranks.
      state: State to go on from, as `state_dict` returns it.

    Attributes:
      order: Order of the samples.

    Raises:
      ValueError: If a batch, or the rest of the epoch, has fewer samples than there are ranks, or
        the state is of other samples or of another order.
    """

    def __init__(
        self, order: Order, rank: int, ranks: int, state: dict[str, Any] | None = None
    ) -> None:
        self.order, self._rank, self._ranks = order, rank, ranks
        self._next = Position() if state is None else order.load_state_dict(state)
        # Where the iteration in training began, and its steps so far. `_next` moves on when the
        # last batch is read, which is before it is trained.
        self._begin, self._trained = self._next, 0
        self._told = self._handed_out = False
        # For its error, which is due here and not at the first batch.
        order.steps(self._next, ranks)

    def __len__(self) -> int:
        """Number of steps of the next iteration."""
        return self.order.steps(self._next, self._ranks)

    @property
    def share(self) -> int:
        """Most samples of this rank in a batch; one that took in the rest may have one more."""
        return -(-min(self.order.global_batch, self.order.samples) // self._ranks)

    @property
    def begins_within_an_epoch(self) -> bool:
        """True if the next iteration is shorter than those after it."""
        return self._next.samples > 0

    def begin(self) -> tuple[Position, list[np.ndarray]]:
        """Begins the next iteration.

        Returns:
          A tuple of two: the position at its begin, and for each of its steps the indices of this
          rank's samples, int64.

        Raises:
          RuntimeError: If nobody said which epoch it is, and ranks could see that differently.
        """
        ambiguous = self.begins_within_an_epoch or (self._ranks > 1 and self._handed_out)
        if ambiguous and self.order.shuffle and not self._told:
            raise RuntimeError(
                f"On several ranks, or within an epoch, it must be said which pass begins. {REMEDY}"
            )
        self._handed_out = True
        return self._next, self.shares(self._next)

    def shares(self, begin: Position) -> list[np.ndarray]:
        """Returns the indices of this rank's samples at each step of an iteration, int64.

        Args:
          begin: Position at the begin of the iteration.
        """
        return [share for share, _ in self.order.shares(begin, self._rank, self._ranks)]

    @property
    def position(self) -> Position:
        """Position at which the next iteration begins."""
        return self._next

    def end(self, begin: Position) -> None:
        """Says that an iteration is complete.

        Args:
          begin: Position at the begin of the iteration. It may be an old iteration that somebody
            still reads, and then nothing changes.
        """
        if self._next == begin:
            self._next = Position(epoch=begin.epoch + 1)

    def begin_epoch(self, epoch: int) -> None:
        """Says that the next iteration is a whole epoch, whose steps will be counted.

        Args:
          epoch: Index of the epoch.

        Raises:
          RuntimeError: If the next iteration begins within an epoch.
        """
        if self.begins_within_an_epoch:
            raise RuntimeError(
                f"In fit, epochs are whole. Received: {self._next.samples} samples done of epoch "
                f"{self._next.epoch}. Let keras_callbacks.Checkpoint resume the job: it passes "
                "over those; or iterate over cache.counted(data)."
            )
        self._begin = self._next = Position(epoch=epoch)
        self._trained, self._told = 0, True

    def go_on(self) -> None:
        """Says that the next iteration begins where training is, and that steps will be counted.

        Raises:
          RuntimeError: If that is within an epoch, and the dataset has told TensorFlow that all its
            iterations are whole epochs.
        """
        began_whole, position = not self._begin.samples, self._position()
        if began_whole and position.samples:
            raise RuntimeError(
                "A loop that was left within an epoch goes on with a new dataset. Received: the "
                "old one. Make it: cache.dataset(..., state=cache.state_dict(data))."
            )
        self._begin = self._next = position
        self._trained, self._told = 0, True

    def count(self, steps: int) -> None:
        """Says that more steps were trained.

        Args:
          steps: Number of steps; those beyond the end of the epoch do not count.
        """
        self._trained = min(self._trained + steps, self.order.steps(self._begin, self._ranks))

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress of training, as JSON can hold it.

        Raises:
          RuntimeError: If batches were handed out and nobody counted the steps.
        """
        if self._handed_out and not self._told:
            raise RuntimeError(
                f"Batches are read ahead, so steps must be counted where they are trained. {REMEDY}"
            )
        return self.order.state_dict(self._position())

    def _position(self) -> Position:
        return self.order.after(self._begin, self._trained, self._ranks)


class Buffers:
    """Memory of batches, which is used again once nobody else holds it.

    Fresh memory would cost as much time as the copy into it.

    Args:
      layout: Layout of the samples, none of whose components varies.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout, self._lock = layout, threading.Lock()
        self._memory: list[np.ndarray] = []
        # References to an array that only one list holds, as Python counts them here.
        self._bytes, self._idle_references = 0, sys.getrefcount((probe := [np.zeros(1)])[0])
        del probe

    def take(self, samples: int) -> list[np.ndarray]:
        """Takes memory that nobody else holds.

        Args:
          samples: Number of samples of the batch.

        Returns:
          An array `[samples, *shape]` for each component, at addresses that TensorFlow takes
          without a copy. Memory is in use as long as one of them is.
        """
        with self._lock:
            size = self._layout.offsets(samples)[-1]
            if size > self._bytes:
                self._memory, self._bytes = [], size
            # Whatever views an array, another array or a tensor, refers to the one that owns the
            # memory.
            for index in range(len(self._memory)):
                if sys.getrefcount(self._memory[index]) <= self._idle_references:
                    return self._columns(index, samples)
            self._memory.append(np.frombuffer(large_pages(self._bytes), np.uint8))
            return self._columns(-1, samples)

    def prepare(self, count: int, samples: int) -> BackgroundSteps:
        """Makes memory before it is asked for, and has the kernel provide its pages on a thread.

        Args:
          count: Number of batches.
          samples: Number of samples of each batch.

        Returns:
          The steps of the thread.
        """
        with self._lock:
            self._bytes = max(self._bytes, self._layout.offsets(samples)[-1])
            new = [large_pages(self._bytes) for _ in range(count)]
            self._memory = [np.frombuffer(pages, np.uint8) for pages in new]
        return BackgroundSteps(populate_page_tables(new, new=True))

    def _columns(self, index: int, samples: int) -> list[np.ndarray]:
        memory = self._memory[index]
        # Memory before the first multiple of a large page cannot be part of one.
        return self._layout.columns(memory[-memory.ctypes.data % LARGE_PAGE :], samples)


def large_pages(size: int) -> mmap.mmap:
    """Returns new memory, in large pages if the kernel has them.

    The kernel stops whoever touches a page for the first time, and for pages of 4 KiB that takes
    longer than to fill them.

    Args:
      size: Bytes that must lie behind the first multiple of `LARGE_PAGE` in the memory.
    """
    rounded = -(-size // LARGE_PAGE) * LARGE_PAGE
    # Private, because a child that was forked must not see the pages change.
    pages = mmap.mmap(-1, rounded + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel may have been built without large pages.
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def batches(
    epochs: EpochIterator, layout: Layout, structure: Any, reader: Reader, warm: bool = False
) -> tf.data.Dataset:
    """Returns a dataset of this rank's share of each global batch.

    Each iteration over it is the next epoch.

    Args:
      epochs: Epoch iterator of this rank.
      layout: Layout of the samples.
      structure: Nested `tf.TensorSpec`s of a sample.
      reader: Reader of batches.
      warm: True if memory holds all samples; the memory of batches is made at once then.
    """
    buffers = None if layout.varies else Buffers(layout)
    if buffers and warm:
        buffers.prepare(min(BUFFERS, len(epochs)), epochs.share)
    types = [tf.as_dtype(component.dtype) for component in layout.components]
    iterations = _Iterations(epochs, reader)

    def read(number: np.ndarray, step: np.ndarray) -> Sequence[np.ndarray]:
        samples = iterations.samples(int(number), int(step))
        return reader.batch(samples, buffers.take(len(samples)) if buffers else None)

    def fetch(number: tf.Tensor, step: tf.Tensor) -> Any:
        # The shapes of what it returns are unknown to TensorFlow, and Keras builds models by them.
        arrays = tf.numpy_function(read, [number, step], types)
        for array, component in zip(arrays, layout.components, strict=True):
            array.set_shape([None, *component.shape])
        return tf.nest.pack_sequence_as(structure, arrays)

    def steps(_: tf.Tensor) -> tf.data.Dataset:
        number, count = tf.numpy_function(iterations.begin, [], [tf.int64, tf.int64])
        return tf.data.Dataset.range(count).map(lambda step: (number, step))

    # Python is called once for an iteration and once for a batch, as it does one thing at a time.
    data = (
        tf.data.Dataset.from_tensors(0)
        .flat_map(steps)
        .map(fetch, num_parallel_calls=IN_FLIGHT, deterministic=True)
        .prefetch(1)
    )
    # TensorFlow holds every iteration to this length, also a first one that is shorter.
    if not epochs.begins_within_an_epoch:
        data = data.apply(tf.data.experimental.assert_cardinality(len(epochs)))
    options = tf.data.Options()
    # Autotuning stalls the ends of epochs for seconds.
    options.autotune.enabled = False
    # Batches are shares of this rank already, which a strategy must not divide again.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return data.with_options(options)


class _Iterations:
    """Iterations over a dataset that have begun, by index.

    Args:
      epochs: Epoch iterator of this rank.
      reader: Reader of batches.
    """

    def __init__(self, epochs: EpochIterator, reader: Reader) -> None:
        self._epochs, self._reader = epochs, reader
        self._numbers = itertools.count()
        self._begun: dict[int, Position] = {}
        self._latest: dict[int, tuple[list[np.ndarray], Callable[[int], None]]] = {}

    def begin(self) -> tuple[np.int64, np.int64]:
        """Begins an iteration, and returns its number and the number of its steps."""
        number = next(self._numbers)
        begin, shares = self._epochs.begin()
        self._begun[number] = begin
        # The one before may have batches in flight; older iterators are mostly abandoned.
        self._latest = {n: latest for n, latest in self._latest.items() if n == number - 1}
        self._latest[number] = shares, self._reader.look_ahead(shares)
        return np.int64(number), np.int64(len(shares))

    def samples(self, number: int, step: int) -> np.ndarray:
        """Returns the indices of the samples of a step; the last step ends the iteration.

        Args:
          number: Index of the iteration.
          step: Index of the step.
        """
        begin = self._begun[number]
        if number not in self._latest:
            # Somebody reads an old iterator after all: three or more are open on one dataset.
            self._latest[number] = self._epochs.shares(begin), lambda _: None
        shares, look_ahead = self._latest[number]
        look_ahead(step)
        if step == len(shares) - 1:
            self._epochs.end(begin)
        return shares[step]

"""From the numbers of samples to batches in TensorFlow."""

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
BUFFERS = IN_FLIGHT + 3
"""Batches of one pass that there are at a time: in flight, one that waits, and two that training holds."""
REMEDY = (
    "Give fit the callback keras_callbacks.CachePosition(cache, data), or iterate over cache.counted(data); data to "
    "validate on takes shuffle=False."
)


class EpochIterator:
    """Passes of one rank over the samples: one epoch each, and how far training has come.

    Batches are read ahead, and Keras looks at one to build a model, so what was read does not tell what was trained:
    whoever trains says which pass begins (`begin_epoch` in `fit`, `go_on` in a loop) and counts steps. If nobody
    does, the pass that follows a whole one is the next epoch, which ranks might see differently.

    Args:
      order: Of the samples.
      rank: Of this process.
      ranks: How many there are.
      state: Where to begin, from `state_dict`.

    Raises:
      ValueError: If a batch, or the rest of the epoch, has fewer samples than there are ranks.
    """

    def __init__(
        self, order: Order, rank: int, ranks: int, state: dict[str, Any] | None = None
    ) -> None:
        self.order, self._rank, self._ranks = order, rank, ranks
        self._next = Position() if state is None else order.load_state_dict(state)
        self._begin, self._trained = self._next, 0
        self._told = self._handed_out = False
        order.steps(self._next, ranks)

    def __len__(self) -> int:
        """Steps of the next pass."""
        return self.order.steps(self._next, self._ranks)

    @property
    def share(self) -> int:
        """The most samples of a batch of this rank's."""
        return -(-min(self.order.global_batch, self.order.samples) // self._ranks)

    @property
    def begins_within_an_epoch(self) -> bool:
        """Whether the next pass is shorter than those after it."""
        return self._next.samples > 0

    def begin(self) -> tuple[Position, list[np.ndarray]]:
        """Where the next pass begins, and the numbers of this rank's samples at each of its steps.

        Raises:
          RuntimeError: If nobody said which pass it is, and ranks could see that differently.
        """
        ambiguous = self.begins_within_an_epoch or (self._ranks > 1 and self._handed_out)
        if ambiguous and self.order.shuffle and not self._told:
            raise RuntimeError(
                f"On several ranks, or within an epoch, it must be said which pass begins. {REMEDY}"
            )
        self._handed_out = True
        return self._next, self.shares(self._next)

    def shares(self, begin: Position) -> list[np.ndarray]:
        """The numbers of this rank's samples at each step of the pass that begins there."""
        return [share for share, _ in self.order.shares(begin, self._rank, self._ranks)]

    @property
    def position(self) -> Position:
        """Where the next pass begins."""
        return self._next

    def end(self, begin: Position) -> None:
        """The pass that began there is over; it may be an old one that somebody still reads."""
        if self._next == begin:
            self._next = Position(epoch=begin.epoch + 1)

    def begin_epoch(self, epoch: int) -> None:
        """The next pass is that whole epoch, and steps will be counted.

        Raises:
          RuntimeError: If it goes on within an epoch.
        """
        if self.begins_within_an_epoch:
            raise RuntimeError(
                f"In fit, epochs are whole. Received: {self._next.samples} samples done of epoch {self._next.epoch}. "
                "Let keras_callbacks.Checkpoint resume the job: it passes over those; or iterate over "
                "cache.counted(data)."
            )
        self._begin = self._next = Position(epoch=epoch)
        self._trained, self._told = 0, True

    def go_on(self) -> None:
        """The next pass begins where training is, and steps will be counted.

        Raises:
          RuntimeError: If that is within an epoch, and the dataset has told TensorFlow that its passes are whole.
        """
        whole, position = not self._begin.samples, self._position()
        if whole and position.samples:
            raise RuntimeError(
                "A loop that was left within an epoch goes on with a new dataset. Received: the old one. Make it: "
                "cache.dataset(..., state=cache.state_dict(data))."
            )
        self._begin = self._next = position
        self._trained, self._told = 0, True

    def count(self, steps: int) -> None:
        """Says that so many steps more were trained, of which an epoch may have had fewer."""
        self._trained = min(self._trained + steps, self.order.steps(self._begin, self._ranks))

    def state_dict(self) -> dict[str, Any]:
        """Where training has come to, for JSON.

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
    """Arrays for batches that are used again once nobody else holds them: fresh memory costs as much as the copy.

    Args:
      layout: Of the samples; no component varies.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout, self._lock = layout, threading.Lock()
        self._memory: list[np.ndarray] = []
        self._bytes, self._idle = 0, sys.getrefcount((probe := [np.zeros(1)])[0])
        del probe

    def take(self, samples: int) -> list[np.ndarray]:
        """An array `[samples, *shape]` for each component, at addresses that TensorFlow takes without a copy."""
        with self._lock:
            size = self._layout.offsets(samples)[-1]
            if size > self._bytes:
                self._memory, self._bytes = [], size
            # Whatever views an array, an array of NumPy's or a tensor, refers to the one that owns the memory.
            for place in range(len(self._memory)):
                if sys.getrefcount(self._memory[place]) <= self._idle:
                    return self._columns(place, samples)
            self._memory.append(np.frombuffer(large_pages(self._bytes), np.uint8))
            return self._columns(-1, samples)

    def prepare(self, count: int, samples: int) -> BackgroundSteps:
        """Makes memory for so many batches of so many samples, ready to be written before it is asked for."""
        with self._lock:
            self._bytes = max(self._bytes, self._layout.offsets(samples)[-1])
            new = [large_pages(self._bytes) for _ in range(count)]
            self._memory = [np.frombuffer(pages, np.uint8) for pages in new]
        return BackgroundSteps(populate_page_tables(new, new=True))

    def _columns(self, place: int, samples: int) -> list[np.ndarray]:
        memory = self._memory[place]
        return self._layout.columns(memory[-memory.ctypes.data % LARGE_PAGE :], samples)


def large_pages(size: int) -> mmap.mmap:
    """New memory, with `size` bytes behind its first multiple of `LARGE_PAGE`, in such pages if it can be.

    The kernel stops whoever touches a page for the first time, and for pages of 4 KiB that takes longer than to fill
    them.
    """
    whole = -(-size // LARGE_PAGE) * LARGE_PAGE
    # Of this process alone: a child that was forked must not see them change.
    pages = mmap.mmap(-1, whole + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel may have been built without them.
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def batches(
    epochs: EpochIterator, layout: Layout, structure: Any, reader: Reader, warm: bool = False
) -> tf.data.Dataset:
    """A dataset of this rank's part of each global batch; each iteration is the next pass.

    Args:
      epochs: What to read.
      layout: Of the samples.
      structure: Nested `tf.TensorSpec`s of a sample.
      reader: Where samples come from.
      warm: Whether memory holds them all; that of batches is made while the job gets ready.
    """
    buffers = None if layout.varies else Buffers(layout)
    if buffers and warm:
        buffers.prepare(min(BUFFERS, len(epochs)), epochs.share)
    types = [tf.as_dtype(component.dtype) for component in layout.components]
    under_way = _UnderWay(epochs, reader)

    def read(number: np.ndarray, step: np.ndarray) -> Sequence[np.ndarray]:
        samples = under_way.samples(int(number), int(step))
        return reader.batch(samples, buffers.take(len(samples)) if buffers else None)

    def fetch(number: tf.Tensor, step: tf.Tensor) -> Any:
        arrays = tf.numpy_function(read, [number, step], types)
        for array, component in zip(arrays, layout.components, strict=True):
            array.set_shape([None, *component.shape])
        return tf.nest.pack_sequence_as(structure, arrays)

    def steps(_: tf.Tensor) -> tf.data.Dataset:
        number, count = tf.numpy_function(under_way.begin, [], [tf.int64, tf.int64])
        return tf.data.Dataset.range(count).map(lambda step: (number, step))

    # Python is asked once for a pass and once for a batch: it can do one thing at a time.
    data = (
        tf.data.Dataset.from_tensors(0)
        .flat_map(steps)
        .map(fetch, num_parallel_calls=IN_FLIGHT, deterministic=True)
        .prefetch(1)
    )
    if not epochs.begins_within_an_epoch:
        data = data.apply(tf.data.experimental.assert_cardinality(len(epochs)))
    options = tf.data.Options()
    # Tuning stalls the ends of epochs for seconds.
    options.autotune.enabled = False
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return data.with_options(options)


class _UnderWay:
    """Passes that iterators have begun, by number."""

    def __init__(self, epochs: EpochIterator, reader: Reader) -> None:
        self._epochs, self._reader = epochs, reader
        self._numbers = itertools.count()
        self._begun: dict[int, Position] = {}
        self._latest: dict[int, tuple[list[np.ndarray], Callable[[int], None]]] = {}

    def begin(self) -> tuple[np.int64, np.int64]:
        """The number of the next pass, and how many steps it has."""
        number = next(self._numbers)
        begin, shares = self._epochs.begin()
        self._begun[number] = begin
        self._latest = {n: of for n, of in self._latest.items() if n == number - 1}
        self._latest[number] = shares, self._reader.look_ahead(shares)
        return np.int64(number), np.int64(len(shares))

    def samples(self, number: int, step: int) -> np.ndarray:
        """The samples of a step of a pass; the pass is over once its last step is read."""
        begin = self._begun[number]
        if number not in self._latest:
            # One of three iterators or more over one dataset.
            self._latest[number] = self._epochs.shares(begin), lambda _: None
        shares, look_ahead = self._latest[number]
        look_ahead(step)
        if step == len(shares) - 1:
            self._epochs.end(begin)
        return shares[step]

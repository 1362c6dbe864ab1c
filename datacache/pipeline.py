"""From the numbers of samples to batches in TensorFlow."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from datacache.layout import ALIGNMENT, Layout
from datacache.order import Order, Position

IN_FLIGHT = 4
"""Batches that are read at a time, so that a cold source is never idle while a batch ends."""


class Passes:
    """Passes of one rank over the samples: one epoch each, and how far training has come.

    A pass that is left before its end begins again the next time: Keras looks at a first batch to build a model.

    Args:
      order: Of the samples.
      rank: Of this process.
      ranks: How many there are.
    """

    def __init__(self, order: Order, rank: int, ranks: int) -> None:
        self.order, self._rank, self._ranks = order, rank, ranks
        self._begin = self._next = Position()
        self._trained: int | None = None
        self._handed_out = False
        order.steps(Position(), ranks)

    @property
    def steps(self) -> int:
        """Of the next pass."""
        return self.order.steps(self._next, self._ranks)

    def shares(self) -> Iterator[np.ndarray]:
        """The numbers of this rank's samples at each step of the next pass."""
        begin = self._next
        for share, _ in self.order.shares(begin, self._rank, self._ranks):
            self._handed_out = True
            yield share
        self._next = Position(epoch=begin.epoch + 1)

    def share(self, step: int) -> np.ndarray:
        """The same for one step, by number."""
        return self._current()[step]

    def end_pass(self) -> None:
        """The next pass is the one after this."""
        self._next = Position(epoch=self._next.epoch + 1)

    def count(self, steps: int = 1) -> None:
        """Says that so many steps more were trained, or with 0 that steps will be counted."""
        self._trained = (self._trained or 0) + steps

    def state_dict(self) -> dict[str, Any]:
        """Where training has come to, for JSON.

        Raises:
          RuntimeError: If batches were handed out and nobody counted the steps.
        """
        if self._handed_out and self._trained is None:
            raise RuntimeError(
                "Batches are read ahead, so steps must be counted where they are trained. Received: state_dict() "
                "without a count. Give fit the callback keras_callbacks.CachePosition(cache), or iterate over "
                "cache.counted(data)."
            )
        return self.order.state_dict(self.order.after(self._begin, self._trained or 0, self._ranks))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there with the next pass."""
        self._begin = self._next = self.order.load_state_dict(state)
        self._trained, self._handed_out = None if self._trained is None else 0, False

    def _current(self) -> list[np.ndarray]:
        if getattr(self, "_of", None) != self._next:
            self._of: Position = self._next
            self._shares = [share for share, _ in self.order.shares(self._next, self._rank, self._ranks)]
        return self._shares


class Buffers:
    """Arrays for batches that are used again once nobody else holds them: fresh memory costs as much as the copy.

    Args:
      layout: Of the samples; no component varies.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout, self._free = layout, list[list[np.ndarray]]()

    def take(self, samples: int) -> list[np.ndarray]:
        """An array `[samples, *shape]` for each component, at an address that TensorFlow takes without a copy."""
        for arrays in self._free:
            # This list, the loop of `all` and getrefcount itself hold each of them.
            if len(arrays[0]) >= samples and all(sys.getrefcount(array) <= 3 for array in arrays):
                return [array[:samples] for array in arrays]
        arrays = [
            _aligned((samples, *component.column[1]), component.column[0]) for component in self._layout.components
        ]
        self._free = [*self._free[-2 * IN_FLIGHT :], arrays]
        return [array[:samples] for array in arrays]


def batches(
    passes: Passes, layout: Layout, structure: Any, read: Callable[..., Sequence[np.ndarray]]
) -> tf.data.Dataset:
    """A dataset of this rank's part of each global batch; each iteration is the next pass.

    Args:
      passes: What to read.
      layout: Of the samples.
      structure: Nested `tf.TensorSpec`s of a sample.
      read: Gives the arrays of samples, given their numbers and arrays that it may use.
    """
    buffers = None if layout.varies else Buffers(layout)
    types = [tf.as_dtype(component.dtype) for component in layout.components]

    def read_into(samples: np.ndarray) -> Sequence[np.ndarray]:
        return read(samples, buffers.take(len(samples)) if buffers else None)

    def fetch(samples: tf.Tensor) -> Any:
        arrays = tf.numpy_function(read_into, [samples], types)
        for array, component in zip(arrays, layout.components, strict=True):
            array.set_shape([None, *component.shape])
        return tf.nest.pack_sequence_as(structure, arrays)

    numbers = tf.data.Dataset.from_generator(passes.shares, output_signature=tf.TensorSpec([None], tf.int64))
    data = numbers.map(fetch, num_parallel_calls=IN_FLIGHT, deterministic=True).prefetch(1)
    if passes.order.steps(Position(), passes._ranks) == passes.steps:
        data = data.apply(tf.data.experimental.assert_cardinality(passes.steps))
    options = tf.data.Options()
    # Tuning stalls the ends of epochs for seconds.
    options.autotune.enabled = False
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return data.with_options(options)


def _aligned(shape: Sequence[int], dtype: str) -> np.ndarray:
    size = int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % ALIGNMENT
    return raw[begin : begin + size].view(dtype).reshape(shape)

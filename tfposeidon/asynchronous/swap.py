"""An exchange of a worker with a centre: one all-reduce of `+x` and `-centre`."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tfposeidon.asynchronous.calls import sum_of_both
from tfposeidon.communication.wire import Wire


class Swapped(NamedTuple):
    """What both sides know after an exchange.

    Attributes:
      difference: Worker's values less the centre's, a float32 vector; less than nothing, that is
        minus the centre, where the worker does not count.
      counts: True if the worker's values count.
      steps: Steps that the worker has taken so far.
      stops: True if the server asks workers to stop.
    """

    difference: tf.Tensor
    counts: bool
    steps: int
    stops: bool


def swap_as_worker(wire: Wire, values: tf.Tensor, counts: bool, steps: int) -> Swapped:
    """Exchanges with the server, which has been called.

    Args:
      wire: Wire of the pair.
      values: This worker's values, a float32 vector.
      counts: False to get the centre alone, as a worker does whose values are not finite.
      steps: Steps that this worker has taken so far.
    """
    # Not times 0, which would leave values that are not finite as they are.
    given = values if counts else tf.zeros_like(values)
    return _swap(wire, given, [float(counts), *_digits(steps), 0.0])


def swap_as_server(wire: Wire, centre: tf.Tensor, stops: bool) -> Swapped:
    """Exchanges with a worker that has called.

    Args:
      wire: Wire of the pair.
      centre: The centre, a float32 vector.
      stops: True to ask the worker to stop.
    """
    return _swap(wire, -centre, [0.0, 0.0, 0.0, float(stops)])


def _swap(wire: Wire, values: tf.Tensor, words: list[float]) -> Swapped:
    vector = tf.concat([values, tf.constant(words, tf.float32)], 0)
    found = sum_of_both(wire, vector, "tp.swap")
    counts, high, low, stops = found[-len(words) :].numpy()
    steps = int(high) * _STEPS + int(low)
    return Swapped(found[: -len(words)], bool(counts), steps, bool(stops))


_STEPS = 2**20
"""Steps that one word counts: float32 holds whole numbers exactly up to 2**24."""


def _digits(steps: int) -> tuple[float, float]:
    return float(steps // _STEPS), float(steps % _STEPS)

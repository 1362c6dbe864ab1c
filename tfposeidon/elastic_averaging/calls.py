"""What workers say to the server: calls, which the server always waits for.

A worker and the server are a pair with collectives of their own. A call is an all-reduce of one
number, which says what comes next. So workers come when they like, and the server reads the centre
only once one has called. To that number the server adds whether workers are to stop, as it was when
it began to wait.

Collectives here run eagerly. Horovod then matches them by their order, which is the order of a
worker's calls: a worker makes one after the other, and the server has a thread for each worker.
They need no thread of TensorFlow's, of which there may be a single one, for the steps.
"""

from __future__ import annotations

import enum

import tensorflow as tf

from tfposeidon.communication.wire import Wire

_KINDS = 16
"""Multiplier by which a call and the number of a centre share one integer."""
_STOP = 2**32
"""What the server adds to a call, above all of them, if workers are to stop."""


class Call(enum.IntEnum):
    """Kinds of calls."""

    ALIVE = 1
    """A worker is slow. Nothing follows, but Horovod no longer finds the server stalled."""
    SWAP = 2
    """An exchange with a centre follows, to which both sides add."""
    EPOCH = 3
    """The worker has ended an epoch. Nothing follows."""
    ENDED = 4
    """The worker trains no more. Nothing follows."""
    ASK = 5
    """An answer follows: 1 if the server lets the worker go, else 0."""
    LEAVE = 6
    """The worker calls no more."""
    EMPTY_EPOCH = 7
    """The worker has ended an epoch without a batch. Nothing follows."""
    GIVE = 8
    """The worker's slots follow."""
    TAKE = 9
    """The centre follows, and then the server's slots."""


def make_call(wire: Wire, call: Call, centre: int = 0) -> bool:
    """Calls the server.

    Args:
      wire: Wire of the pair.
      call: Kind of the call, which tells what comes next.
      centre: Number of the centre that it is about.

    Returns:
      True if the server asks workers to stop.
    """
    return _sum(wire, call + _KINDS * centre) >= _STOP


def wait_for_call(wire: Wire, stops: bool) -> tuple[Call, int]:
    """Waits for the worker's next call.

    Args:
      wire: Wire of the pair.
      stops: True to ask the worker to stop.

    Returns:
      What comes next, and the number of the centre that it is about.
    """
    number = _sum(wire, _STOP * stops) % _STOP
    return Call(number % _KINDS), number // _KINDS


def _sum(wire: Wire, number: int) -> int:
    return int(sum_of_both(wire, tf.constant([number], tf.int64), "tp.call").numpy()[0])


def sum_of_both(wire: Wire, mine: tf.Tensor, name: str) -> tf.Tensor:
    """Returns the sum of what both sides of a pair give, the same bits on both.

    Args:
      wire: Wire of the pair.
      mine: Vector of this side, of the same length and dtype on both.
      name: Name of the collective.
    """
    return wire.all_reduce(mine, wire.topology.world, name)


def give(wire: Wire, vector: tf.Tensor, name: str) -> None:
    """Gives the other side of a pair a vector; it calls `receive`.

    Args:
      wire: Wire of the pair.
      vector: Vector, `[n]`.
      name: Name of the collective.
    """
    wire.all_gather(vector, wire.topology.world, name)


def receive(wire: Wire, name: str, dtype: tf.DType) -> tf.Tensor:
    """Returns the vector that the other side of a pair gives.

    Args:
      wire: Wire of the pair.
      name: Name of the collective.
      dtype: Dtype of the vector.
    """
    return wire.all_gather(tf.zeros([0], dtype), wire.topology.world, name)

"""What workers say to the server: calls, which the server always waits for.

A worker and the server are a pair with collectives of their own. A call is an all-reduce of one
number, to which the server adds nothing; it says what comes next. So workers come when they like,
and the server reads the centre only once one has called.

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


class Call(enum.IntEnum):
    """Kinds of calls."""

    ALIVE = 1
    """A worker is slow. Nothing follows, but Horovod no longer finds the server stalled."""
    SWAP = 2
    """An exchange with a centre follows."""
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


def make_call(wire: Wire, call: Call, centre: int = 0) -> None:
    """Calls the server.

    Args:
      wire: Wire of the pair.
      call: Kind of the call, which tells what comes next.
      centre: Number of the centre that it is about.
    """
    wire.all_reduce(tf.constant([call + _KINDS * centre], tf.int64), wire.topology.world, "tp.call")


def wait_for_call(wire: Wire) -> tuple[Call, int]:
    """Waits for the worker's next call.

    Args:
      wire: Wire of the pair.

    Returns:
      What comes next, and the number of the centre that it is about.
    """
    zero = tf.constant([0], tf.int64)
    (number,) = wire.all_reduce(zero, wire.topology.world, "tp.call").numpy()
    return Call(number % _KINDS), int(number) // _KINDS


def sum_of_both(wire: Wire, mine: tf.Tensor, name: str) -> tf.Tensor:
    """Returns the sum of what both sides of a pair give, the same bits on both.

    Args:
      wire: Wire of the pair.
      mine: Vector of this side, of the same length and dtype on both.
      name: Name of the collective.
    """
    return wire.all_reduce(mine, wire.topology.world, name)

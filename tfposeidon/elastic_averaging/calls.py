"""Calls of workers to the server, for which the server always waits.

A worker and the server are a pair with its own communicator. A call is an all-reduce of one number,
which identifies the next operation. So workers call at any time, and the server reads the global
weights only after a call. To that number the server adds a stop flag, as it was when it began to
wait.

Collectives here run eagerly. Horovod matches them by their order, which is the order of a worker's
calls: a worker calls sequentially, and the server has one thread per worker. They use none of
TensorFlow's threads, of which there may be only one, for the steps.
"""

from __future__ import annotations

import enum

import tensorflow as tf

from tfposeidon.communication.wire import Wire

_KINDS = 16
"""Multiplier that packs a call and the index of a center into one integer."""
_STOP = 2**32
"""Stop flag that the server adds to a call; larger than any call."""


class Call(enum.IntEnum):
    """Kinds of calls."""

    ALIVE = 1
    """Keeps Horovod from reporting the server as stalled while a worker is slow. No data follow."""
    SWAP = 2
    """An exchange with a center follows, to which both sides contribute."""
    EPOCH = 3
    """The worker has ended an epoch. No data follow."""
    ENDED = 4
    """The worker has finished training. No data follow."""
    ASK = 5
    """An answer follows: 1 if the server releases the worker, else 0."""
    LEAVE = 6
    """The worker's last call."""
    EMPTY_EPOCH = 7
    """The worker has ended an epoch without a batch. No data follow."""
    GIVE = 8
    """The worker's optimizer state follows."""
    TAKE = 9
    """The global weights follow, and then the server's optimizer state."""


def make_call(wire: Wire, call: Call, centre: int = 0) -> bool:
    """Calls the server about a center; returns whether the server asks workers to stop."""
    return _sum(wire, call + _KINDS * centre) >= _STOP


def wait_for_call(wire: Wire, stops: bool) -> tuple[Call, int]:
    """Waits for the worker's next call; returns its kind and the index of its center."""
    number = _sum(wire, _STOP * stops) % _STOP
    return Call(number % _KINDS), number // _KINDS


def _sum(wire: Wire, number: int) -> int:
    return int(sum_of_both(wire, tf.constant([number], tf.int64), "tp.call").numpy()[0])


def sum_of_both(wire: Wire, mine: tf.Tensor, name: str) -> tf.Tensor:
    """Returns the sum of both sides' vectors, with the same bits on both."""
    return wire.all_reduce(mine, wire.topology.world, name)


def give(wire: Wire, vector: tf.Tensor, name: str) -> None:
    """Sends a vector, `[n]`, to the other side of a pair, which calls `receive`."""
    wire.all_gather(vector, wire.topology.world, name)


def receive(wire: Wire, name: str, dtype: tf.DType) -> tf.Tensor:
    """Returns the vector that the other side of a pair sends with `give`."""
    return wire.all_gather(tf.zeros([0], dtype), wire.topology.world, name)

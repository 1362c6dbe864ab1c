"""Counts the samples, ranks and gradients of a step over the job.

The weight of a rank is its share of all samples. Waiting for their sum would take as long as a
small step. Ranks therefore expect as many samples as in the last step, and report in the cycle of
the first bucket whether they had that many; see `Exchanger.weighted_means`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfposeidon.communication.wire import Wire


class Presence(NamedTuple):
    """Participation of ranks in a step, the same on every rank.

    `total` is the sum of the counted number, `absent` the number of ranks with exhausted input, and
    `gradients` the number of ranks with each gradient, `[variables]`. All are float32.
    """

    total: tf.Tensor
    absent: tf.Tensor
    gradients: tf.Tensor

    @property
    def any_gradient(self) -> tf.Tensor:
        """True for each variable that has a gradient on any rank, `[variables]` bool."""
        return self.gradients > 0.0


def weight_of(count: tf.Tensor, total: tf.Tensor, ranks: int) -> tf.Tensor:
    """Returns the weight of a rank with `count` of `total` samples, a float32 scalar."""
    return tf.math.divide_no_nan(count * float(ranks), total)


def count_presence(
    number: Any,
    gradients: Sequence[Any],
    has_batch: bool,
    wire: Wire,
    name: str,
    zero: tf.Variable,
    with_means: bool = False,
) -> Presence:
    """Counts ranks and gradients, and sums a number, with one small all-reduce.

    `has_batch` is true also for a batch without counted samples. With `with_means`, `number` must
    be 0 or 1.
    """
    # Run on the CPU, because branching on a GPU tensor would wait for the GPU.
    with tf.device("/CPU:0"):
        # A static batch size is a constant, which a collective must not receive.
        unknown = zero.read_value()
        has_gradient = [float(has_batch and gradient is not None) for gradient in gradients]
        flags = tf.constant([float(has_batch), *has_gradient]) + unknown
        mine = tf.concat([(tf.cast(number, tf.float32) + unknown)[tf.newaxis], flags], 0)
        ranks, world = float(wire.topology.size), wire.topology.world
        if with_means:
            # Horovod only fuses all-reduces of equal scale.
            found = tf.round(ranks * wire.all_reduce(mine, world, name, scale=1.0 / ranks))
        else:
            found = wire.all_reduce(mine, world, name)
        return Presence(found[0], ranks - found[1], found[2:])


class CallPresence(NamedTuple):
    """Participation of ranks in a call whose gradients may wait for an update.

    `weight` is this rank's share of the call's samples, times the number of ranks. `finite` is true
    if gradients are finite on all ranks, and `absent` is the number of ranks with exhausted input.
    """

    weight: tf.Tensor
    finite: tf.Tensor
    absent: tf.Tensor


def count_call(
    count: Any, finite: Any, has_batch: bool, wire: Wire, name: str, zero: tf.Variable
) -> CallPresence:
    """Counts the samples and ranks of a call with one all-reduce of three numbers."""
    with tf.device("/CPU:0"):
        count = tf.cast(count, tf.float32)
        # Ignore gradients of empty batches: their mean is NaN.
        own = [count, tf.logical_and(count > 0.0, tf.logical_not(finite)), has_batch]
        mine = tf.stack([tf.cast(one, tf.float32) for one in own]) + zero.read_value()
        total = wire.all_reduce(mine, wire.topology.world, name)
        ranks = float(wire.topology.size)
        weight = weight_of(mine[0], total[0], wire.topology.size)
        return CallPresence(weight, total[1] == 0.0, ranks - total[2])

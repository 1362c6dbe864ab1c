"""Counts of the samples, ranks and gradients of a step over the job.

A rank weighs by its share of all samples. To wait for their sum takes as long as a small step. So
ranks expect as many samples as in the last step, and report in the cycle of the first bucket
whether they had that many; see `Exchanger.weighted_means`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfposeidon.communication.wire import Wire
from tfposeidon.planning.plan import Plan


class Presence(NamedTuple):
    """Participation of ranks in a step, the same on every rank.

    Attributes:
      total: Sum over ranks of the number that was counted, a float32 scalar.
      absent: Number of ranks that had no batch left and contributed nothing, a float32 scalar.
      gradients: Number of ranks with a gradient, `[variables]` float32.
    """

    total: tf.Tensor
    absent: tf.Tensor
    gradients: tf.Tensor

    @property
    def any_gradient(self) -> tf.Tensor:
        """True for each variable of which any rank has a gradient, `[variables]` bool."""
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

    Args:
      number: Number to sum over ranks, a scalar.
      gradients: Gradients of this rank; `None` where there is none.
      has_batch: True if this rank has a batch, which may be one in which nothing counts.
      wire: Collectives that join the ranks.
      name: Name of the all-reduce.
      zero: Float32 variable that holds 0.
      with_means: True to be carried together with means of gradients; `number` is 0 or 1.

    Returns:
      The participation of ranks in the step.
    """
    # On the CPU: a GPU would have to be waited for before anybody can branch on it.
    with tf.device("/CPU:0"):
        # A static batch size is a constant, which must not reach a collective.
        unknown = zero.read_value()
        has_gradient = [float(has_batch and gradient is not None) for gradient in gradients]
        flags = tf.constant([float(has_batch), *has_gradient]) + unknown
        mine = tf.concat([(tf.cast(number, tf.float32) + unknown)[tf.newaxis], flags], 0)
        ranks, world = float(wire.topology.size), wire.topology.world
        if with_means:
            # Horovod fuses all-reduces of one scale only.
            found = tf.round(ranks * wire.all_reduce(mine, world, name, scale=1.0 / ranks))
        else:
            found = wire.all_reduce(mine, world, name)
        return Presence(found[0], ranks - found[1], found[2:])


class CallPresence(NamedTuple):
    """Participation of ranks in a call whose gradients may wait for an update.

    Attributes:
      weight: Share of this rank in all samples of the call, times the number of ranks, a float32
        scalar.
      finite: True if gradients are finite on all ranks, a bool scalar.
      absent: Number of ranks that had no batch left, a float32 scalar.
    """

    weight: tf.Tensor
    finite: tf.Tensor
    absent: tf.Tensor


def count_call(
    count: Any, finite: Any, has_batch: bool, wire: Wire, name: str, zero: tf.Variable
) -> CallPresence:
    """Counts samples and ranks of a call with one all-reduce of three numbers.

    Args:
      count: Number of samples behind the gradients, a scalar.
      finite: True if they are finite, a bool scalar.
      has_batch: True if this rank has a batch.
      wire: Collectives that join the ranks.
      name: Name of the all-reduce.
      zero: Float32 variable that holds 0.

    Returns:
      The participation of ranks in the call.
    """
    with tf.device("/CPU:0"):
        count = tf.cast(count, tf.float32)
        # No samples, no say: a mean over an empty batch is not a number.
        own = [count, tf.logical_and(count > 0.0, tf.logical_not(finite)), has_batch]
        mine = tf.stack([tf.cast(one, tf.float32) for one in own]) + zero.read_value()
        total = wire.all_reduce(mine, wire.topology.world, name)
        ranks = float(wire.topology.size)
        weight = weight_of(mine[0], total[0], wire.topology.size)
        return CallPresence(weight, total[1] == 0.0, ranks - total[2])


def check_regularised(plan: Plan, presence: Presence, ranks: int) -> None:
    """Makes a step end with an error if some ranks only have a gradient of a regularised variable.

    Each rank adds a regulariser's part to what came as factors, and can do so only where it has a
    gradient.

    Args:
      plan: Plan that the step follows.
      presence: Participation of ranks in the step.
      ranks: Number of ranks.
    """
    present = ranks - presence.absent
    for bucket in plan.buckets:
        for member, description in zip(bucket.members, bucket.descriptions, strict=True):
            factors = description.factors
            if bucket.takes_factors and factors is not None and factors.has_local:
                rule = (
                    "A variable that is regularised and sent by factors must have a gradient on "
                    f"all ranks or on none. Received: {description.path!r}, with a gradient on "
                    "some. Give it another scheme by a rule."
                )
                count = presence.gradients[member]
                tf.debugging.Assert(tf.logical_or(count == 0.0, count == present), [rule])

"""Participation of samples, ranks and gradients in a step over the job.

The weight of a rank is its share of all samples. Waiting for their sum would take as long as a
small step. Ranks therefore expect as many samples as in the last step, and report in the cycle of
the first bucket whether they had that many; see `Exchanger.weighted_means`.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf


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


class CallPresence(NamedTuple):
    """Participation of ranks in a call whose gradients may wait for an update.

    `weight` is this rank's share of the call's samples, times the number of ranks. `finite` is true
    if gradients are finite on all ranks, and `absent` is the number of ranks with exhausted input.
    """

    weight: tf.Tensor
    finite: tf.Tensor
    absent: tf.Tensor

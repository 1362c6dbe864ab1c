"""Effective learning rate: how far weights move for a gradient of 1, the rate over the loss scale.

Residuals are rescaled when it changes. Otherwise, a residual computed at one rate and sent at
another would count by their ratio, and one computed at one loss scale would be wrong at the next.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfposeidon.optimizers.wrapping import leaves


class EffectiveRate:
    """Effective rate of the last step that changed the schemes' state; 0 before the first."""

    def __init__(self) -> None:
        with tf.init_scope():
            self.variable = tf.Variable(0.0, trainable=False, name="effective_rate")

    def current(self, optimizer: Any) -> tf.Tensor:
        """Returns the rate of the current step, a float32 scalar."""
        # Use the mean of several optimizers, which is exact if their rates change proportionally.
        found = [tf.cast(leaf.learning_rate, tf.float32) for leaf in leaves(optimizer)]
        rate = tf.add_n(found) / len(found)
        return rate / tf.cast(optimizer.scale_loss(tf.ones([])), tf.float32)

    def rescale(self, current: tf.Tensor) -> tf.Tensor:
        """Returns the factor by which a residual moves weights as far as at its own rate."""
        # A rate of 0 provides no ratio, so the factor is 1.
        known = tf.logical_and(self.variable > 0.0, current > 0.0)
        return tf.where(known, tf.math.divide_no_nan(self.variable.read_value(), current), 1.0)

"""How far weights move for a gradient of 1: what residuals must be rescaled by when it changes.

A residual made at one learning rate and sent at another would count by their ratio, and one made under one
loss scale is wrong under the next.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfposeidon.optimizers.wrapping import innermost


class EffectiveRate:
    """Learning rate over loss scale, at the last step that changed the schemes' state.

    Attributes:
      variable: That rate; 0 before the first such step.
    """

    def __init__(self) -> None:
        with tf.init_scope():
            self.variable = tf.Variable(0.0, trainable=False, name="effective_rate")

    def now(self, optimizer: Any) -> tf.Tensor:
        """Float32; that of the step being made."""
        rate = tf.cast(innermost(optimizer).learning_rate, tf.float32)
        return rate / tf.cast(optimizer.scale_loss(tf.ones([])), tf.float32)

    def rescale(self, now: tf.Tensor) -> tf.Tensor:
        """Factor for what was kept, so that it counts as when it was made; 1 where there is no telling."""
        known = tf.logical_and(self.variable > 0.0, now > 0.0)
        return tf.where(known, tf.math.divide_no_nan(self.variable.read_value(), now), 1.0)

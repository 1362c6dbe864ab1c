"""The effective learning rate, by which residuals are rescaled when it changes.

It is how far weights move for a gradient of 1: the learning rate over the loss scale.

A residual that was made at one learning rate and sent at another would count by their ratio, and
one that was made under one loss scale is wrong under the next.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfposeidon.optimizers.wrapping import leaves


class EffectiveRate:
    """Learning rate over loss scale, at the last step that changed the schemes' state.

    Attributes:
      variable: Variable that holds the rate, a float32 scalar; 0 before the first such step.
    """

    def __init__(self) -> None:
        with tf.init_scope():
            self.variable = tf.Variable(0.0, trainable=False, name="effective_rate")

    def current(self, optimizer: Any) -> tf.Tensor:
        """Returns the rate of the step that is being made, a float32 scalar.

        Args:
          optimizer: Keras optimizer, or loss scale around one.
        """
        # Of several optimizers the mean, which is exact where their rates change alike.
        found = [tf.cast(leaf.learning_rate, tf.float32) for leaf in leaves(optimizer)]
        rate = tf.add_n(found) / len(found)
        return rate / tf.cast(optimizer.scale_loss(tf.ones([])), tf.float32)

    def rescale(self, current: tf.Tensor) -> tf.Tensor:
        """Returns the factor that makes what was kept move the weights as far as at its own rate.

        Args:
          current: Rate of the step that is being made.

        Returns:
          Float32 scalar; 1 where one of the rates is 0, which tells nothing.
        """
        known = tf.logical_and(self.variable > 0.0, current > 0.0)
        return tf.where(known, tf.math.divide_no_nan(self.variable.read_value(), current), 1.0)

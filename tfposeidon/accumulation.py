"""Gradients added up over several calls, so that one exchange serves them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


class Accumulation:
    """Sums of gradients, each times the number of samples behind it, and what they sum to.

    They differ from rank to rank. Every n-th call is due for an update, and starts anew.

    Args:
      optimizer: Makes the variables, as its state.
      variables: What the gradients are for.
      steps: n.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any], steps: int) -> None:
        self.steps = steps
        self.sums = [optimizer.add_variable_from_reference(v, name="accumulator") for v in variables]
        self.weight = optimizer.add_variable((), dtype="float32", name="accumulated_weight")
        self.calls = optimizer.add_variable((), dtype="int", name="accumulated_calls")

    @property
    def variables(self) -> list[Any]:
        return [*self.sums, self.weight, self.calls]

    def add(
        self, places: Sequence[int], gradients: Sequence[Any], count: Any, update: Callable[[list[Any], Any], None]
    ) -> None:
        """Adds gradients; if this call is due, gives their mean to `update`.

        Args:
          places: Of the gradients' variables among those of the constructor.
          gradients: Tensors, `IndexedSlices` or `None`.
          count: Samples behind them, or `None` for equal weights.
          update: Called with the means and, unless `count` is `None`, the number of samples behind them.
        """
        weight = tf.cast(1.0 if count is None else count, tf.float32)
        held = [self.sums[place] for place in places]
        sums = [None if g is None else _plus(total, g, weight) for total, g in zip(held, gradients, strict=True)]
        total, calls = self.weight + weight, self.calls + 1
        due = calls >= self.steps

        def step() -> None:
            means = [None if s is None else tf.math.divide_no_nan(s, tf.cast(total, s.dtype)) for s in sums]
            update(means, None if count is None else total)

        tf.cond(due, step, lambda: None)
        # Assigned last, from plain tensors: a bucket must not wait for another's accumulator.
        for variable, value in zip((*held, self.weight, self.calls), (*sums, total, calls), strict=True):
            if value is not None:
                variable.assign(tf.where(due, tf.zeros_like(value), value))

    def reset(self) -> None:
        """Drops what was added since the last update."""
        for variable in self.variables:
            variable.assign(tf.zeros_like(variable))


def _plus(total: Any, gradient: Any, weight: tf.Tensor) -> tf.Tensor:
    dense = tf.cast(tf.convert_to_tensor(gradient), total.dtype)
    # No samples, no say: a mean over an empty batch is not a number.
    return total + tf.where(weight > 0.0, dense * tf.cast(weight, dense.dtype), tf.zeros_like(dense))

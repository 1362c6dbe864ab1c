"""What layer-wise rules have in common: variables they leave alone, decay inside the rule, wide arithmetic."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfposeidon.optimizers import checks
from tfposeidon.optimizers.exclusion import Exclude, Exclusion, path_of


class LayerWiseOptimizer(keras.optimizers.Optimizer):
    """Base of optimizers that scale a variable's update by norms of the whole variable.

    Arithmetic and state are float32 for float16 and bfloat16 variables: squares would overflow, and small shares of
    a moment would be lost. Other variables keep their own dtype.

    Args:
      learning_rate: A number, a schedule, or a function without arguments.
      weight_decay: For the rule itself; Keras's own, before the rule, does not happen.
      exclude: See `Exclusion`.
      options: Those of `keras.optimizers.Optimizer`.
    """

    def __init__(self, learning_rate: Any, *, weight_decay: float, exclude: Exclude, **options: Any) -> None:
        if isinstance(learning_rate, numbers.Real):
            remedy = "Give a number such as 0.1, or a schedule."
            learning_rate = checks.number("learning_rate", learning_rate, checks.NOT_NEGATIVE, remedy)
        decay = checks.number("weight_decay", weight_decay, checks.NOT_NEGATIVE, "Use 0.0 for none.")
        super().__init__(learning_rate=learning_rate, weight_decay=decay, **options)
        self._exclusion = Exclusion(exclude)

    def build(self, variables: Sequence[Any]) -> None:
        """Finds out which variables are excluded, and makes what Keras keeps for all optimizers."""
        super().build(variables)
        self._excluded = self._exclusion.places(variables)

    def get_config(self) -> dict[str, Any]:
        """Constructor arguments.

        Raises:
          ValueError: If `exclude` is a function.
        """
        return {**super().get_config(), "exclude": self._exclusion.get_config()}

    def _apply_weight_decay(self, variables: Any) -> None:
        """Nothing: the rule has it inside, and it must not happen twice."""

    def _decay_of(self, variable: Any) -> float:
        """0 where excluded, here or with Keras's `exclude_from_weight_decay`, which leaves the ratio alone."""
        decays = not self._is_excluded(variable) and self._use_weight_decay(variable)
        return self.weight_decay if decays else 0.0

    def _is_excluded(self, variable: Any) -> bool:
        return self._get_variable_index(variable) in self._excluded

    def _new_state(self, variables: Sequence[Any], *names: str) -> list[list[keras.Variable | None]]:
        """One list for each name, of zeros like the variables; ordered by variable, then by name, as in Keras."""
        rows = [[self._state_for(variable, name) for name in names] for variable in variables]
        return [list(column) for column in zip(*rows, strict=True)]

    def _state_for(self, variable: Any, name: str) -> keras.Variable | None:
        if self._overwrite_variable_with_gradient(variable):
            return None
        native = variable.value if isinstance(variable, keras.Variable) else variable
        path = path_of(variable).replace("/", "_").replace(":", "_")
        with tf.device(native.device):
            return self.add_variable(native.shape, dtype=wide(native.dtype).name, name=f"{path}_{name}")


def wide(dtype: Any) -> tf.DType:
    """What is calculated in for variables of `dtype`: at least float32."""
    dtype = tf.as_dtype(dtype)
    return tf.float32 if dtype.size < 4 else dtype


def widened(gradient: Any, variable: Any, learning_rate: Any) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Gradient (rows of equal index summed), value and learning rate in one dtype that is wide enough."""
    dtype = wide(variable.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        rows = tf.cast(gradient.values, dtype)
        gradient = tf.math.unsorted_segment_sum(rows, gradient.indices, variable.shape[0])
    return tf.cast(gradient, dtype), tf.cast(variable, dtype), tf.cast(learning_rate, dtype)


def norm(tensor: tf.Tensor) -> tf.Tensor:
    """Euclidean norm, of the whole tensor; elements below about 1e-19 count for nothing in float32."""
    return tf.sqrt(tf.reduce_sum(tf.square(tensor)))


def ratio_or_1(numerator: tf.Tensor, denominator: tf.Tensor, defined: tf.Tensor) -> tf.Tensor:
    """Their ratio where it is `defined`, else 1; nothing is divided by 0."""
    return tf.where(defined, numerator / tf.where(defined, denominator, 1.0), 1.0)

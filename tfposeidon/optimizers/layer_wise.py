"""What layer-wise rules have in common: variables they leave alone, decay inside the rule, norms, wide arithmetic."""

from __future__ import annotations

import abc
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfposeidon import native, ops
from tfposeidon.gradients.description import of_tensorflow, path_of
from tfposeidon.optimizers import checks
from tfposeidon.optimizers.exclusion import Exclude, Exclusion

Norms = Callable[[Sequence[Any], Sequence[Sequence[tf.Tensor]]], tf.Tensor]
"""From variables, and a row of tensors for each of them, to the tensors' norms, `[variables, tensors of a row]`."""


class LayerWiseOptimizer(keras.optimizers.Optimizer, abc.ABC):
    """Base of optimizers that scale a variable's step by norms of the whole variable.

    Arithmetic and state are float32 for float16 and bfloat16 variables: squares would overflow, and small shares of
    a moment would be lost. Other variables keep their own dtype. The norms of all variables are taken in one call.

    Args:
      learning_rate: A number, a schedule, or a function without arguments.
      weight_decay: For the rule itself; Keras's own, before the rule, does not happen.
      exclude: See `Exclusion`.
      parallel: Inside `DistributedOptimizer`, whether each rank takes the norms of some layers only: `True`, `False`,
        or "auto" for what is faster, measured once.
      options: Those of `keras.optimizers.Optimizer`.

    Attributes:
      norms: Takes the norms; within its steps `DistributedOptimizer` sets it.
    """

    def __init__(
        self,
        learning_rate: Any,
        *,
        weight_decay: float,
        exclude: Exclude,
        parallel: bool | str,
        **options: Any,
    ) -> None:
        if isinstance(learning_rate, numbers.Real):
            remedy = "Give a number such as 0.1, or a schedule."
            learning_rate = checks.number(
                "learning_rate", learning_rate, checks.NOT_NEGATIVE, remedy
            )
        decay = checks.number(
            "weight_decay", weight_decay, checks.NOT_NEGATIVE, "Use 0.0 for none."
        )
        super().__init__(learning_rate=learning_rate, weight_decay=decay, **options)
        self._exclusion = Exclusion(exclude)
        self.parallel = _checked_parallel(parallel)
        self.norms: Norms = local_norms

    def build(self, variables: Sequence[Any]) -> None:
        """Finds out which variables are excluded, and makes what Keras keeps for all optimizers."""
        super().build(variables)
        self._excluded = self._exclusion.indices(variables)

    @property
    def excluded(self) -> list[int]:
        """Places of excluded variables in the list of `build`."""
        return sorted(self._excluded)

    def scaled_variables(self, variables: Sequence[Any]) -> list[Any]:
        """Those of these variables that are not excluded."""
        return [
            variable
            for variable in variables
            if self._get_variable_index(variable) not in self._excluded
        ]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Moves one variable, and its state."""
        self._update([(gradient, variable)], learning_rate)

    def get_config(self) -> dict[str, Any]:
        """Constructor arguments.

        Raises:
          ValueError: If `exclude` is a function.
        """
        return {
            **super().get_config(),
            "exclude": self._exclusion.get_config(),
            "parallel": self.parallel,
        }

    def add_variable_from_reference(
        self,
        reference_variable: Any,
        name: str | None = None,
        initializer: Any = "zeros",
        dtype: str | None = None,
    ) -> keras.Variable:
        """As Keras does it, or with another dtype than the variable has."""
        if dtype is None:
            return super().add_variable_from_reference(
                reference_variable, name=name, initializer=initializer
            )
        native_variable = of_tensorflow(reference_variable)
        path = path_of(reference_variable).replace("/", "_").replace(":", "_")
        with tf.device(native_variable.device):
            return self.add_variable(
                native_variable.shape, dtype=dtype, initializer=initializer, name=f"{path}_{name}"
            )

    # ------------------------------------------------------------------ the rule

    @abc.abstractmethod
    def _direction(self, gradient: tf.Tensor, value: tf.Tensor, variable: Any) -> tf.Tensor:
        """The step at a rate of 1, with decay and without the ratio."""

    @abc.abstractmethod
    def _compared_to_weights(
        self, gradient: tf.Tensor, value: tf.Tensor, direction: tf.Tensor
    ) -> tf.Tensor:
        """What is compared with the value: its norm decides the ratio."""

    @abc.abstractmethod
    def _ratios(self, weights: tf.Tensor, others: tf.Tensor, decays: tf.Tensor) -> tf.Tensor:
        """The ratios, `[n]`, from the norms of values and of what `_compared_to_weights` returned, and the weight decays."""

    @abc.abstractmethod
    def _move(self, variable: Any, step: tf.Tensor) -> None:
        """Takes a step, downwards."""

    def _decay_of(self, variable: Any) -> float:
        """0 where excluded, here or with Keras's `exclude_from_weight_decay`, which leaves the ratio alone."""
        decays = not self._is_excluded(variable) and self._use_weight_decay(variable)
        return self.weight_decay if decays else 0.0

    def _is_excluded(self, variable: Any) -> bool:
        return self._get_variable_index(variable) in self._excluded

    def _new_state(
        self, variables: Sequence[Any], *names: str
    ) -> list[list[keras.Variable | None]]:
        """One list for each name, of zeros like the variables; ordered by variable, then by name, as in Keras."""
        rows = [[self._state_for(variable, name) for name in names] for variable in variables]
        return [[row[index] for row in rows] for index in range(len(names))]

    def _state_for(self, variable: Any, name: str) -> keras.Variable | None:
        if self._overwrite_variable_with_gradient(variable):
            return None
        return self.add_variable_from_reference(
            variable, name, dtype=arithmetic_dtype(variable.dtype).name
        )

    # ------------------------------------------------------------------ what Keras calls

    def _apply_weight_decay(self, variables: Any) -> None:
        """Nothing: the rule has it inside, and it must not happen twice."""

    def _distributed_tf_update_step(
        self, distribution: Any, grads_and_vars: Any, learning_rate: Any
    ) -> None:
        if tf.distribute.has_strategy():
            # There a variable is one for each replica, and updated where it is.
            super()._distributed_tf_update_step(distribution, grads_and_vars, learning_rate)
        else:
            self._update(list(grads_and_vars), learning_rate)

    def _update(self, pairs: Sequence[tuple[Any, Any]], learning_rate: Any) -> None:
        """Directions of all variables, then the norms of all, then the steps."""
        variables = [variable for _, variable in pairs]
        gradients = [_dense_gradient(gradient, variable) for gradient, variable in pairs]
        values = [
            tf.cast(variable, gradient.dtype)
            for variable, gradient in zip(variables, gradients, strict=True)
        ]
        steps = [self._direction(*each) for each in zip(gradients, values, variables, strict=True)]
        indices = [
            index for index, variable in enumerate(variables) if not self._is_excluded(variable)
        ]
        rows = [
            [values[i], self._compared_to_weights(gradients[i], values[i], steps[i])]
            for i in indices
        ]
        ratios = self._ratios_of([variables[i] for i in indices], rows)
        for index, ratio in zip(indices, ratios, strict=True):
            steps[index] *= tf.cast(ratio, steps[index].dtype)
        for variable, step in zip(variables, steps, strict=True):
            self._move(variable, step * tf.cast(learning_rate, step.dtype))

    def _ratios_of(
        self, variables: Sequence[Any], rows: Sequence[Sequence[tf.Tensor]]
    ) -> list[tf.Tensor]:
        if not variables:
            return []
        norms = self.norms(variables, rows)
        decays = tf.constant([self._decay_of(variable) for variable in variables], norms.dtype)
        return tf.unstack(self._ratios(norms[:, 0], norms[:, 1], decays))


def local_norms(variables: Sequence[Any], rows: Sequence[Sequence[tf.Tensor]]) -> tf.Tensor:
    """Norms of whole tensors, on this rank alone.

    They are those of `tp.ops.l2_norms`, and TensorFlow's own where that does not go: in XLA, which compiles no op of
    ours, on GPUs it was not built for, and in float64. TensorFlow's are summed in the dtype itself, 16 bits in float32.
    """
    dtype = norm_dtype(rows)
    tensors = [tf.cast(tensor, dtype) for row in rows for tensor in row]
    elsewhere = native.in_xla() or dtype == tf.float64 or _has_cpu_kernels_only()
    norms = tf.stack([_norm(tensor) for tensor in tensors]) if elsewhere else ops.l2_norms(tensors)
    return tf.reshape(norms, [len(rows), -1])


def norm_dtype(rows: Sequence[Sequence[tf.Tensor]]) -> tf.DType:
    """That of their norms: float64 if one of them is, else float32."""
    return (
        tf.float64 if any(tensor.dtype.size > 4 for row in rows for tensor in row) else tf.float32
    )


def _norm(tensor: tf.Tensor) -> tf.Tensor:
    return tf.sqrt(tf.reduce_sum(tf.square(tensor)))


def _has_cpu_kernels_only() -> bool:
    # All weights would be copied there, at every step.
    return bool(tf.config.list_logical_devices("GPU")) and not native.has_gpu_kernels()


def arithmetic_dtype(dtype: Any) -> tf.DType:
    """What is calculated in for variables of `dtype`: at least float32."""
    dtype = tf.as_dtype(dtype)
    return tf.float32 if dtype.size < 4 else dtype


def ratio_or_1(numerator: tf.Tensor, denominator: tf.Tensor, defined: tf.Tensor) -> tf.Tensor:
    """Their ratio where it is `defined`, else 1; nothing is divided by 0."""
    return tf.where(defined, numerator / tf.where(defined, denominator, 1.0), 1.0)


def _dense_gradient(gradient: Any, variable: Any) -> tf.Tensor:
    """The gradient, rows of equal index summed, in a dtype that is wide enough."""
    dtype = arithmetic_dtype(variable.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        rows = tf.cast(gradient.values, dtype)
        gradient = tf.math.unsorted_segment_sum(rows, gradient.indices, variable.shape[0])
    return tf.cast(gradient, dtype)


def _checked_parallel(parallel: Any) -> bool | str:
    if not isinstance(parallel, bool) and parallel != "auto":
        raise ValueError(
            f'`parallel` must be True, False or "auto". Received: parallel={parallel!r}. Leave it out.'
        )
    return parallel

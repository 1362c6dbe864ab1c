"""Base of layer-wise optimizers: exclusion, decay inside the rule, norms, wide arithmetic."""

from __future__ import annotations

import abc
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from tfposeidon import native, ops, ranges
from tfposeidon.gradients.description import of_tensorflow, path_of
from tfposeidon.optimizers.exclusion import Exclude, Exclusion

Norms = Callable[[Sequence[Any], Sequence[Sequence[tf.Tensor]]], tf.Tensor]
"""Function from variables, and a row of tensors for each of them, to the Euclidean norms of the
tensors.

The norms are `[variables, tensors of a row]`; rows have equal lengths.
"""


class LayerWiseOptimizer(keras.optimizers.Optimizer, abc.ABC):
    """Base of optimizers that scale a variable's step by norms of the whole variable.

    A subclass gives the rule as `_direction`, `_compared_to_weights`, `_ratios` and `_move`. A step
    calls `_direction` for all variables, takes the norms of all that are not excluded in one call,
    and then moves all variables.

    Arithmetic and state are float32 for float16 and bfloat16 variables: squares would overflow, and
    small shares of a moment would be lost. Other variables keep their own dtype.

    Args:
      learning_rate: A number from 0, a Keras schedule, or a function without arguments.
      weight_decay: Weight decay inside the rule, from 0; Keras's own, before the rule, is off.
      exclude: Variables with ratio 1 and without decay: see `Exclusion`.
      parallel: True if, inside `DistributedOptimizer`, each rank is to take the norms of some
        layers only; False for all norms on every rank; "auto" for the faster way, measured once.
      **options: Options of `keras.optimizers.Optimizer`.

    Raises:
      ValueError: If an argument is not in its range.

    Attributes:
      norms: Function that takes the norms. `DistributedOptimizer` replaces it during its steps.
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
            learning_rate = ranges.check_number(
                "learning_rate", learning_rate, ranges.NOT_NEGATIVE, remedy
            )
        decay = ranges.check_number(
            "weight_decay", weight_decay, ranges.NOT_NEGATIVE, "Use 0.0 for none."
        )
        super().__init__(learning_rate=learning_rate, weight_decay=decay, **options)
        self._exclusion = Exclusion(exclude)
        self.parallel = _checked_parallel(parallel)
        self.norms: Norms = local_norms

    @override
    def build(self, variables: Sequence[Any]) -> None:
        """Finds out which variables are excluded, and creates what all optimizers of Keras keep."""
        super().build(variables)
        self._excluded = self._exclusion.indices(variables)

    @property
    def excluded(self) -> list[int]:
        """Indices of excluded variables among those of `build`, in ascending order."""
        return sorted(self._excluded)

    def scaled_variables(self, variables: Sequence[Any]) -> list[Any]:
        """Returns those of some variables that are not excluded.

        Args:
          variables: Variables that the optimizer was built for.
        """
        return [
            variable
            for variable in variables
            if self._get_variable_index(variable) not in self._excluded
        ]

    @override
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self._update([(gradient, variable)], learning_rate)

    @override
    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments.

        Raises:
          ValueError: If `exclude` is a function.
        """
        return {
            **super().get_config(),
            "exclude": self._exclusion.get_config(),
            "parallel": self.parallel,
        }

    @override
    def add_variable_from_reference(
        self,
        reference_variable: Any,
        name: str | None = None,
        initializer: Any = "zeros",
        dtype: str | None = None,
    ) -> keras.Variable:
        """Creates state like a variable, as in Keras, or with another dtype than that."""
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
        """Returns the step at a rate of 1, with decay and without the ratio; updates moments.

        Args:
          gradient: Dense gradient, in the dtype of arithmetic.
          value: The variable's value, of the same shape and dtype.
          variable: The variable itself, for its state.
        """

    @abc.abstractmethod
    def _compared_to_weights(
        self, gradient: tf.Tensor, value: tf.Tensor, direction: tf.Tensor
    ) -> tf.Tensor:
        """Returns the tensor whose norm is compared with that of the value to get the ratio."""

    @abc.abstractmethod
    def _ratios(self, weights: tf.Tensor, others: tf.Tensor, decays: tf.Tensor) -> tf.Tensor:
        """Returns the ratios of n variables, `[n]`.

        Args:
          weights: Norms of the values, `[n]`.
          others: Norms of what `_compared_to_weights` returned, `[n]`.
          decays: Weight decays, `[n]`.
        """

    @abc.abstractmethod
    def _move(self, variable: Any, step: tf.Tensor) -> None:
        """Moves a variable down by a step, which has the learning rate and the ratio in it."""

    def _decay_of(self, variable: Any) -> float:
        # Keras's `exclude_from_weight_decay` turns off the decay alone, `exclude` the ratio, too.
        decays = not self._is_excluded(variable) and self._use_weight_decay(variable)
        return self.weight_decay if decays else 0.0

    def _is_excluded(self, variable: Any) -> bool:
        return self._get_variable_index(variable) in self._excluded

    def _new_state(
        self, variables: Sequence[Any], *names: str
    ) -> list[list[keras.Variable | None]]:
        """Returns one list of slots for each name, zeros like the variables."""
        # Created by variable, then by name, which is the order in Keras's optimizers: so their
        # files fit.
        rows = [[self._state_for(variable, name) for name in names] for variable in variables]
        return [[row[index] for row in rows] for index in range(len(names))]

    def _state_for(self, variable: Any, name: str) -> keras.Variable | None:
        # Keras assigns these their gradients (the scales of float8 layers), and updates them by no
        # rule: no optimizer of its own keeps state for them.
        if self._overwrite_variable_with_gradient(variable):
            return None
        return self.add_variable_from_reference(
            variable, name, dtype=arithmetic_dtype(variable.dtype).name
        )

    # ------------------------------------------------------------------ what Keras calls

    @override
    def _apply_weight_decay(self, variables: Any) -> None:
        """Does nothing: the rule has the decay inside, and it must not happen twice."""

    # Private, but the last method of Keras that has all variables at once: it calls `update_step`
    # for one after the other, and the norms are to be taken together.
    @override
    def _distributed_tf_update_step(
        self, distribution: Any, grads_and_vars: Any, learning_rate: Any
    ) -> None:
        if tf.distribute.has_strategy():
            # There a variable has a copy in each replica, and Keras updates each copy where it
            # lies.
            super()._distributed_tf_update_step(distribution, grads_and_vars, learning_rate)
        else:
            self._update(list(grads_and_vars), learning_rate)

    def _update(self, pairs: Sequence[tuple[Any, Any]], learning_rate: Any) -> None:
        """Moves variables: directions of all of them, then the norms of all, then the steps."""
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
    """Returns the norms of whole tensors, taken on this rank alone.

    `tp.ops.l2_norms` takes them, or TensorFlow's own ops where that one cannot: in XLA, which
    compiles no op of ours, on GPUs that it was not built for, and in float64. TensorFlow's sum
    squares in `norm_dtype`, ours in 64 bits.

    Args:
      variables: The variable of each row; other functions of type `Norms` need it, this one not.
      rows: For each variable a row of tensors of any shapes; rows have equal lengths.

    Returns:
      `[variables, tensors of a row]`, in `norm_dtype`.
    """
    dtype = norm_dtype(rows)
    tensors = [tf.cast(tensor, dtype) for row in rows for tensor in row]
    elsewhere = native.in_xla() or dtype == tf.float64 or _has_cpu_kernels_only()
    norms = tf.stack([_norm(tensor) for tensor in tensors]) if elsewhere else ops.l2_norms(tensors)
    return tf.reshape(norms, [len(rows), -1])


def norm_dtype(rows: Sequence[Sequence[tf.Tensor]]) -> tf.DType:
    """Returns the dtype of norms: float64 if a tensor is of more than 32 bits, else float32.

    Args:
      rows: Rows of tensors, one for each variable.
    """
    return (
        tf.float64 if any(tensor.dtype.size > 4 for row in rows for tensor in row) else tf.float32
    )


def _norm(tensor: tf.Tensor) -> tf.Tensor:
    return tf.sqrt(tf.reduce_sum(tf.square(tensor)))


def _has_cpu_kernels_only() -> bool:
    # Our op would run on the CPU, and all weights would be copied there at every step.
    return bool(tf.config.list_logical_devices("GPU")) and not native.has_gpu_kernels()


def arithmetic_dtype(dtype: Any) -> tf.DType:
    """Returns the dtype in which variables are updated: at least float32.

    Args:
      dtype: Dtype of a variable, or its name.

    >>> arithmetic_dtype("bfloat16").name
    'float32'
    """
    dtype = tf.as_dtype(dtype)
    return tf.float32 if dtype.size < 4 else dtype


def ratio_or_1(numerator: tf.Tensor, denominator: tf.Tensor, defined: tf.Tensor) -> tf.Tensor:
    """Returns ratios where they are defined, and 1 elsewhere; nothing is divided by 0.

    Args:
      numerator: Numerator, `[n]` floating point.
      denominator: Denominator, `[n]` of the same dtype; not 0 where `defined`.
      defined: True where the ratio is defined, `[n]` bool.
    """
    return tf.where(defined, numerator / tf.where(defined, denominator, 1.0), 1.0)


def _dense_gradient(gradient: Any, variable: Any) -> tf.Tensor:
    """Returns a dense gradient of `arithmetic_dtype`; rows of equal index are summed."""
    dtype = arithmetic_dtype(variable.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        # Keras leaves rows of equal index apart; summed in 16 bits, many of them would be lost.
        rows = tf.cast(gradient.values, dtype)
        gradient = tf.math.unsorted_segment_sum(rows, gradient.indices, variable.shape[0])
    return tf.cast(gradient, dtype)


def _checked_parallel(parallel: Any) -> bool | str:
    if not isinstance(parallel, bool) and parallel != "auto":
        raise ValueError(
            f'`parallel` must be True, False or "auto". Received: parallel={parallel!r}. Leave '
            "it out."
        )
    return parallel

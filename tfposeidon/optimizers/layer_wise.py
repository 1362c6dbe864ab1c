"""Base class of layer-wise optimizers, which scale the step of each variable by norms.

Norms are computed over whole variables. By default, biases and parameters of normalization layers
are excluded, that is, not scaled.
"""

from __future__ import annotations

import abc
import numbers
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf
from typing_extensions import override

from tfposeidon import native, ops
from tfposeidon.checks import NOT_NEGATIVE, check_number
from tfposeidon.gradients import indices_of, is_overwritten, of_tensorflow, path_of

Exclude = Sequence[str] | None
"""Type of the argument `exclude` of `LARS` and `LAMB`."""

Norms = Callable[[Sequence[Any], Sequence[Sequence[tf.Tensor]]], tf.Tensor]
"""Function of variables and a row of tensors for each, which returns the tensors' Euclidean norms.

The norms have shape `[variables, tensors of a row]`; rows have equal lengths.
"""


# Compare only the last word of the path, so that "unbiased_head/kernel" is not excluded. The number
# of axes is not sufficient, because biases may have two axes (GRU, MultiHeadAttention), as may
# gamma and beta (LayerNormalization over two axes).
_SCALE_OR_SHIFT = re.compile(r"(^|[/_.])(bias|gamma|beta)(:\d+)?$")


def excluded_indices(exclude: Exclude, variables: Sequence[Any]) -> frozenset[int]:
    """Returns the indices of the excluded variables, and warns of patterns without a match.

    >>> import keras
    >>> kernel, bias = keras.Variable([[1.0]], name="kernel"), keras.Variable([1.0], name="bias")
    >>> excluded_indices(None, [kernel, bias]), excluded_indices(["kernel"], [kernel, bias])
    (frozenset({1}), frozenset({0}))
    """
    # Use the shape and path of the whole variable, because a shard owner stores only a flat part of
    # the variable.
    variables = [getattr(variable, "whole", variable) for variable in variables]
    paths = list(map(path_of, variables))
    if exclude is None:
        return frozenset(
            index
            for index, (variable, path) in enumerate(zip(variables, paths, strict=True))
            if len(variable.shape) <= 1 or _SCALE_OR_SHIFT.search(path)
        )
    found = {repr(p): {i for i, x in enumerate(paths) if re.search(p, x)} for p in exclude}
    unused = [pattern for pattern, indices in found.items() if not indices]
    if unused:
        warnings.warn(
            f"`exclude` has patterns that match no variable's path: {', '.join(unused)}. Examples "
            f"of paths: {', '.join(map(repr, paths[:3]))}. Correct the patterns, or omit them.",
            stacklevel=2,
        )
    return frozenset[int]().union(*found.values())


def _checked_patterns(patterns: Any) -> tuple[str, ...]:
    if not (isinstance(patterns, list | tuple) and all(isinstance(p, str) for p in patterns)):
        raise ValueError(
            f"`exclude` must be None, or a list of patterns. Received: exclude={patterns!r}. Use "
            'for example ["bias", "gamma", "beta"], or [] to exclude nothing.'
        )
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"`exclude` must be a list of valid patterns. Received: exclude={patterns!r}, in "
                f"which {pattern!r} is invalid: {error}. Escape it with re.escape."
            ) from error
    return tuple(patterns)


class LayerWiseOptimizer(keras.optimizers.Optimizer, abc.ABC):
    """Base class of optimizers that scale a variable's step by norms of the whole variable.

    A step calls `_direction` for all variables, computes the norms of all non-excluded variables in
    one call, and then moves all variables. Arithmetic and state are float32 for float16 and
    bfloat16 variables, because squares overflow in float16, and because both dtypes lose small
    increments of a moment to rounding. `DistributedOptimizer` replaces `norms` during its steps.
    """

    trust_coefficient = 1.0
    _indices: dict[Any, int]
    _options: ClassVar[tuple[str, ...]] = ()
    """Arguments that a subclass adds to the constructor; attributes have the same names."""

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
            remedy = "Use a number such as 0.1, or a schedule."
            learning_rate = check_number("learning_rate", learning_rate, NOT_NEGATIVE, remedy)
        decay = check_number("weight_decay", weight_decay, NOT_NEGATIVE, "Use 0.0 for none.")
        super().__init__(learning_rate=learning_rate, weight_decay=decay, **options)
        self._exclude: Exclude = None if exclude is None else _checked_patterns(exclude)
        if not isinstance(parallel, bool) and parallel != "auto":
            raise ValueError(
                f'`parallel` must be True, False or "auto". Received: parallel={parallel!r}. Leave '
                "it out."
            )
        self.parallel = parallel
        self.norms: Norms = local_norms

    @override
    def build(self, variables: Sequence[Any]) -> None:
        """Determines the excluded variables, and creates the optimizer's state."""
        if self.built:
            return
        super().build(variables)
        self._excluded = excluded_indices(self._exclude, variables)
        self.__dict__["_indices"] = indices_of(variables)
        self._build_state(variables)

    @abc.abstractmethod
    def _build_state(self, variables: Sequence[Any]) -> None:
        """Creates the optimizer's state for all variables."""

    @property
    def excluded(self) -> list[int]:
        """Indices of excluded variables in the list that `build` received, ascending."""
        return sorted(self._excluded)

    def scaled_variables(self, variables: Sequence[Any]) -> list[Any]:
        """Returns those of `variables` that are not excluded; `build` must have received all."""
        return [variable for variable in variables if not self._is_excluded(variable)]

    @override
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self._update([(gradient, variable)], learning_rate)

    @override
    def get_config(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in (*self._options, "parallel")}
        exclude = None if self._exclude is None else list(self._exclude)
        return {**super().get_config(), **own, "exclude": exclude}

    @override
    def add_variable_from_reference(
        self,
        reference_variable: Any,
        name: str | None = None,
        initializer: Any = "zeros",
        dtype: str | None = None,
    ) -> keras.Variable:
        """Creates state with the shape and name of a variable, optionally with another dtype."""
        variable = of_tensorflow(reference_variable)
        name = f"{path_of(reference_variable)}_{name}".replace("/", "_").replace(":", "_")
        dtype = dtype or variable.dtype.name
        with tf.device(variable.device):
            return self.add_variable(variable.shape, initializer, dtype, name=name)

    # ------------------------------------------------------------------ update

    @abc.abstractmethod
    def _direction(
        self, gradient: tf.Tensor, value: tf.Tensor, variable: Any
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Updates moments; returns the step at rate 1 with decay, and a tensor for the ratio."""

    def _denominators(self, weights: tf.Tensor, others: tf.Tensor, decays: tf.Tensor) -> tf.Tensor:
        """Returns denominators of ratios; `others` are norms of `_direction`'s second result."""
        return others

    def _move(self, variable: Any, step: tf.Tensor) -> None:
        """Moves a variable by `-step`, which includes the learning rate and the ratio."""
        self.assign_sub(variable, step)

    def _decay_of(self, variable: Any) -> float:
        # Keras's `exclude_from_weight_decay` disables only the decay; `exclude` disables both.
        decays = not self._is_excluded(variable) and self._use_weight_decay(variable)
        return self.weight_decay if decays else 0.0

    def _index_of(self, variable: Any) -> int:
        reference = of_tensorflow(variable).ref()
        if reference not in self._indices:
            # Under `tf.distribute`, steps receive the copies of a variable on each device.
            copies = tf.distribute.get_strategy().experimental_local_results
            for index, known in enumerate(self._trainable_variables):
                self._indices |= {copy.ref(): index for copy in copies(of_tensorflow(known))}
        return self._indices[reference]

    def _is_excluded(self, variable: Any) -> bool:
        return self._index_of(variable) in self._excluded

    def _new_state(
        self, variables: Sequence[Any], *names: str
    ) -> list[list[keras.Variable | None]]:
        """Returns zero-initialized state: one list per name, with one entry per variable."""
        found: dict[str, list[keras.Variable | None]] = {name: [] for name in names}
        # Create state by variable, then by name, in the order of Keras's optimizers, so that saved
        # files are compatible.
        for variable in variables:
            dtype = arithmetic_dtype(variable.dtype).name
            for name, of_name in found.items():
                # Keras assigns gradients to overwritten variables (scales of float8 layers) instead
                # of updating them, and its optimizers have no state for them.
                of_name.append(
                    None
                    if is_overwritten(variable)
                    else self.add_variable_from_reference(variable, name, dtype=dtype)
                )
        return list(found.values())

    # ------------------------------------------------------------------ calls from Keras

    @override
    def _apply_weight_decay(self, variables: Any) -> None:
        """Does nothing: the step already includes the decay, which must not be applied twice."""

    # Override this private method, because it is the innermost one in Keras that receives all
    # variables at once. Keras's version calls `update_step` per variable, whereas the norms must be
    # computed together.
    @override
    def _distributed_tf_update_step(
        self, distribution: Any, grads_and_vars: Any, learning_rate: Any
    ) -> None:
        if tf.distribute.has_strategy():
            # Each replica has a copy of the variable, and Keras updates each copy on its device.
            super()._distributed_tf_update_step(distribution, grads_and_vars, learning_rate)
        else:
            self._update(list(grads_and_vars), learning_rate)

    def _update(self, pairs: Sequence[tuple[Any, Any]], learning_rate: Any) -> None:
        """Computes all directions, then all norms, and then moves all variables."""
        variables = [variable for _, variable in pairs]
        gradients = [_dense_gradient(gradient, variable) for gradient, variable in pairs]
        values = [tf.cast(v, g.dtype) for v, g in zip(variables, gradients, strict=True)]
        found = [self._direction(*each) for each in zip(gradients, values, variables, strict=True)]
        steps = [step for step, _ in found]
        indices = [i for i, variable in enumerate(variables) if not self._is_excluded(variable)]
        if indices:
            scaled = [variables[i] for i in indices]
            norms = self.norms(scaled, [[values[i], found[i][1]] for i in indices])
            decays = tf.constant([self._decay_of(variable) for variable in scaled], norms.dtype)
            defined = tf.reduce_all(norms > 0.0, 1)
            # The inner `where` prevents a division by 0.
            denominators = self._denominators(norms[:, 0], norms[:, 1], decays)
            ratios = self.trust_coefficient * norms[:, 0] / tf.where(defined, denominators, 1.0)
            ratios = tf.where(defined, ratios, 1.0)
            for index, ratio in zip(indices, tf.unstack(ratios), strict=True):
                steps[index] *= tf.cast(ratio, steps[index].dtype)
        for variable, step in zip(variables, steps, strict=True):
            self._move(variable, step * tf.cast(learning_rate, step.dtype))


def local_norms(variables: Sequence[Any], rows: Sequence[Sequence[tf.Tensor]]) -> tf.Tensor:
    """Returns the norms of whole tensors in `norm_dtype`, computed on this rank."""
    dtype = norm_dtype(rows)
    tensors = [tf.cast(tensor, dtype) for row in rows for tensor in row]
    # Avoid the native op without its GPU kernel: it would run on the CPU, and every step would copy
    # all weights to the CPU.
    is_on_cpu = bool(tf.config.list_logical_devices("GPU")) and not native.has_gpu_kernels()
    # Use TensorFlow's ops, which sum squares in `dtype`, where the native op cannot run: in XLA, on
    # GPUs that it was not built for, and in float64. The native op sums squares in 64 bits.
    if native.in_xla() or dtype == tf.float64 or is_on_cpu:
        norms = tf.stack([tf.sqrt(tf.reduce_sum(tf.square(tensor))) for tensor in tensors])
    else:
        norms = ops.l2_norms(tensors)
    return tf.reshape(norms, [len(rows), -1])


def norm_dtype(rows: Sequence[Sequence[tf.Tensor]]) -> tf.DType:
    """Returns float64 if a tensor has more than 32 bits per element, else float32."""
    is_wide = any(tensor.dtype.size > 4 for row in rows for tensor in row)
    return tf.float64 if is_wide else tf.float32


def arithmetic_dtype(dtype: Any) -> tf.DType:
    """Returns the dtype in which variables are updated: at least float32.

    >>> arithmetic_dtype("bfloat16").name
    'float32'
    """
    dtype = tf.as_dtype(dtype)
    return tf.float32 if dtype.size < 4 else dtype


def _dense_gradient(gradient: Any, variable: Any) -> tf.Tensor:
    """Returns a dense gradient of `arithmetic_dtype`; rows of equal index are summed."""
    dtype = arithmetic_dtype(variable.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        # Keras does not sum rows of equal index. Sum them in `dtype`, because a sum of many 16-bit
        # values would lose small ones.
        rows = tf.cast(gradient.values, dtype)
        gradient = tf.math.unsorted_segment_sum(rows, gradient.indices, variable.shape[0])
    return tf.cast(gradient, dtype)

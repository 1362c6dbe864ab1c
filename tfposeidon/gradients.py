"""Describes gradients, converts them, and accumulates them over calls.

A `Description` has all properties of a gradient that are known before any step runs. A
`GradientReader` finds structures of gradients in the graph, and only schemes and policies with this
reader interpret these structures. Accumulation works like Keras's `gradient_accumulation_steps`,
but with a weight per call and one exchange per update.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import keras
import tensorflow as tf

from tfposeidon import native
from tfposeidon.communication import wire
from tfposeidon.state.placement import Placement, StateDescription


class Structure(Protocol):
    """Structure of a gradient that a `GradientReader` found; hashable, and the same on every rank.

    Its size, such as the number of batch rows, is known only once a step has run.
    """

    @property
    def is_sized(self) -> bool:
        """True if the size is known."""

    def sized(self, size: float | None) -> Structure:
        """Returns the structure with `size`, a mean over ranks; `None` means an unknown size."""


@dataclass(frozen=True)
class Description:
    """Description of one variable's gradient, the same on every rank.

    `dtype` is the dtype of the exchange. In the first traced step, the policy's reader sets
    `structure`, or the reason `why_no_structure`. `is_value` is true if the gradient replaces the
    variable, as with Keras's `overwrite_with_gradient`.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    structure: Structure | None = None
    why_no_structure: str = ""
    is_value: bool = False

    @property
    def length(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Size of one element in bytes."""
        return tf.as_dtype(self.dtype).size

    @property
    def bytes(self) -> int:
        """Size in bytes of the whole gradient as a dense tensor."""
        return self.length * self.itemsize

    def sized(self, size: float | None) -> Description:
        """Returns the description with the size of its structure, if it has one."""
        structure = self.structure
        return self if structure is None else replace(self, structure=structure.sized(size))


class GradientReader(Protocol):
    """Reads the structure of gradients from the graph of a step, for schemes that exchange it.

    Gradients are in the order of their variables. `replicated` are variables with the same values
    on all ranks.
    """

    def find(
        self,
        gradients: Sequence[Any],
        descriptions: Sequence[Description],
        replicated: Collection[Any],
    ) -> list[Any]:
        """Returns each gradient's structure on this rank, or why it has none, as JSON values."""

    def describe(
        self, descriptions: Sequence[Description], everybody: Sequence[Sequence[Any]]
    ) -> list[Description]:
        """Returns descriptions with the structure that all ranks found, or the reason for none."""

    def missing(self, scheme: str, description: Description) -> str:
        """Returns the error text if no gradient has the structure that a scheme needs, or `""`."""

    def take(
        self,
        gradients: Sequence[Any],
        structured: Mapping[int, Description],
        replicated: Collection[Any],
    ) -> list[Any]:
        """Returns the gradients to exchange; those in `structured` are objects with `tensors`."""

    def check_presence(
        self, structured: Mapping[int, Description], ranks: tf.Tensor, present: tf.Tensor
    ) -> None:
        """Adds assertions that fail if only some ranks have a gradient that all ranks must have.

        `ranks` has the number of ranks with each gradient, `[variables]`, and `present` is the
        number of ranks with a batch.
        """

    def sizes(
        self,
        gradients: Sequence[Any],
        descriptions: Sequence[Description],
        replicated: Collection[Any],
    ) -> tf.Tensor:
        """Returns the size of each gradient's structure on this rank, or 0; `[variables]`."""

    def artificial(self, description: Description, values: tf.Tensor) -> Any:
        """Returns a gradient like those of `take`, made of a vector of values, for timed trials."""


# ------------------------------------------------------------------ variables


def path_of(variable: Any) -> str:
    """Returns the path of a Keras variable ("layer/kernel"), or the name of a `tf.Variable`."""
    return getattr(variable, "path", None) or variable.name


def of_tensorflow(variable: Any) -> tf.Variable:
    """Returns the TensorFlow variable of a Keras variable, or a TensorFlow variable unchanged."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def indices_of(variables: Sequence[Any]) -> dict[Any, int]:
    """Returns the index of each variable, by the reference of its TensorFlow variable."""
    return {of_tensorflow(variable).ref(): index for index, variable in enumerate(variables)}


def describe(variable: Any) -> Description:
    """Describes the gradient of a Keras or TensorFlow variable, without structure."""
    path = path_of(variable)
    dtype = tf.as_dtype(variable.dtype)
    if not dtype.is_floating:
        raise ValueError(
            f"Trainable variables must be floating-point. Received: variable {path!r} of dtype "
            f"{dtype.name}. Set `trainable=False` on it."
        )
    return Description(
        path,
        tuple(variable.shape),
        # Horovod does not support bfloat16.
        "float32" if dtype == tf.bfloat16 else dtype.name,
        is_value=is_overwritten(variable),
    )


def distinct_paths(descriptions: Sequence[Description]) -> list[str]:
    """Returns the paths, with numbers added to duplicates, such as those of two inner models.

    >>> distinct_paths([Description(path, (), "float32") for path in ("fc/bias", "fc/bias")])
    ['fc/bias', 'fc/bias#1']
    """
    numbers = defaultdict[str, Iterator[int]](itertools.count)
    pairs = [(d.path, next(numbers[d.path])) for d in descriptions]
    return [f"{path}#{number}" if number else path for path, number in pairs]


def is_overwritten(variable: Any) -> bool:
    """Returns whether Keras overwrites a variable with its gradient, as for float8 scales."""
    return getattr(variable, "overwrite_with_gradient", False)


# ------------------------------------------------------------------ sparse and dense


def merge_rows(rows: tf.IndexedSlices) -> tf.IndexedSlices:
    """Sums rows of equal index: Keras's optimizers do not, and would update repeated rows twice."""
    if not native.in_xla():
        indices, segments = tf.unique(rows.indices)
        values = tf.math.unsorted_segment_sum(rows.values, segments, tf.size(indices))
        return tf.IndexedSlices(values, indices, rows.dense_shape)
    # XLA compiles `tf.unique` to a loop over the rows, which took ten times as long as the rest of
    # the step on a GPU, so sort the indices instead. XLA also needs a static length, so rows of
    # zeros pad the result.
    order = tf.argsort(rows.indices)
    indices = tf.gather(rows.indices, order)
    begins = tf.not_equal(indices, tf.concat([indices[:1] - 1, indices[:-1]], 0))
    segments = tf.cumsum(tf.cast(begins, tf.int32)) - 1
    count = tf.size(indices)
    values = tf.math.unsorted_segment_sum(tf.gather(rows.values, order), segments, count)
    # Rows of zeros may have any index. The maximum of an empty segment is the smallest integer.
    indices = tf.maximum(tf.math.unsorted_segment_max(indices, segments, count), 0)
    return tf.IndexedSlices(values, indices, rows.dense_shape)


def with_merged_rows(gradients: Sequence[Any]) -> list[Any]:
    """Merges repeated rows of all `IndexedSlices`, as Keras optimizers require."""
    return [merge_rows(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]


def tensors_of(gradient: Any) -> list[tf.Tensor]:
    """Returns a gradient's tensors: the dense tensor, values of rows, or tensors of a structure."""
    if gradient is None:
        return []
    if isinstance(gradient, tf.IndexedSlices):
        return [gradient.values]
    return list(getattr(gradient, "tensors", [gradient]))


def all_finite(gradients: Sequence[Any]) -> tf.Tensor:
    """Returns whether all floating-point values of gradients are finite, on this rank."""
    tensors = [tensor for gradient in gradients for tensor in tensors_of(gradient)]
    each = [tf.reduce_all(tf.math.is_finite(t)) for t in tensors if t.dtype.is_floating]
    return tf.reduce_all([tf.constant(True), *each])


def as_dense(gradient: Any, description: Description, zero: tf.Variable) -> tf.Tensor:
    """Returns a gradient as one tensor of the variable's shape, in the dtype of the exchange."""
    if gradient is None:
        return wire.zeros(description.shape, zero)
    if isinstance(gradient, tf.IndexedSlices):
        rows, indices = gradient.values, gradient.indices
        gradient = tf.math.unsorted_segment_sum(rows, indices, description.shape[0])
    gradient = tf.cast(gradient, description.dtype)
    if gradient.shape.is_fully_defined():
        return gradient
    # Restore the shape from the variable: TensorFlow loses the gradient's shape if the variable is
    # sliced or tiled to the batch size.
    return tf.ensure_shape(gradient, description.shape)


def as_vector(
    gradients: Sequence[Any], descriptions: Sequence[Description], zeros: wire.Zeros
) -> tf.Tensor:
    """Returns the gradients of a bucket as one vector that TensorFlow cannot fold."""
    pairs = zip(gradients, descriptions, strict=True)
    zero = zeros[descriptions[0].dtype]
    parts = [tf.reshape(as_dense(gradient, d, zero), [-1]) for gradient, d in pairs]
    # Prevent constant folding: gradients of linear losses are constants, on some ranks or on all,
    # and TensorFlow would fold the collective.
    return wire.opaque(parts[0] if len(parts) == 1 else tf.concat(parts, 0), zeros["int32"])


# ------------------------------------------------------------------ accumulation


class Accumulation:
    """Sums weighted gradients, and their weights, over calls on this rank until an update.

    Gradients that overwrite their variable are not summed: the largest values are retained.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        add_sum = functools.partial(optimizer.add_variable_from_reference, name="accumulator")
        self._sums = list(map(add_sum, variables))
        self._overwritten = list(map(is_overwritten, variables))
        self._weight = optimizer.add_variable((), dtype="float32", name="accumulated_weight")
        # Count the calls, because their number in the first update is smaller if the optimizer was
        # wrapped between two updates.
        self._calls = optimizer.add_variable((), dtype="int", name="accumulated_calls")

    def rank_state(self, size: int) -> list[tuple[Any, StateDescription]]:
        """Returns all variables of the accumulation, each with its description."""
        named = {f"accumulated_{i}": variable for i, variable in enumerate(self._sums)}
        partial = [
            (variable, StateDescription(name=name, placement=Placement.PARTIAL, owners=size))
            for name, variable in (named | {"accumulated_weight": self._weight}).items()
        ]
        return [*partial, (self._calls, StateDescription(name="accumulated_calls"))]

    def add(
        self,
        indices: Sequence[int],
        gradients: Sequence[Any],
        update: Callable[[list[Any], Any, Any], None],
        wait: Callable[[], None],
        *,
        weight: Any,
        is_due: tf.Tensor,
        scale: Any = 1.0,
        counter: Any = None,
    ) -> None:
        """Adds gradients; if an update is due, runs `update` with averages, weight and call count.

        Otherwise runs `wait`. `weight` is this rank's scalar weight, or `None` if all ranks have
        equal weights. `scale` is the loss scale of the gradients. `counter` is a variable that
        changes unless the call is skipped; `None` if no call is skipped.
        """
        own = tf.cast(1.0 if weight is None else weight, tf.float32)
        pairs = zip(indices, gradients, strict=True)
        # The loss scale may change between calls, so unscale the gradients of each call.
        values = [self._plus(index, gradient, own / scale) for index, gradient in pairs]
        total, calls = self._weight + own, self._calls + 1

        def step() -> None:
            pairs = zip(indices, values, strict=True)
            means = [self._mean(index, value, total / scale) for index, value in pairs]
            update(means, None if weight is None else total, calls)

        before = None if counter is None else tf.identity(counter)
        # The condition must be the same on all ranks, because the branches contain collectives.
        tf.cond(is_due, step, wait)

        # Assign last and use tensors until then, because a bucket must not wait for another
        # bucket's accumulator.
        def keep() -> None:
            kept = zip([self._sums[index] for index in indices], values, strict=True)
            for variable, value in (*kept, (self._weight, total), (self._calls, calls)):
                # As in Keras, a variable without a gradient in the call that makes the update is
                # not updated, and its sum is lost.
                left = tf.convert_to_tensor(variable if value is None else value)
                variable.assign(tf.where(is_due, tf.zeros_like(left), left))

        if before is None:
            keep()
        else:
            tf.cond(tf.not_equal(tf.identity(counter), before), keep, lambda: None)

    def reset(self) -> None:
        for variable in (self._weight, self._calls, *self._sums):
            variable.assign(tf.zeros_like(variable))

    def _plus(self, index: int, gradient: Any, weight: tf.Tensor) -> tf.Tensor | None:
        if gradient is None:
            return None
        before = tf.convert_to_tensor(self._sums[index])
        dense = tf.cast(tf.convert_to_tensor(gradient), before.dtype)
        if self._overwritten[index]:
            return tf.maximum(before, dense)
        # Ignore gradients of empty batches: their mean is NaN.
        own = tf.where(weight > 0.0, dense * tf.cast(weight, dense.dtype), tf.zeros_like(dense))
        return before + own

    def _mean(self, index: int, value: tf.Tensor | None, total: tf.Tensor) -> tf.Tensor | None:
        if value is None or self._overwritten[index]:
            return value
        return tf.math.divide_no_nan(value, tf.cast(total, value.dtype))

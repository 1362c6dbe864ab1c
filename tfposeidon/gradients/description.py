"""Descriptions of gradients for the exchange, and gradients as plain tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfposeidon import native
from tfposeidon.communication import wire
from tfposeidon.gradients.factors import FactorShape


@dataclass(frozen=True)
class Description:
    """Description of one variable's gradient: the same on every rank, known before any step runs.

    Attributes:
      path: Path of the variable.
      shape: Shape of the variable.
      dtype: Dtype of the gradient when it is exchanged.
      factors: Shape of its factors if it is a product of two thin matrices, from the first traced
        step on.
      why_no_factors: Reason why it has no factors, from the first traced step on; empty before.
      is_value: True if the gradient is a value that takes the variable's place, as Keras's
        `overwrite_with_gradient` says.

    >>> Description("dense/kernel", (20, 3), "float32").bytes
    240
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    factors: FactorShape | None = None
    why_no_factors: str = ""
    is_value: bool = False

    @property
    def length(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return tf.as_dtype(self.dtype).size

    @property
    def bytes(self) -> int:
        """Bytes of the whole gradient, as a dense tensor."""
        return self.length * self.itemsize


def path_of(variable: Any) -> str:
    """Returns the path of Keras's variables, such as "layer/kernel", and the name of TensorFlow's.

    Args:
      variable: Keras or TensorFlow variable.
    """
    return getattr(variable, "path", None) or variable.name


def of_tensorflow(variable: Any) -> tf.Variable:
    """Returns the TensorFlow variable inside a Keras variable, or the variable itself.

    Keras's optimizers treat both as the same variable.

    Args:
      variable: Keras or TensorFlow variable.
    """
    return variable.value if isinstance(variable, keras.Variable) else variable


def describe(variable: Any) -> Description:
    """Describes the gradient of a Keras or TensorFlow variable.

    Gradients of bfloat16 variables are exchanged in float32: Horovod knows no bfloat16.

    Args:
      variable: Keras or TensorFlow variable.

    Returns:
      Path and shape of the variable, and the dtype in which its gradient is exchanged; no factors.

    Raises:
      ValueError: If the variable is not floating point.
    """
    path = path_of(variable)
    dtype = tf.as_dtype(variable.dtype)
    if not dtype.is_floating:
        raise ValueError(
            "Only floating-point variables can be trained. "
            f"Received: variable {path!r} of dtype {dtype.name}. Set `trainable=False` on it."
        )
    return Description(
        path,
        tuple(variable.shape),
        "float32" if dtype == tf.bfloat16 else dtype.name,
        is_value=is_overwritten(variable),
    )


def is_overwritten(variable: Any) -> bool:
    """Returns whether Keras overwrites a variable with its gradient, as scales for float8.

    Args:
      variable: Keras or TensorFlow variable.
    """
    return getattr(variable, "overwrite_with_gradient", False)


def merge_rows(rows: tf.IndexedSlices) -> tf.IndexedSlices:
    """Sums rows of equal index.

    Keras's optimizers do not, and would move a row twice whose token repeats.

    Args:
      rows: Indices `[k]` and values `[k, ...]`.

    Returns:
      Each index once, in the order of its first occurrence; under XLA sorted, and padded with rows
      of zeros to the number of rows that were given.

    >>> rows = tf.IndexedSlices(tf.ones([3, 1]), tf.constant([7, 2, 7]))
    >>> merged = merge_rows(rows)
    >>> merged.indices.numpy().tolist(), merged.values.numpy().tolist()
    ([7, 2], [[2.0], [1.0]])
    """
    if native.in_xla():
        return _merge_rows_in_xla(rows)
    indices, segments = tf.unique(rows.indices)
    values = tf.math.unsorted_segment_sum(rows.values, segments, tf.size(indices))
    return tf.IndexedSlices(values, indices, rows.dense_shape)


def _merge_rows_in_xla(rows: tf.IndexedSlices) -> tf.IndexedSlices:
    # XLA makes of `tf.unique` a loop over the rows, which took ten times as long as the step around
    # it on a GPU, and gives tensors a length that it knows.
    order = tf.argsort(rows.indices)
    indices = tf.gather(rows.indices, order)
    begins = tf.not_equal(indices, tf.concat([indices[:1] - 1, indices[:-1]], 0))
    segments = tf.cumsum(tf.cast(begins, tf.int32)) - 1
    count = tf.size(indices)
    values = tf.math.unsorted_segment_sum(tf.gather(rows.values, order), segments, count)
    # Rows of zeros may have any index: the maximum over nothing is the smallest integer.
    indices = tf.maximum(tf.math.unsorted_segment_max(indices, segments, count), 0)
    return tf.IndexedSlices(values, indices, rows.dense_shape)


def with_merged_rows(gradients: Sequence[Any]) -> list[Any]:
    """Returns gradients for one of Keras's optimizers: those that are rows by `merge_rows`.

    Args:
      gradients: Tensors, `IndexedSlices` or `None`.
    """
    return [merge_rows(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]


def dense(gradient: Any, description: Description, zero: tf.Variable) -> tf.Tensor:
    """Returns a gradient as one tensor of the variable's shape, in the dtype of the exchange.

    Args:
      gradient: A tensor, `IndexedSlices` (rows of equal index are summed) or `None` (zeros).
      description: Description of the variable.
      zero: Scalar variable that holds 0 in the gradient's dtype; see `wire.zeros`.
    """
    if gradient is None:
        return wire.zeros(description.shape, zero)
    if isinstance(gradient, tf.IndexedSlices):
        gradient = tf.math.unsorted_segment_sum(
            gradient.values, gradient.indices, description.shape[0]
        )
    gradient = tf.cast(gradient, description.dtype)
    if gradient.shape.is_fully_defined():
        return gradient
    # TensorFlow knows no shape of what comes from a variable that is cut or tiled to the batch. The
    # variable has it.
    return tf.ensure_shape(gradient, description.shape)

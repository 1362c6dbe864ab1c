"""What the exchange has to know of a gradient, and how gradients become plain tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfposeidon.communication import wire
from tfposeidon.gradients.factors import FactorShape


@dataclass(frozen=True)
class Description:
    """One variable's gradient: the same on every rank, known before any step runs.

    Attributes:
      path: Of the variable.
      shape: Of it.
      dtype: Of the gradient when it is exchanged.
      factors: Set from the first traced step on, where the gradient is a product of two thin matrices.
      why_no_factors: Set with it where it is none.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    factors: FactorShape | None = None
    why_no_factors: str = ""

    @property
    def length(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return tf.as_dtype(self.dtype).size

    @property
    def bytes(self) -> int:
        return self.length * self.itemsize


def path_of(variable: Any) -> str:
    """As "layer/kernel" for Keras's variables, the name for TensorFlow's."""
    return getattr(variable, "path", None) or variable.name


def of_tensorflow(variable: Any) -> tf.Variable:
    """TensorFlow's variable in one of Keras, or itself: Keras's optimizers take both for the same."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def describe(variable: Any) -> Description:
    """Describes the gradient of a Keras or TensorFlow variable.

    Gradients of bfloat16 variables are exchanged in float32: Horovod knows no bfloat16.

    Raises:
      ValueError: If the variable is not floating point.
    """
    path = path_of(variable)
    dtype = tf.as_dtype(variable.dtype)
    if not dtype.is_floating:
        raise ValueError(
            f"Only floating-point variables can be trained with DistributedOptimizer. Received: variable "
            f"{path!r} of dtype {dtype.name}. Set `trainable=False` on it."
        )
    return Description(
        path, tuple(variable.shape), "float32" if dtype == tf.bfloat16 else dtype.name
    )


def merge_rows(rows: tf.IndexedSlices) -> tf.IndexedSlices:
    """Sums the rows of equal index: Keras's optimizers do not, and move twice where a token repeats."""
    indices, slots = tf.unique(rows.indices)
    values = tf.math.unsorted_segment_sum(rows.values, slots, tf.size(indices))
    return tf.IndexedSlices(values, indices, rows.dense_shape)


def dense(gradient: Any, description: Description, zero: tf.Variable) -> tf.Tensor:
    """The gradient as one tensor of the variable's shape and dtype.

    Args:
      gradient: A tensor, `IndexedSlices` (rows of equal index are summed) or `None` (zeros).
      zero: Scalar variable that holds 0 in the variable's dtype; see `wire.zeros`.
    """
    if gradient is None:
        return wire.zeros(description.shape, zero)
    if isinstance(gradient, tf.IndexedSlices):
        gradient = tf.math.unsorted_segment_sum(
            gradient.values, gradient.indices, description.shape[0]
        )
    gradient = tf.cast(gradient, description.dtype)
    # TensorFlow knows no shape of what comes from a variable that is cut or tiled to the batch. The variable has it.
    return (
        gradient
        if gradient.shape.is_fully_defined()
        else tf.ensure_shape(gradient, description.shape)
    )

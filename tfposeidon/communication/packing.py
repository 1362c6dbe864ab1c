"""Conversion of tensors for collectives: unsupported dtypes, and small values in one vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

_SAME_BITS = {
    "bfloat16": tf.uint16,
    "uint32": tf.int32,
    "uint64": tf.int64,
    "complex64": tf.int64,
    # With an additional axis of two.
    "complex128": tf.int64,
}


def as_carried(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor in a dtype that Horovod supports."""
    name = tensor.dtype.name
    if name in _SAME_BITS:
        return tf.bitcast(tensor, _SAME_BITS[name])
    # TensorFlow cannot bitcast float8, but float32 represents each of its values exactly.
    return tf.cast(tensor, tf.float32) if name.startswith("float8") else tensor


def from_carried(carried: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Inverts `as_carried` for a tensor of the given dtype."""
    if dtype.name in _SAME_BITS:
        return tf.bitcast(carried, dtype)
    return tf.cast(carried, dtype)


def summed_dtype(values: Sequence[Any]) -> tf.DType:
    """Returns float64 if any value has it, or else float32: means lose no bits of their values."""
    wide = [value for value in values if tf.as_dtype(value.dtype) == tf.float64]
    return tf.float64 if wide else tf.float32


def joined(values: Sequence[Any], dtype: tf.DType = tf.float32) -> tf.Tensor:
    """Returns floating-point values, concatenated to a vector."""
    flat = [tf.reshape(tf.cast(tf.convert_to_tensor(v), dtype), [-1]) for v in values]
    return tf.concat(flat, 0) if flat else tf.zeros([0], dtype)


def parted(vector: tf.Tensor, like: Sequence[Any]) -> list[tf.Tensor]:
    """Returns the parts of a vector from `joined`, in the shapes and dtypes of `like`."""
    if not like:
        return []
    shapes = [tf.TensorShape(value.shape) for value in like]
    parts = tf.split(vector, [shape.num_elements() for shape in shapes])
    return [
        tf.cast(tf.reshape(part, shape), keras.backend.standardize_dtype(value.dtype))
        for part, shape, value in zip(parts, shapes, like, strict=True)
    ]

"""Conversion of dtypes that Horovod does not support to others that it does, without loss."""

from __future__ import annotations

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

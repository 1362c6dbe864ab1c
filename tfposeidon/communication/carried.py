"""Values of dtypes that Horovod does not carry, in others that it does, to the bit."""

from __future__ import annotations

import tensorflow as tf

_SAME_BITS = {
    "bfloat16": tf.uint16,
    "uint32": tf.int32,
    "uint64": tf.int64,
    "complex64": tf.int64,
    # With an axis of two more.
    "complex128": tf.int64,
}


def as_carried(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor in a dtype that Horovod carries."""
    name = tensor.dtype.name
    if name in _SAME_BITS:
        return tf.bitcast(tensor, _SAME_BITS[name])
    # TensorFlow does not show the bits of these, of which float32 holds each value.
    return tf.cast(tensor, tf.float32) if name.startswith("float8") else tensor


def from_carried(carried: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the tensor of which `as_carried` has made this one."""
    if dtype.name in _SAME_BITS:
        return tf.bitcast(carried, dtype)
    return tf.cast(carried, dtype)

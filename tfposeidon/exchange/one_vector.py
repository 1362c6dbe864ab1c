"""Packs small values into one float32 vector, so that one collective sends them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


def joined(values: Sequence[Any]) -> tf.Tensor:
    """Returns floating-point values, concatenated to a float32 vector."""
    flat = [tf.reshape(tf.cast(tf.convert_to_tensor(v), tf.float32), [-1]) for v in values]
    return tf.concat(flat, 0) if flat else tf.zeros([0])


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

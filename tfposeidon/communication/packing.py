"""Preparation of tensors for collectives: supported dtypes, and even parts, one per rank."""

from __future__ import annotations

import itertools
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


def even_parts(length: int, parts: int) -> list[tuple[int, int]]:
    """Returns start and end of each part; lengths differ by one at most, larger parts first.

    >>> even_parts(5, 3)
    [(0, 2), (2, 4), (4, 5)]
    """
    quotient, remainder = divmod(length, parts)
    begins = [quotient * part + min(part, remainder) for part in range(parts + 1)]
    return list(itertools.pairwise(begins))


def balanced_parts(sizes: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """Returns start and end of each part so that the largest sum of a part is minimal.

    >>> balanced_parts([5, 1, 1, 1, 4], 3)
    [(0, 1), (1, 4), (4, 5)]
    """
    # Binary search for the smallest limit with which greedy filling needs no more than `parts`
    # parts.
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:
        limit = (low + high) // 2
        if len(_filled(sizes, limit)) <= parts:
            high = limit
        else:
            low = limit + 1
    ends = _filled(sizes, low)
    ends += [len(sizes)] * (parts - len(ends))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _filled(sizes: Sequence[int], limit: int) -> list[int]:
    """Returns the ends of parts that are filled greedily up to a limit on their sum."""
    ends, total = [], 0
    for index, size in enumerate(sizes):
        if total + size > limit and total:
            ends.append(index)
            total = 0
        total += size
    return [*ends, len(sizes)]

"""Converts values to messages and back, optionally in 16 bits, with or without their indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfposeidon import ops

WIRE_DTYPES = ("float16", "bfloat16")
"""Dtypes to which values may be rounded for sending."""


def check_wire_dtype(
    wire_dtype: str | None, allowed: tuple[str, ...] = WIRE_DTYPES, remedy: str = ""
) -> None:
    """Raises `ValueError`, which ends with `remedy`, if values cannot be sent in a dtype."""
    if wire_dtype is not None and wire_dtype not in allowed:
        names = ", ".join(f'"{name}"' for name in allowed)
        raise ValueError(
            f"`wire_dtype` must be None or one of {names}. Received: wire_dtype={wire_dtype!r}. "
            f"{remedy or 'Leave it out to send values unrounded.'}"
        )


def wire_itemsize(wire_dtype: str | None, itemsize: int) -> int:
    """Returns the size in bytes of one element as it is sent."""
    return itemsize if wire_dtype is None else 2


def encode(tensor: tf.Tensor, wire_dtype: str | None) -> tf.Tensor:
    """Rounds values to the wire dtype; bfloat16 is returned as uint16, which Horovod supports."""
    if wire_dtype is None:
        return tensor
    # Use a native op, because the CPU's cast instruction may flush denormals to zero, and ranks
    # would differ.
    encoded = ops.encode(tf.cast(tensor, tf.float32), wire_dtype)
    return tf.bitcast(encoded, tf.uint16) if wire_dtype == "bfloat16" else encoded


def decode(tensor: tf.Tensor, wire_dtype: str | None, dtype: tf.DType) -> tf.Tensor:
    """Inverts `encode`, up to its rounding; `dtype` is ignored without a `wire_dtype`."""
    if wire_dtype is None:
        return tensor
    return tf.cast(tf.bitcast(tensor, tf.as_dtype(wire_dtype)), dtype)


def decode_sum(rows: tf.Tensor, count: int, wire_dtype: str | None, dtype: tf.DType) -> tf.Tensor:
    """Sums `count` concatenated vectors from `encode`; sums of 16-bit values are in float32."""
    if wire_dtype is None:
        # Avoid `tf.reduce_sum` over the first axis, which takes four times as long for two or three
        # vectors.
        return tf.add_n(tf.split(rows, count))
    return tf.cast(ops.sum_rows(tf.bitcast(rows, tf.as_dtype(wire_dtype)), count), dtype)


def pair_bytes(wire_dtype: str | None) -> int:
    """Returns the size in bytes of one pair of index and value, as it is sent."""
    return 8 if wire_dtype is None else 6


def pack_pairs(values: tf.Tensor, indices: tf.Tensor, wire_dtype: str | None) -> tf.Tensor:
    """Joins float32 `values` and int32 `indices`, `[k]` each, in one vector, indices first."""
    # Messages are integers that contain the bits of values: floats would round indices above 2^24.
    if wire_dtype is None:
        return tf.concat([indices, tf.bitcast(values, tf.int32)], 0)
    # A message has one dtype, so float16 and int32 are bitcast to uint16.
    encoded = tf.bitcast(encode(values, wire_dtype), tf.uint16)
    return tf.concat([tf.reshape(tf.bitcast(indices, tf.uint16), [-1]), encoded], 0)


def unpack_pairs(
    packed: tf.Tensor, groups: Sequence[tuple[int, Any, int]], wire_dtype: str | None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Inverts `pack_pairs` for runs of messages; also returns each message's number of pairs.

    Each of `groups` describes a run of messages of one length: the number of messages, the number
    of pairs in each, and an offset to add to the indices. The returned counts are int64.
    """
    width = pair_bytes(wire_dtype) // packed.dtype.size
    sizes = [count * width * k for count, k, _ in groups]
    runs = tf.split(packed, sizes) if len(groups) > 1 else [packed]
    values, indices, counts = [], [], []
    for run, (count, k, begin) in zip(runs, groups, strict=True):
        messages = tf.reshape(run, [count, width * k])
        # Each value occupies one element of a message; indices occupy the others.
        split = (width - 1) * k
        index, value = messages[:, :split], messages[:, split:]
        if wire_dtype is None:
            value = tf.bitcast(value, tf.float32)
        else:
            index = tf.bitcast(tf.reshape(index, [-1, 2]), tf.int32)
            value = decode(value, wire_dtype, tf.float32)
        index = tf.reshape(index, [-1])
        indices.append(index + begin if begin else index)
        values.append(tf.reshape(value, [-1]))
        counts.append(tf.fill([count], tf.cast(k, tf.int64)))
    return tf.concat(values, 0), tf.concat(indices, 0), tf.concat(counts, 0)

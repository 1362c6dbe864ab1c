"""Message format of sparse vectors: indices and values in one message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfposeidon.schemes.wire_format import decode, encode


def pair_bytes(wire_dtype: str | None) -> int:
    """Returns the size in bytes of one index and one value."""
    return 8 if wire_dtype is None else 6


def pack(values: tf.Tensor, indices: tf.Tensor, wire_dtype: str | None) -> tf.Tensor:
    """Joins float32 `values` and int32 `indices`, `[k]` each, in one vector, indices first."""
    # Messages are integers that contain the bits of values: floats would round indices above 2^24.
    if wire_dtype is None:
        return tf.concat([indices, tf.bitcast(values, tf.int32)], 0)
    # A message has one dtype, so float16 and int32 are bitcast to uint16.
    encoded = encode(values, wire_dtype)
    whole = encoded if encoded.dtype == tf.uint16 else tf.bitcast(encoded, tf.uint16)
    return tf.concat([tf.reshape(tf.bitcast(indices, tf.uint16), [-1]), whole], 0)


def unpack(
    packed: tf.Tensor, groups: Sequence[tuple[int, Any]], wire_dtype: str | None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Inverts `pack` for runs of messages; also returns the pairs of each message, int64."""
    # Each group is a run of messages of one length: the number of messages, and of pairs in each.
    width = pair_bytes(wire_dtype) // packed.dtype.size
    sizes = [count * width * k for count, k in groups]
    runs = tf.split(packed, sizes) if len(groups) > 1 else [packed]
    values, indices, counts = [], [], []
    for run, (count, k) in zip(runs, groups, strict=True):
        messages = tf.reshape(run, [count, width * k])
        # Each value occupies one element of a message; indices occupy the others.
        split = (width - 1) * k
        indices.append(_indices(messages[:, :split]))
        values.append(tf.reshape(_values(messages[:, split:], wire_dtype), [-1]))
        counts.append(tf.fill([count], tf.cast(k, tf.int64)))
    return tf.concat(values, 0), tf.concat(indices, 0), tf.concat(counts, 0)


def _indices(messages: tf.Tensor) -> tf.Tensor:
    if messages.dtype == tf.int32:
        return tf.reshape(messages, [-1])
    return tf.bitcast(tf.reshape(messages, [-1, 2]), tf.int32)


def _values(messages: tf.Tensor, wire_dtype: str | None) -> tf.Tensor:
    if wire_dtype is None:
        return tf.bitcast(messages, tf.float32)
    halves = tf.bitcast(messages, tf.float16) if wire_dtype == "float16" else messages
    return decode(halves, wire_dtype, tf.float32)

"""How floating-point values look on the wire: as they are, or in 16 bits."""

from __future__ import annotations

import tensorflow as tf

from tfposeidon import ops

WIRE_DTYPES = ("float16", "bfloat16")


def check_wire_dtype(
    wire_dtype: str | None, allowed: tuple[str, ...] = WIRE_DTYPES, remedy: str = ""
) -> None:
    """Refuses a wire type that makes no sense.

    Raises:
      ValueError: If `wire_dtype` is neither `None` nor one of `allowed`.
    """
    if wire_dtype is not None and wire_dtype not in allowed:
        names = ", ".join(f'"{name}"' for name in allowed)
        raise ValueError(
            f"`wire_dtype` must be None or one of {names}. Received: wire_dtype={wire_dtype!r}. {remedy}"
        )


def wire_itemsize(wire_dtype: str | None, itemsize: int) -> int:
    """Bytes per element on the wire."""
    return itemsize if wire_dtype is None else 2


def encode(tensor: tf.Tensor, wire_dtype: str | None) -> tf.Tensor:
    """Rounds to the wire's type; bfloat16 travels as uint16, because Horovod does not know it."""
    if wire_dtype is None:
        return tensor
    encoded = ops.encode(tf.cast(tensor, tf.float32), wire_dtype)
    return tf.bitcast(encoded, tf.uint16) if wire_dtype == "bfloat16" else encoded


def decode(tensor: tf.Tensor, wire_dtype: str | None, dtype: tf.DType) -> tf.Tensor:
    """The inverse of `encode`, up to its rounding."""
    if wire_dtype is None:
        return tensor
    return tf.cast(_sixteen_bits(tensor, wire_dtype), dtype)


def decode_sum(rows: tf.Tensor, count: int, wire_dtype: str | None, dtype: tf.DType) -> tf.Tensor:
    """Sums `count` encoded vectors that follow one another, those of 16 bits in float32.

    Args:
      rows: `[count * n]`.

    Returns:
      `[n]` in `dtype`.
    """
    if wire_dtype is None:
        return tf.reduce_sum(tf.reshape(rows, [count, -1]), axis=0)
    return tf.cast(ops.sum_rows(_sixteen_bits(rows, wire_dtype), count), dtype)


def _sixteen_bits(tensor: tf.Tensor, wire_dtype: str) -> tf.Tensor:
    return tf.bitcast(tensor, tf.bfloat16) if wire_dtype == "bfloat16" else tensor

"""How floating-point values look on the wire: as they are, or in 16 bits."""

from __future__ import annotations

import tensorflow as tf

WIRE_DTYPES = ("float16", "bfloat16")


def check_wire_dtype(wire_dtype: str | None, allowed: tuple[str, ...] = WIRE_DTYPES, remedy: str = "") -> None:
    """Refuses a wire type that makes no sense.

    Raises:
      ValueError: If `wire_dtype` is neither `None` nor one of `allowed`.
    """
    if wire_dtype is not None and wire_dtype not in allowed:
        names = ", ".join(f'"{name}"' for name in allowed)
        raise ValueError(f"`wire_dtype` must be None or one of {names}. Received: wire_dtype={wire_dtype!r}. {remedy}")


def wire_itemsize(wire_dtype: str | None, itemsize: int) -> int:
    """Bytes per element on the wire."""
    return itemsize if wire_dtype is None else 2


def encode(tensor: tf.Tensor, wire_dtype: str | None) -> tf.Tensor:
    """Casts to the wire's type; bfloat16 travels as uint16, because Horovod does not know it."""
    if wire_dtype is None:
        return tensor
    if wire_dtype == "bfloat16":
        return tf.bitcast(tf.cast(tensor, tf.bfloat16), tf.uint16)
    return tf.cast(tensor, tf.float16)


def decode(tensor: tf.Tensor, wire_dtype: str | None, dtype: tf.DType) -> tf.Tensor:
    """The inverse of `encode`, up to its rounding."""
    if wire_dtype is None:
        return tensor
    if wire_dtype == "bfloat16":
        return tf.cast(tf.bitcast(tensor, tf.bfloat16), dtype)
    return tf.cast(tensor, dtype)

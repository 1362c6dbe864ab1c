"""Format of floating-point values on the wire: as they are, or in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from tfposeidon import ops

WIRE_DTYPES = ("float16", "bfloat16")
"""Types in which values may cross the wire in place of their own."""


@dataclass(frozen=True, kw_only=True)
class WithWireDtype:
    """Mix-in for schemes whose only loss is the rounding of values that cross the wire.

    It comes before the scheme's other base class, whose `exact` it overrides.

    Args:
      wire_dtype: Dtype on the wire: `None` for the gradient's own (default), or one of
        `allowed_wire_dtypes`.

    Raises:
      ValueError: If `wire_dtype` is anything else.
    """

    allowed_wire_dtypes: ClassVar[tuple[str, ...]] = WIRE_DTYPES
    """Values of `wire_dtype` besides `None`."""

    wire_dtype_remedy: ClassVar[str] = ""
    """Sentence that ends the message about another `wire_dtype`."""

    wire_dtype: str | None = None

    def __post_init__(self) -> None:
        check_wire_dtype(self.wire_dtype, self.allowed_wire_dtypes, self.wire_dtype_remedy)

    @property
    def exact(self) -> bool:
        """True if values cross the wire in the gradient's own dtype."""
        return self.wire_dtype is None


def check_wire_dtype(
    wire_dtype: str | None, allowed: tuple[str, ...] = WIRE_DTYPES, remedy: str = ""
) -> None:
    """Refuses a type that values cannot have on the wire.

    Args:
      wire_dtype: Type that the user gave.
      allowed: Types that are allowed besides `None`.
      remedy: Sentence that ends the message.

    Raises:
      ValueError: If `wire_dtype` is neither `None` nor one of `allowed`.
    """
    if wire_dtype is not None and wire_dtype not in allowed:
        names = ", ".join(f'"{name}"' for name in allowed)
        raise ValueError(
            f"`wire_dtype` must be None or one of {names}. Received: wire_dtype={wire_dtype!r}. "
            f"{remedy}"
        )


def wire_itemsize(wire_dtype: str | None, itemsize: int) -> int:
    """Returns the bytes of one element on the wire.

    Args:
      wire_dtype: Type on the wire; `None` for the values' own.
      itemsize: Bytes of one element in the values' own type.
    """
    return itemsize if wire_dtype is None else 2


def encode(tensor: tf.Tensor, wire_dtype: str | None) -> tf.Tensor:
    """Rounds values to the wire's type.

    Args:
      tensor: Values, floating point of any shape.
      wire_dtype: Type on the wire; `None` leaves values as they are.

    Returns:
      The same shape in `wire_dtype`; bfloat16 as uint16, because Horovod does not know bfloat16.
    """
    if wire_dtype is None:
        return tensor
    # An op of ours, as a cast by the CPU's own instruction may make denormals zero: ranks would
    # differ.
    encoded = ops.encode(tf.cast(tensor, tf.float32), wire_dtype)
    return tf.bitcast(encoded, tf.uint16) if wire_dtype == "bfloat16" else encoded


def decode(tensor: tf.Tensor, wire_dtype: str | None, dtype: tf.DType) -> tf.Tensor:
    """Inverts `encode`, up to its rounding.

    Args:
      tensor: Result of `encode`.
      wire_dtype: Type on the wire; `None` returns the tensor as it is.
      dtype: Type of the result, where `wire_dtype` is not `None`.

    Returns:
      The values in `dtype` and the shape of `tensor`.
    """
    if wire_dtype is None:
        return tensor
    return tf.cast(_sixteen_bits(tensor, wire_dtype), dtype)


def decode_sum(rows: tf.Tensor, count: int, wire_dtype: str | None, dtype: tf.DType) -> tf.Tensor:
    """Sums encoded vectors that follow one another, those of 16 bits in float32.

    Args:
      rows: Vectors one after the other, `[count * n]`, in the type that `encode` returns.
      count: Number of vectors.
      wire_dtype: Type on the wire; `None` for the values' own.
      dtype: Type of the result, where `wire_dtype` is not `None`.

    Returns:
      `[n]` in `dtype`.
    """
    if wire_dtype is None:
        # `tf.reduce_sum` over the first axis takes four times as long for two vectors, or three.
        return tf.add_n(tf.split(rows, count))
    return tf.cast(ops.sum_rows(_sixteen_bits(rows, wire_dtype), count), dtype)


def _sixteen_bits(tensor: tf.Tensor, wire_dtype: str) -> tf.Tensor:
    return tf.bitcast(tensor, tf.bfloat16) if wire_dtype == "bfloat16" else tensor

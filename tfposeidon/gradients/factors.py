"""Sufficient factors of a gradient: two thin matrices whose product it is (Poseidon, section 2.1)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

WEIGHT_COLUMNS = 2
"""Beside factors of 16 bits travels their rank's weight, as a high and a low part: rounding it would bias the mean."""


@dataclass(frozen=True)
class FactorShape:
    """What the exchange has to know of factors before any step runs; the same on every rank.

    Attributes:
      rows: K of one rank and exchange, on average: the samples of a batch, times the positions at which the kernel is
        used, times the steps whose gradients are accumulated; `None` before the first step.
      left: M.
      right: N.
      dtype: Of the values that are sent.
      has_local: Whether every rank adds a term of its own afterwards.
      indexed: Whether the left rows are one-hot, and travel as their indices.
    """

    rows: float | None
    left: int
    right: int
    dtype: str
    has_local: bool = False
    indexed: bool = False

    @property
    def itemsize(self) -> int:
        return tf.as_dtype(self.dtype).size

    @property
    def left_columns(self) -> int:
        """Values in which a left row travels: M, or as many as hold an index of 32 bits."""
        return max(1, 4 // self.itemsize) if self.indexed else self.left

    @property
    def bytes(self) -> float:
        """What one rank has to send to each other; 0 before the first step."""
        columns = self.left_columns + self.right + (WEIGHT_COLUMNS if self.itemsize == 2 else 0)
        return (self.rows or 0) * columns * self.itemsize

    @property
    def matrix_bytes(self) -> int:
        """Of the product, which has 32 bits unless they have 64."""
        return self.left * self.right * max(4, self.itemsize)


@dataclass(frozen=True)
class Factors:
    """One variable's gradient, `reshape(left^T right) + local`.

    Attributes:
      left: `[K, M]` floating point; K may be known only when the step runs.
      right: `[K, N]` in the same dtype.
      local: What the loss adds that follows from variables alone (a regulariser's part), so that it is the same on
        all ranks; in the variable's shape and dtype, or `None`.
      constants: A digest of the numbers in `local` that are in the graph, which ranks have to compare.
      weight: Of factors in 16 bits, where it is not 1: float32, a scalar or `[K]`.
    """

    left: tf.Tensor
    right: tf.Tensor
    local: tf.Tensor | None = None
    constants: str = ""
    weight: tf.Tensor | None = None

    @property
    def widths(self) -> tuple[int, int]:
        """M and N."""
        return self.left.shape[1], self.right.shape[1]

    @property
    def shape(self) -> FactorShape:
        """Without rows, which are not always known."""
        return FactorShape(
            None, *self.widths, dtype=self.left.dtype.name, has_local=self.local is not None
        )

    @property
    def enough_rows(self) -> int:
        """Rows with which any matrix of this size can be sent: times the unit matrix, on its smaller side."""
        return min(self.widths)

    @property
    def own_product(self) -> tf.Tensor:
        """`[M * N]` without the local term, float32 unless they are float64: of this rank's rows alone."""
        right = self.right
        if right.dtype.size == 2:
            right = tf.cast(right, tf.float32)
            right = right if self.weight is None else right * _column(self.weight)
        return tf.reshape(self._multiplied_here(self.left, right), [-1])

    @property
    def packed(self) -> tf.Tensor:
        """All that is sent, `[K, M + N]` or two columns more: one message; bfloat16 as uint16, unknown to Horovod."""
        both = [self.left, self.right]
        if self.left.dtype.size == 2:
            both += self._weight_columns()
        rows = tf.concat(both, 1)
        return tf.bitcast(rows, tf.uint16) if rows.dtype == tf.bfloat16 else rows

    def _weight_columns(self) -> list[tf.Tensor]:
        weight = tf.constant(1.0) if self.weight is None else self.weight
        high = tf.cast(weight, self.left.dtype)
        low = tf.cast(weight - tf.cast(high, tf.float32), self.left.dtype)
        return [tf.broadcast_to(_column(part), [tf.shape(self.left)[0], 1]) for part in (high, low)]

    def product(self, packed: tf.Tensor) -> tf.Tensor:
        """`[M * N]`, float32 unless they are float64: of rows of any number of ranks, packed as this one's."""
        dtype = self.right.dtype
        rows = tf.bitcast(packed, tf.bfloat16) if dtype == tf.bfloat16 else packed
        columns = [self.shape.left_columns, self.right.shape[1]]
        if dtype.size == 2:
            left, right, weight = tf.split(rows, [*columns, WEIGHT_COLUMNS], axis=1)
            right = tf.cast(right, tf.float32) * tf.reduce_sum(
                tf.cast(weight, tf.float32), axis=1, keepdims=True
            )
        else:
            left, right = tf.split(rows, columns, axis=1)
        return tf.reshape(self._multiplied(left, right), [-1])

    def _multiplied(self, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
        return self._multiplied_here(left, right)

    def _multiplied_here(self, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
        return tf.linalg.matmul(tf.cast(left, right.dtype), right, transpose_a=True)

    def weighted(self, weight: tf.Tensor) -> Factors:
        """With the product, or each of its K terms, times `weight`; the local term is all ranks' alike, and stays."""
        # No samples, no say: what comes from an empty batch need not be a number.
        left, right = (_unless_empty(tensor, weight) for tensor in (self.left, self.right))
        if right.dtype.size == 2:
            return replace(
                self,
                left=left,
                right=right,
                weight=weight if self.weight is None else self.weight * weight,
            )
        return replace(self, left=left, right=right * _column(tf.cast(weight, right.dtype)))


def _unless_empty(tensor: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Zeros where `weight` is 0; indices stay, as their values are zeros then."""
    if not tensor.dtype.is_floating:
        return tensor
    return tf.math.multiply_no_nan(tensor, _column(tf.cast(tf.sign(weight), tensor.dtype)))


def _column(weight: tf.Tensor) -> tf.Tensor:
    return weight[:, tf.newaxis] if weight.shape.rank else weight


class NoFactorsError(Exception):
    """Why a gradient has none, in a few words."""


def as_factors(gradient: Any, like: FactorShape) -> Factors:
    """Any gradient as a product with the unit matrix: for a rank whose peers expect factors and which has none."""
    matrix = tf.reshape(
        tf.cast(tf.convert_to_tensor(gradient), like.dtype), [like.left, like.right]
    )
    unit = tf.eye(min(like.left, like.right), dtype=like.dtype)
    return Factors(unit, matrix) if like.left <= like.right else Factors(tf.transpose(matrix), unit)

"""Sufficient factors of a gradient: two thin matrices whose product it is.

Source: Zhang et al. 2017 (Poseidon), section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

WEIGHT_COLUMNS = 2
"""Columns beside factors of 16 bits: their rank's weight as a high and a low part.

One part alone would be rounded, and bias the mean.
"""


@dataclass(frozen=True)
class FactorShape:
    """Shape of factors as the exchange has to know it before any step runs; the same on every rank.

    Attributes:
      rows: Rows of one rank and exchange, K, on average: the samples of a batch, times the
        positions at which the kernel is used, times the steps whose gradients are accumulated;
        `None` before the first step.
      left: Columns of the left matrix, M.
      right: Columns of the right matrix, N.
      dtype: Dtype of the values that are sent.
      has_local: True if every rank adds a term of its own afterwards.
      indexed: True if the left rows are one-hot, and travel as their indices.

    >>> FactorShape(rows=32, left=1000, right=500, dtype="float32").bytes
    192000
    """

    rows: float | None
    left: int
    right: int
    dtype: str
    has_local: bool = False
    indexed: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of one value."""
        return tf.as_dtype(self.dtype).size

    @property
    def left_columns(self) -> int:
        """Values in which a left row travels: M, or as many as hold an index of 32 bits."""
        return max(1, 4 // self.itemsize) if self.indexed else self.left

    @property
    def bytes(self) -> float:
        """Bytes that one rank sends to each other; 0 before the first step."""
        columns = self.left_columns + self.right + (WEIGHT_COLUMNS if self.itemsize == 2 else 0)
        return (self.rows or 0) * columns * self.itemsize

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the product, whose values have 32 bits unless the factors' have 64."""
        return self.left * self.right * max(4, self.itemsize)


@dataclass(frozen=True)
class FactorPair:
    """Gradient of one variable as `reshape(left^T right) + local`.

    Attributes:
      left: Left matrix, `[K, M]` floating point; K may be known only when the step runs.
      right: Right matrix, `[K, N]` in the same dtype.
      local: Term that follows from variables alone (a regulariser's part), so that it is the same
        on all ranks; in the variable's shape and dtype, or `None`.
      constants: Digest of the numbers in `local` that are in the graph, which ranks have to
        compare.
      weight: Factor on the product of factors in 16 bits, where it is not 1: float32, a scalar or
        `[K]`. Wider factors are multiplied by it at once.

    >>> factors = FactorPair(tf.constant([[1.0, 2.0]]), tf.constant([[3.0, 4.0]]))
    >>> factors.own_product.numpy().tolist()
    [3.0, 4.0, 6.0, 8.0]
    """

    left: tf.Tensor
    right: tf.Tensor
    local: tf.Tensor | None = None
    constants: str = ""
    weight: tf.Tensor | None = None

    @property
    def widths(self) -> tuple[int, int]:
        """Columns of the left and of the right matrix, M and N."""
        return self.left.shape[1], self.right.shape[1]

    @property
    def shape(self) -> FactorShape:
        """Shape without rows, whose number is not always known in a trace."""
        return FactorShape(
            None, *self.widths, dtype=self.left.dtype.name, has_local=self.local is not None
        )

    @property
    def enough_rows(self) -> int:
        """Rows with which any matrix of this size can be sent: those of the unit matrix."""
        return min(self.widths)

    @property
    def own_product(self) -> tf.Tensor:
        """Product of this rank's rows without the local term, `[M * N]` float64 or float32."""
        right = self.right
        if right.dtype.size == 2:
            right = tf.cast(right, tf.float32)
            right = right if self.weight is None else right * _column(self.weight)
        return tf.reshape(self._multiplied_here(self.left, right), [-1])

    @property
    def packed(self) -> tf.Tensor:
        """Message with all that is sent: `[K, M + N]`, with 16 bits `[K, M + N + 2]`.

        Values of bfloat16 go as uint16 with the same bits: Horovod does not know them.
        """
        both = [self.left, self.right]
        if self.left.dtype.size == 2:
            both += self._weight_columns()
        rows = tf.concat(both, 1)
        return tf.bitcast(rows, tf.uint16) if rows.dtype == tf.bfloat16 else rows

    def _weight_columns(self) -> list[tf.Tensor]:
        # In every row: where rows of several ranks have met, nothing else tells whose they are.
        weight = tf.constant(1.0) if self.weight is None else self.weight
        high = tf.cast(weight, self.left.dtype)
        low = tf.cast(weight - tf.cast(high, tf.float32), self.left.dtype)
        return [tf.broadcast_to(_column(part), [tf.shape(self.left)[0], 1]) for part in (high, low)]

    def product(self, packed: tf.Tensor) -> tf.Tensor:
        """Multiplies rows of any number of ranks.

        Args:
          packed: Rows as `packed` of each rank has them, one below the other.

        Returns:
          Sum of the products, `[M * N]`, float64 or else float32.
        """
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

    def weighted(self, weight: tf.Tensor) -> FactorPair:
        """Returns these factors with their product times a weight.

        The local term stays as it is: it is the same on all ranks and in all calls.

        Args:
          weight: Factor, floating point: a scalar, or `[K]` for each row's term of the product.
        """
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
    """Returns zeros where `weight` is 0. Indices stay: their values are zeros then."""
    if not tensor.dtype.is_floating:
        return tensor
    # Times 0 or 1, so values stay; 0 times NaN is 0 here.
    return tf.math.multiply_no_nan(tensor, _column(tf.cast(tf.sign(weight), tensor.dtype)))


def _column(weight: tf.Tensor) -> tf.Tensor:
    return weight[:, tf.newaxis] if weight.shape.rank else weight


class NoFactorsError(Exception):
    """Error of a gradient without factors, whose message is the reason in a few words."""


def as_factors(gradient: Any, like: FactorShape) -> FactorPair:
    """Returns a matrix as its product with the unit matrix, for a rank whose peers expect factors.

    Args:
      gradient: Tensor with the number of elements that `like` has.
      like: Shape of the factors that peers send.
    """
    matrix = tf.reshape(
        tf.cast(tf.convert_to_tensor(gradient), like.dtype), [like.left, like.right]
    )
    # The unit matrix of the shorter side: as few rows as can be.
    unit = tf.eye(min(like.left, like.right), dtype=like.dtype)
    return (
        FactorPair(unit, matrix)
        if like.left <= like.right
        else FactorPair(tf.transpose(matrix), unit)
    )


def tensors_of(gradient: Any) -> list[tf.Tensor]:
    """Returns the tensors of a gradient: its own, its values, both factors, or none for `None`."""
    if gradient is None:
        return []
    if isinstance(gradient, FactorPair):
        return [gradient.left, gradient.right]
    return [gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient]

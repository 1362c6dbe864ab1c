"""Represents a gradient by its sufficient factors: two thin matrices whose product is the gradient.

The gradient of an embedding is the product of one-hot rows and values. Ranks send the one-hot rows
as their indices.

Source: Zhang et al. 2017 (Poseidon), section 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import tensorflow as tf
from typing_extensions import override

from tfposeidon.gradients import Description, merge_rows
from tfposeidon.schemes.stages import Work

# Messages of 16-bit factors have two more columns for the rank's weight, a high and a low part,
# because a weight that is rounded to 16 bits would bias the average.
_WEIGHT_COLUMNS = 2


@dataclass(frozen=True)
class FactorShape:
    """Static shape of factors; the same on every rank.

    Attributes:
      rows: K, the number of batch rows in an exchange, averaged over ranks: the samples of a batch
        times the positions at which a layer uses the kernel. `None` before the first step.
      left: Number of columns of the left matrix, M.
      right: Number of columns of the right matrix, N.
      dtype: Dtype of the values that are sent.
      has_local: True if every rank adds a local term after the exchange.
      indexed: True if the left rows are one-hot and are sent as their indices.

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
        """Number of bytes of one value."""
        return tf.as_dtype(self.dtype).size

    @property
    def left_columns(self) -> int:
        """Number of values sent per left row: M, or as many as a 32-bit index occupies."""
        return max(1, 4 // self.itemsize) if self.indexed else self.left

    @property
    def bytes(self) -> float:
        """Number of bytes that a rank sends to each other rank; 0 before the first step."""
        columns = self.left_columns + self.right + (_WEIGHT_COLUMNS if self.itemsize == 2 else 0)
        return (self.rows or 0) * columns * self.itemsize

    @property
    def matrix_bytes(self) -> int:
        """Number of bytes of the product, which is float64 for float64 factors, else float32."""
        return self.left * self.right * max(4, self.itemsize)

    @property
    def is_sized(self) -> bool:
        return self.rows is not None

    def sized(self, size: float | None) -> FactorShape:
        return replace(self, rows=size)

    def multiplication(self, ranks: int) -> Work:
        """Describes the product of the factors of several ranks.

        Args:
          ranks: Number of ranks whose batch rows are multiplied.

        Returns:
          The work: one multiplication and one addition per batch row and element of the product;
          none before the first step.
        """
        rows = ranks * (self.rows or 0)
        return Work(
            name="product",
            kind="multiply",
            elements=self.left * self.right,
            operations=2.0 * rows * self.left_columns * self.right,
        )


def shape_of(description: Description) -> FactorShape:
    """Returns the shape of the factors that all ranks found; `structure` must not be `None`."""
    return cast(FactorShape, description.structure)


@dataclass(frozen=True)
class FactorPair:
    """Gradient of one variable as `reshape(left^T right) + local`.

    Attributes:
      left: Left matrix, `[K, M]` floating point. K may be known only when the step runs.
      right: Right matrix, `[K, N]` in the same dtype.
      local: Term that depends on variables alone, such as a regularizer's gradient, and is
        therefore the same on all ranks; in the variable's shape and dtype, or `None`.
      constants: Digest of the graph's constants in `local`, which ranks compare.
      weight: Scale of the product of 16-bit factors, a float32 scalar. For wider factors,
        `weighted` scales the right matrix instead.

    >>> factors = FactorPair(tf.constant([[1.0, 2.0]]), tf.constant([[3.0, 4.0]]))
    >>> factors.own_product.numpy().tolist()
    [3.0, 4.0, 6.0, 8.0]
    """

    left: tf.Tensor
    right: tf.Tensor
    local: tf.Tensor | None = None
    constants: str = ""
    weight: tf.Tensor | float = 1.0

    @property
    def tensors(self) -> list[tf.Tensor]:
        return [self.left, self.right]

    @property
    def shape(self) -> FactorShape:
        """Shape without the number of rows, which may be unknown in a trace."""
        m, n = self.left.shape[1], self.right.shape[1]
        return FactorShape(None, m, n, dtype=self.left.dtype.name, has_local=self.local is not None)

    @property
    def own_product(self) -> tf.Tensor:
        """Product of this rank's rows without the local term, `[M * N]` float64 or float32."""
        right = self.right
        if right.dtype.size == 2:
            right = tf.cast(right, tf.float32) * self.weight
        return tf.reshape(self._multiplied(self.left, right), [-1])

    @property
    def packed(self) -> tf.Tensor:
        """Message with all values to send: `[K, M + N]`, or `[K, M + N + 2]` for 16-bit values.

        Values of bfloat16 are bit-cast to uint16, because Horovod does not support bfloat16.
        """
        columns, dtype = self.tensors, self.left.dtype
        if dtype.size == 2:
            # Repeat the weight in every row, because gathered rows do not identify their rank.
            high = tf.cast(self.weight, dtype)
            low = tf.cast(self.weight - tf.cast(high, tf.float32), dtype)
            columns += [tf.fill([tf.shape(self.left)[0], 1], part) for part in (high, low)]
        rows = tf.concat(columns, 1)
        return tf.bitcast(rows, tf.uint16) if dtype == tf.bfloat16 else rows

    def product(self, packed: tf.Tensor) -> tf.Tensor:
        """Multiplies the rows of any number of ranks.

        Args:
          packed: Concatenated messages of all ranks; each message is a rank's `packed`.

        Returns:
          Sum of the products, `[M * N]`, float64 if the factors are, else float32.
        """
        dtype = self.right.dtype
        rows = tf.bitcast(packed, tf.bfloat16) if dtype == tf.bfloat16 else packed
        columns = [self.shape.left_columns, self.right.shape[1]]
        if dtype.size == 2:
            left, right, weight = tf.split(rows, [*columns, _WEIGHT_COLUMNS], axis=1)
            right = tf.cast(right, tf.float32) * tf.reduce_sum(
                tf.cast(weight, tf.float32), axis=1, keepdims=True
            )
        else:
            left, right = tf.split(rows, columns, axis=1)
        return tf.reshape(self._multiplied(left, right), [-1])

    def _multiplied(self, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
        return tf.linalg.matmul(tf.cast(left, right.dtype), right, transpose_a=True)

    def weighted(self, weight: tf.Tensor) -> FactorPair:
        """Returns factors with a scaled product and the same local term; `weight` is the scale."""
        # Multiply by 0 or 1 first, because gradients of empty batches may be NaN, and here 0 times
        # NaN is 0. Indices need no change, because the corresponding values become zeros.
        left, right = (
            tf.math.multiply_no_nan(tensor, tf.cast(tf.sign(weight), tensor.dtype))
            if tensor.dtype.is_floating
            else tensor
            for tensor in self.tensors
        )
        if right.dtype.size == 2:
            return replace(self, left=left, right=right, weight=self.weight * weight)
        return replace(self, left=left, right=right * tf.cast(weight, right.dtype))


class NoFactorsError(Exception):
    """Error for a gradient without factors; its message is the reason."""


@dataclass(frozen=True)
class Rows(FactorPair):
    """Gradient of an M x N table as K of its rows; rows of equal index are summed.

    `left` holds the indices, `[K]` int32; `right` the values, `[K, N]`; `table` is M.
    """

    table: int = 0

    @property
    @override
    def shape(self) -> FactorShape:
        columns, dtype = self.right.shape[1], self.right.dtype.name
        return FactorShape(None, self.table, columns, dtype=dtype, indexed=True)

    @property
    @override
    def packed(self) -> tf.Tensor:
        """Message of indices, bit-cast to the values' dtype, and the sum of values per index."""
        rows = merge_rows(tf.IndexedSlices(self.right, self.left))
        # The bits are preserved, because these columns are only moved and never used in arithmetic.
        bits = tf.bitcast(tf.cast(rows.indices, _index_dtype(self.right.dtype)), self.right.dtype)
        columns = tf.reshape(bits, [-1, self.shape.left_columns])
        return super(Rows, replace(self, left=columns, right=rows.values)).packed

    @override
    def _multiplied(self, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
        if left.dtype.is_integer:
            return tf.math.unsorted_segment_sum(right, left, self.table)
        index_dtype = _index_dtype(left.dtype)
        bits = left if left.dtype.size < index_dtype.size else left[:, 0]
        # Sum on the CPU: a GPU would add in a different order on every rank, and replicas would
        # diverge.
        with tf.device("/CPU:0"):
            return self._multiplied(tf.bitcast(bits, index_dtype), right)


def rows_of(gradient: tf.IndexedSlices, shape: Sequence[int]) -> Rows:
    """Reads the rows of a gradient; raises `NoFactorsError` unless the table has two dimensions."""
    if len(shape) != 2:
        raise NoFactorsError(f"its rows are not vectors: the variable has shape {tuple(shape)}")
    values = tf.ensure_shape(gradient.values, [gradient.values.shape[0], shape[1]])
    return Rows(tf.cast(gradient.indices, tf.int32), values, table=shape[0])


def as_product(gradient: Any, like: FactorShape) -> FactorPair:
    """Converts a gradient to a product with a unit matrix, if other ranks expect factors."""
    matrix = tf.cast(tf.convert_to_tensor(gradient), like.dtype)
    matrix = tf.reshape(matrix, [like.left, like.right])
    if like.indexed:
        return Rows(tf.range(like.left), matrix, table=like.left)
    # Use the unit matrix of the shorter side, which has the fewest rows.
    unit = tf.eye(min(like.left, like.right), dtype=like.dtype)
    if like.left <= like.right:
        return FactorPair(unit, matrix)
    return FactorPair(tf.transpose(matrix), unit)


def _index_dtype(values: tf.DType) -> tf.DType:
    # tf.bitcast requires types of equal size, or splits an int32 into two 16-bit columns.
    return tf.int64 if values.size == 8 else tf.int32

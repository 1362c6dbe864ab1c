"""Gradients of embeddings: a product too, with one-hot rows, which travel as their indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tfposeidon.gradients.factors import FactorPair, FactorShape, NoFactorsError, as_factors


@dataclass(frozen=True)
class Rows(FactorPair):
    """Gradient of a table of M rows and N columns, as K of its rows; those of equal index add up.

    Attributes:
      left: Indices, `[K]` int32.
      right: Values, `[K, N]` floating point.
      table: Number of rows of the table, M.

    >>> rows = Rows(tf.constant([0, 2]), tf.constant([[1.0], [5.0]]), table=3)
    >>> rows.own_product.numpy().tolist()
    [1.0, 0.0, 5.0]
    """

    table: int = 0

    @property
    @override
    def widths(self) -> tuple[int, int]:
        return self.table, self.right.shape[1]

    @property
    @override
    def shape(self) -> FactorShape:
        return FactorShape(None, *self.widths, dtype=self.right.dtype.name, indexed=True)

    @property
    @override
    def enough_rows(self) -> int:
        return self.table

    @property
    @override
    def packed(self) -> tf.Tensor:
        """Indices, as numbers of the values' dtype with the same bits, beside values.

        Values are summed first where tokens repeat.
        """
        indices, values = self._summed()
        # Bits survive, for these columns are only moved: nothing computes with them on the way.
        bits = tf.bitcast(tf.cast(indices, _index_dtype(self.right.dtype)), self.right.dtype)
        columns = tf.reshape(bits, [-1, self.shape.left_columns])
        return super(Rows, replace(self, left=columns, right=values)).packed

    def _summed(self) -> tuple[tf.Tensor, tf.Tensor]:
        # Rows of 16 bits with weights of their own are for the receivers to add up.
        if self.right.dtype.size == 2 and self.weight is not None and self.weight.shape.rank:
            return self.left, self.right
        indices, segments = tf.unique(self.left)
        return indices, tf.math.unsorted_segment_sum(self.right, segments, tf.size(indices))

    @override
    def _multiplied(self, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
        index_dtype = _index_dtype(left.dtype)
        bits = left if left.dtype.size < index_dtype.size else left[:, 0]
        # A GPU would add in an order of its own on every rank, and replicas would part.
        with tf.device("/CPU:0"):
            return self._multiplied_here(tf.bitcast(bits, index_dtype), right)

    @override
    def _multiplied_here(self, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
        return tf.math.unsorted_segment_sum(right, left, self.table)


def read(gradient: tf.IndexedSlices, shape: Sequence[int]) -> Rows:
    """Reads the rows of a gradient.

    Args:
      gradient: Gradient with respect to a table.
      shape: Shape of the table.

    Returns:
      The rows, with int32 indices and the gradient's values.

    Raises:
      NoFactorsError: If the table has other than two dimensions.
    """
    if len(shape) != 2:
        raise NoFactorsError(f"its rows are no vectors: the variable has shape {tuple(shape)}")
    values = tf.ensure_shape(gradient.values, [gradient.values.shape[0], shape[1]])
    return Rows(tf.cast(gradient.indices, tf.int32), values, table=shape[0])


def as_rows(gradient: Any, like: FactorShape) -> Rows:
    """Returns a matrix as all its rows, for a rank whose peers expect rows.

    Args:
      gradient: Tensor with the number of elements that `like` has.
      like: Shape of the rows that peers send.
    """
    matrix = tf.reshape(
        tf.cast(tf.convert_to_tensor(gradient), like.dtype), [like.left, like.right]
    )
    return Rows(tf.range(like.left), matrix, table=like.left)


def as_product(gradient: Any, like: FactorShape) -> FactorPair:
    """Returns a matrix as a product, for a rank whose peers expect factors.

    Args:
      gradient: Tensor with the number of elements that `like` has.
      like: Shape of the factors that peers send.
    """
    return as_rows(gradient, like) if like.indexed else as_factors(gradient, like)


def _index_dtype(values: tf.DType) -> tf.DType:
    # TensorFlow casts bits between types of one size, or makes two 16-bit columns of an int32.
    return tf.int64 if values.size == 8 else tf.int32

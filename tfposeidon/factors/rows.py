"""Gradients of embeddings as sufficient factors.

Such a gradient is the product of one-hot rows and values. The one-hot rows are sent as their
indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tfposeidon.factors.pairs import FactorPair, FactorShape, NoFactorsError


@dataclass(frozen=True)
class Rows(FactorPair):
    """Gradient of an M x N table as K of its rows, where rows of equal index add up.

    `left` holds the indices, `[K]` int32; `right` the values, `[K, N]`; `table` is M.

    >>> rows = Rows(tf.constant([0, 2]), tf.constant([[1.0], [5.0]]), table=3)
    >>> rows.own_product.numpy().tolist()
    [1.0, 0.0, 5.0]
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
        """Indices, bit-cast to the values' dtype, and values; repeated indices are summed first."""
        indices, segments = tf.unique(self.left)
        values = tf.math.unsorted_segment_sum(self.right, segments, tf.size(indices))
        # The bits are preserved, because these columns are only moved and never used in arithmetic.
        bits = tf.bitcast(tf.cast(indices, _index_dtype(self.right.dtype)), self.right.dtype)
        columns = tf.reshape(bits, [-1, self.shape.left_columns])
        return super(Rows, replace(self, left=columns, right=values)).packed

    @override
    def _multiplied(self, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
        index_dtype = _index_dtype(left.dtype)
        bits = left if left.dtype.size < index_dtype.size else left[:, 0]
        # A GPU would add in a different order on every rank, and replicas would diverge.
        with tf.device("/CPU:0"):
            return self._multiplied_here(tf.bitcast(bits, index_dtype), right)

    @override
    def _multiplied_here(self, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
        return tf.math.unsorted_segment_sum(right, left, self.table)


def read(gradient: tf.IndexedSlices, shape: Sequence[int]) -> Rows:
    """Reads the rows of a gradient; raises `NoFactorsError` unless the table has two dimensions."""
    if len(shape) != 2:
        raise NoFactorsError(f"its rows are not vectors: the variable has shape {tuple(shape)}")
    values = tf.ensure_shape(gradient.values, [gradient.values.shape[0], shape[1]])
    return Rows(tf.cast(gradient.indices, tf.int32), values, table=shape[0])


def as_product(gradient: Any, like: FactorShape) -> FactorPair:
    """Returns a matrix as a product, for a rank whose peers expect rows or factors."""
    matrix = tf.reshape(
        tf.cast(tf.convert_to_tensor(gradient), like.dtype), [like.left, like.right]
    )
    if like.indexed:
        return Rows(tf.range(like.left), matrix, table=like.left)
    # Use the unit matrix of the shorter side, which has the fewest rows.
    unit = tf.eye(min(like.left, like.right), dtype=like.dtype)
    if like.left <= like.right:
        return FactorPair(unit, matrix)
    return FactorPair(tf.transpose(matrix), unit)


def _index_dtype(values: tf.DType) -> tf.DType:
    # tf.bitcast needs types of equal size, or splits an int32 into two 16-bit columns.
    return tf.int64 if values.size == 8 else tf.int32

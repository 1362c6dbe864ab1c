"""Gradients of embeddings: a product too, of one-hot rows, which travel as their indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from tfposeidon.gradients.factors import Factors, FactorShape, NoFactorsError, as_factors


@dataclass(frozen=True)
class Rows(Factors):
    """Rows of a table of M rows and N columns; those of equal index count together.

    Attributes:
      left: Indices, `[K]` int32.
      right: Values, `[K, N]` floating point.
      table: M.
    """

    table: int = 0

    @property
    def widths(self) -> tuple[int, int]:
        return self.table, self.right.shape[1]

    @property
    def shape(self) -> FactorShape:
        return FactorShape(None, *self.widths, dtype=self.right.dtype.name, indexed=True)

    @property
    def enough_rows(self) -> int:
        return self.table

    @property
    def packed(self) -> tf.Tensor:
        """Indices, as numbers of the values' type with the same bits, and values: summed where tokens repeat."""
        indices, values = self._summed()
        bits = tf.bitcast(tf.cast(indices, _index_dtype(self.right.dtype)), self.right.dtype)
        columns = tf.reshape(bits, [-1, self.shape.left_columns])
        return super(Rows, replace(self, left=columns, right=values)).packed

    def _summed(self) -> tuple[tf.Tensor, tf.Tensor]:
        # Rows of 16 bits with weights of their own are for the receivers to add up.
        if self.right.dtype.size == 2 and self.weight is not None and self.weight.shape.rank:
            return self.left, self.right
        indices, places = tf.unique(self.left)
        return indices, tf.math.unsorted_segment_sum(self.right, places, tf.size(indices))

    def _multiplied(self, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
        index_dtype = _index_dtype(left.dtype)
        bits = left if left.dtype.size < index_dtype.size else left[:, 0]
        # A GPU would add in an order of its own on every rank.
        with tf.device("/CPU:0"):
            return self._multiplied_here(tf.bitcast(bits, index_dtype), right)

    def _multiplied_here(self, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
        return tf.math.unsorted_segment_sum(right, left, self.table)


def read(gradient: tf.IndexedSlices, shape: Sequence[int]) -> Rows:
    """The rows of a gradient with respect to a table of `shape`.

    Raises:
      NoFactorsError: If the table has other than two dimensions.
    """
    if len(shape) != 2:
        raise NoFactorsError(f"its rows are no vectors: the variable has shape {tuple(shape)}")
    values = tf.ensure_shape(gradient.values, [gradient.values.shape[0], shape[1]])
    return Rows(tf.cast(gradient.indices, tf.int32), values, table=shape[0])


def as_rows(gradient: Any, like: FactorShape) -> Rows:
    """Any gradient as rows, all of them: for a rank whose peers expect rows and which has a matrix."""
    matrix = tf.reshape(
        tf.cast(tf.convert_to_tensor(gradient), like.dtype), [like.left, like.right]
    )
    return Rows(tf.range(like.left), matrix, table=like.left)


def as_product(gradient: Any, like: FactorShape) -> Factors:
    """Any gradient as factors of that shape, with the unit matrix: for a rank whose peers expect them."""
    return as_rows(gradient, like) if like.indexed else as_factors(gradient, like)


def _index_dtype(values: tf.DType) -> tf.DType:
    return tf.int64 if values.size == 8 else tf.int32

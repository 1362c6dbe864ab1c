"""Reads sufficient factors off the graph: gradients that are a product of two thin matrices (Poseidon, section 2.1).

The gradient of a kernel that meets K rows is `left^T right`, [K, M] and [K, N]. In graph mode it carries the op that
multiplied them, from which they are taken; the product, which then nobody uses, TensorFlow leaves out. What is not
recognised for certain is no product.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

LAYERS = "Dense, EinsumDense and MultiHeadAttention, used outside loops and without gradient accumulation"
"""Whose kernels have factors."""


@dataclass(frozen=True)
class FactorShape:
    """What the exchange has to know of factors before any step runs; the same on every rank.

    Attributes:
      rows: K of one rank and step: the samples of a batch, times the positions at which the kernel is used; `None`
        if there is no telling.
      left: M.
      right: N.
      dtype: Of the values that are sent.
    """

    rows: int | None
    left: int
    right: int
    dtype: str

    @property
    def bytes(self) -> int:
        """What one rank has to send to each other; 0 if there is no telling."""
        return (self.rows or 0) * (self.left + self.right) * tf.as_dtype(self.dtype).size


@dataclass(frozen=True)
class Factors:
    """One variable's gradient, `reshape(left^T right) + local`.

    Attributes:
      left: `[K, M]` floating point; K may be known only when the step runs.
      right: `[K, N]` in the same dtype.
      local: What the loss adds that follows from variables alone (a regulariser's part), so that it is the same on
        all ranks; in the variable's shape and dtype, or `None`.
    """

    left: tf.Tensor
    right: tf.Tensor
    local: tf.Tensor | None

    @property
    def widths(self) -> tuple[int, int]:
        """M and N."""
        return self.left.shape[1], self.right.shape[1]

    @property
    def packed(self) -> tf.Tensor:
        """Both as they are sent, `[K, M + N]`: one message; bfloat16 as uint16, for Horovod does not know it."""
        both = tf.concat([self.left, self.right], 1)
        return tf.bitcast(both, tf.uint16) if both.dtype == tf.bfloat16 else both

    def product(self, packed: tf.Tensor) -> tf.Tensor:
        """`[M * N]`, float32 unless they are float64: of rows of any number of ranks, packed as this one's."""
        rows = tf.bitcast(packed, tf.bfloat16) if self.left.dtype == tf.bfloat16 else packed
        wide = tf.float64 if self.left.dtype == tf.float64 else tf.float32
        left, right = tf.split(tf.cast(rows, wide), self.widths, axis=1)
        return tf.reshape(tf.linalg.matmul(left, right, transpose_a=True), [-1])

    def weighted(self, weight: tf.Tensor) -> Factors:
        """With the product times `weight`; the local term is every rank's alike, and stays."""
        return replace(self, right=self.right * tf.cast(weight, self.right.dtype))


class NoFactorsError(Exception):
    """Why a gradient has none, in a few words."""


@dataclass(frozen=True)
class _Product:
    """`left^T right`."""

    left: tf.Tensor
    right: tf.Tensor

    def of_width(self, shape: Sequence[int]) -> _Product:
        """Widths that only the step would tell (tensordot's) are those of a matrix, or the step ends with an error."""
        if len(shape) != 2 or None not in (self.left.shape[1], self.right.shape[1]):
            return self
        pairs = zip((self.left, self.right), shape, strict=True)
        return _Product(*(tf.ensure_shape(tensor, [tensor.shape[0], width]) for tensor, width in pairs))

    def cast(self, dtype: tf.DType) -> _Product:
        return _Product(tf.cast(self.left, dtype), tf.cast(self.right, dtype))


def read(gradient: Any, shape: Sequence[int], dtype: str, replicated: Collection[Any]) -> Factors:
    """Finds the factors of a gradient.

    Args:
      gradient: As it comes from the tape.
      shape: Of the variable.
      dtype: Of the variable's gradient on the wire.
      replicated: Variables that have the same values on all ranks.

    Raises:
      NoFactorsError: If there are none, or none that are certain.
    """
    if not isinstance(gradient, tf.Tensor) or not hasattr(gradient, "graph"):
        raise NoFactorsError("it is no tensor of a graph")
    products, locals_ = _terms(gradient)
    if not products:
        raise NoFactorsError(f"it comes from {_source(gradient).type}, which is no product of two matrices")
    products = [p.of_width(shape) for p in products]
    widths = {(p.left.shape[1], p.right.shape[1]) for p in products}
    (m, n), *others = widths
    if others or m is None or n is None or m * n != tf.TensorShape(shape).num_elements():
        raise NoFactorsError("its products do not have the variable's size")
    known = _handles(replicated)
    for term in locals_:
        culprit = _first_not_replicated(term, known)
        if culprit:
            raise NoFactorsError(f"a term that is no product depends on {culprit}, which differs between ranks")
    narrow = {p.left.dtype for p in products} | {p.right.dtype for p in products}
    if len(narrow) > 1:
        products = [p.cast(tf.float32) for p in products]
    parts = [tf.reshape(tf.cast(term, dtype), shape) for term in locals_]
    left, right = _stacked([p.left for p in products]), _stacked([p.right for p in products])
    return Factors(left, right, tf.add_n(parts) if parts else None)


def rows_per_sample(matrix: tf.Tensor) -> int | None:
    """Rows of a factor for each sample of the batch, or `None` if there is no telling."""
    tensor = matrix
    while tensor.op.type in ("Identity", "Cast"):
        tensor = tensor.op.inputs[0]
    before = tensor.op.inputs[0].shape if tensor.op.type == "Reshape" else tensor.shape
    if before.rank is None or before[0] is not None or any(size is None for size in before[1:]):
        return None
    per_sample, left_over = divmod(math.prod(before[1:]), matrix.shape[1])
    return None if left_over else per_sample


def _stacked(matrices: list[tf.Tensor]) -> tf.Tensor:
    """A sum of products is the product of what stands on top of one another."""
    return matrices[0] if len(matrices) == 1 else tf.concat(matrices, 0)


# ---------------------------------------------------------------------- terms


def _terms(tensor: tf.Tensor) -> tuple[list[_Product], list[tf.Tensor]]:
    """The products, and the other terms, whose sum has the tensor's elements in their order."""
    op = _source(tensor)
    if op.type in ("AddN", "AddV2", "Add") and len({str(t.shape) for t in op.inputs}) == 1:
        pairs = [_terms(term) for term in op.inputs]
        return [p for products, _ in pairs for p in products], [t for _, others in pairs for t in others]
    product = _product(op)
    return ([product], []) if product else ([], [tensor])


def _source(tensor: tf.Tensor) -> tf.Operation:
    """The op behind those that leave all elements where they are."""
    op = tensor.op
    while op.type in ("Identity", "Reshape", "Cast", "ExpandDims", "Squeeze"):
        if op.type == "Cast" and not op.inputs[0].dtype.is_floating:
            break
        op = op.inputs[0].op
    return op


def _product(op: tf.Operation) -> _Product | None:
    if op.type == "MatMul":
        left, right = op.inputs
        return _Product(
            left if op.get_attr("transpose_a") else tf.transpose(left),
            tf.transpose(right) if op.get_attr("transpose_b") else right,
        )
    if op.type == "Transpose" and _value(op.inputs[1]) == [1, 0]:
        inner = _product(_source(op.inputs[0])) if op.inputs[0].shape.rank == 2 else None
        return replace(inner, left=inner.right, right=inner.left) if inner else None
    if op.type == "Sum":
        return _batched_product(op.inputs[0], op.inputs[1])
    return None


def _batched_product(tensor: tf.Tensor, axes: tf.Tensor) -> _Product | None:
    """A product for each element of a batch, summed over all of it: rows of all elements, one after the other."""
    op = _source(tensor)
    if not op.type.startswith("BatchMatMul") or not _is_over_batch(axes, op.outputs[0].shape.rank):
        return None
    left, right = op.inputs
    left = left if op.get_attr("adj_x") else tf.linalg.matrix_transpose(left)
    right = tf.linalg.matrix_transpose(right) if op.get_attr("adj_y") else right
    if left.shape.rank != right.shape.rank or not left.shape[-1] or not right.shape[-1]:
        return None
    return _Product(tf.reshape(left, [-1, left.shape[-1]]), tf.reshape(right, [-1, right.shape[-1]]))


def _is_over_batch(axes: tf.Tensor, rank: int | None) -> bool:
    """Whether a sum is over all dimensions of a batch of matrices.

    The gradient of a matrix that met a batch is summed over what `BroadcastGradientArgs` says: over the dimensions of
    the batch that the matrix has not, which are all, if the sum has no more elements than one product (`read` checks).
    """
    if axes.op.type == "BroadcastGradientArgs":
        return True
    value = _value(axes)
    return rank is not None and value is not None and sorted(axis % rank for axis in value) == list(range(rank - 2))


def _value(tensor: tf.Tensor) -> Any:
    value = tf.get_static_value(tensor)
    return None if value is None else value.reshape(-1).tolist()


# ----------------------------------------------------------- the same everywhere


def _handles(variables: Collection[Any]) -> set[int]:
    return {id(getattr(v, "value", v).handle) for v in variables}


def _first_not_replicated(tensor: tf.Tensor, known: set[int]) -> str:
    """What it is made from that could differ between ranks; empty if there is nothing."""
    seen: set[str] = set()
    ahead = [tensor.op]
    while ahead:
        op = ahead.pop()
        if op.name in seen:
            continue
        seen.add(op.name)
        if op.type == "Placeholder":
            if id(_captured(op.outputs[0])) not in known:
                return f"{op.name!r}"
        elif op.op_def.is_stateful and op.type != "ReadVariableOp":
            return f"{op.name!r} ({op.type})"
        ahead.extend(t.op for t in op.inputs)
    return ""


def _captured(placeholder: tf.Tensor) -> Any:
    """What a function's input stands for outside of all functions."""
    for outside, inside in getattr(placeholder.graph, "captures", ()):
        if inside is placeholder:
            nested = not isinstance(outside, tf.__internal__.EagerTensor) and outside.op.type == "Placeholder"
            return _captured(outside) if nested else outside
    return placeholder

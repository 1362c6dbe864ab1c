"""Reads sufficient factors off the graph: gradients that are a product of two thin matrices (Poseidon, section 2.1).

The gradient of a kernel that meets K rows is `left^T right`, [K, M] and [K, N]. In graph mode it carries the op that
multiplied them, from which they are taken; the product, which then nobody uses, TensorFlow leaves out. What is not
recognised for certain is no product.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

LAYERS = "Dense, EinsumDense, MultiHeadAttention and Embedding, used outside loops"
"""Whose weights have factors."""


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
        return FactorShape(None, *self.widths, dtype=self.left.dtype.name, has_local=self.local is not None)

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
            right = tf.cast(right, tf.float32) * tf.reduce_sum(tf.cast(weight, tf.float32), axis=1, keepdims=True)
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
            return replace(self, left=left, right=right, weight=weight if self.weight is None else self.weight * weight)
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
    constants = _constants_of_replicated(locals_, _handles(replicated))
    narrow = {p.left.dtype for p in products} | {p.right.dtype for p in products}
    if len(narrow) > 1:
        products = [p.cast(tf.float32) for p in products]
    parts = [tf.reshape(tf.cast(term, dtype), shape) for term in locals_]
    left, right = _stacked([p.left for p in products]), _stacked([p.right for p in products])
    return Factors(left, right, tf.add_n(parts) if parts else None, constants)


def as_factors(gradient: Any, like: FactorShape) -> Factors:
    """Any gradient as a product with the unit matrix: for a rank whose peers expect factors and which has none."""
    matrix = tf.reshape(tf.cast(tf.convert_to_tensor(gradient), like.dtype), [like.left, like.right])
    unit = tf.eye(min(like.left, like.right), dtype=like.dtype)
    return Factors(unit, matrix) if like.left <= like.right else Factors(tf.transpose(matrix), unit)


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
    if op.type == "Transpose" and _permutation(op.inputs[1]) == [1, 0]:
        inner = _product(_source(op.inputs[0]))
        # Only of the product itself: elsewhere a reshape may stand between.
        known = inner and [inner.left.shape[1], inner.right.shape[1]] == op.inputs[0].shape
        return replace(inner, left=inner.right, right=inner.left) if inner and known else None
    if op.type == "Sum":
        return _batched_product(op.inputs[0], op.inputs[1])
    return None


def _permutation(tensor: tf.Tensor) -> Any:
    # A permutation of two is its own inverse.
    return _value(tensor.op.inputs[0] if tensor.op.type == "InvertPermutation" else tensor)


def _batched_product(tensor: tf.Tensor, axes: tf.Tensor) -> _Product | None:
    """A product for each element of a batch, summed over all of it: rows of all elements, one after the other."""
    op = tensor.op
    while op.type in ("Identity", "Cast"):
        op = op.inputs[0].op
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

    The gradient of a matrix that met a batch is summed over what `BroadcastGradientArgs` says of the shapes of batches,
    without those of matrices: over the dimensions that the matrix has not, which are all, if the sum has no more
    elements than one product (`read` checks).
    """
    if axes.op.type == "BroadcastGradientArgs":
        sizes = [shape.shape[0] for shape in axes.op.inputs]
        return rank is not None and None not in sizes and max(sizes) == rank - 2
    value = _value(axes)
    return rank is not None and value is not None and sorted(axis % rank for axis in value) == list(range(rank - 2))


def _value(tensor: tf.Tensor) -> Any:
    value = tf.get_static_value(tensor)
    return None if value is None else value.reshape(-1).tolist()


# ----------------------------------------------------------- the same everywhere


def _handles(variables: Collection[Any]) -> set[int]:
    return {id((v if hasattr(v, "handle") else v.value).handle) for v in variables}


def _constants_of_replicated(tensors: Sequence[tf.Tensor], known: set[int]) -> str:
    """A digest of the constants from which tensors follow that otherwise follow from known variables.

    Raises:
      NoFactorsError: If they depend on anything else, which could differ between ranks.
    """
    seen: dict[str, tf.Operation] = {}
    ahead = [tensor.op for tensor in tensors]
    while ahead:
        op = ahead.pop()
        if op.name in seen:
            continue
        seen[op.name] = op
        unknown = op.type == "Placeholder" and id(_captured(op.outputs[0])) not in known
        if unknown or (op.op_def.is_stateful and op.type != "ReadVariableOp"):
            raise NoFactorsError(f"a term that is no product depends on {op.name!r}, which may differ between ranks")
        ahead.extend(t.op for t in op.inputs)
    constants = sorted(op.get_attr("value").SerializeToString() for op in seen.values() if op.type == "Const")
    return hashlib.sha256(b"".join(constants)).hexdigest() if tensors else ""


def _captured(placeholder: tf.Tensor) -> Any:
    """What a function's input stands for outside of all functions."""
    for outside, inside in getattr(placeholder.graph, "captures", ()):
        if inside is placeholder:
            nested = not isinstance(outside, tf.__internal__.EagerTensor) and outside.op.type == "Placeholder"
            return _captured(outside) if nested else outside
    return placeholder

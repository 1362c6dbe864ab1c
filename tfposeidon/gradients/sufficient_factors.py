"""Sufficient factors, read off the graph: gradients that are a product of two thin matrices.

The gradient of a kernel that meets K rows is `left^T right`, [K, M] and [K, N]. In graph mode it
carries the op that multiplied them, from which they are taken; the product, which then nobody uses,
TensorFlow leaves out. What is not recognised for certain is no product.

Source: Zhang et al. 2017 (Poseidon), section 2.1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from tfposeidon.gradients.factors import FactorPair, NoFactorsError

LAYERS = "Dense, EinsumDense, MultiHeadAttention and Embedding, used outside loops"
"""Layers with kernels whose gradients have factors."""


@dataclass(frozen=True)
class _Product:
    """Product `left^T right`.

    Attributes:
      left: Left matrix, `[K, M]`.
      right: Right matrix, `[K, N]`.
    """

    left: tf.Tensor
    right: tf.Tensor

    def of_width(self, shape: Sequence[int]) -> _Product:
        """Sets widths that only the step would tell, as tensordot's, to those of a matrix.

        If they are others when the step runs, it ends with an error.

        Args:
          shape: Shape of the variable.
        """
        if len(shape) != 2 or None not in (self.left.shape[1], self.right.shape[1]):
            return self
        pairs = zip((self.left, self.right), shape, strict=True)
        return _Product(
            *(tf.ensure_shape(tensor, [tensor.shape[0], width]) for tensor, width in pairs)
        )

    def cast(self, dtype: tf.DType) -> _Product:
        """Returns the product with both matrices in another dtype."""
        return _Product(tf.cast(self.left, dtype), tf.cast(self.right, dtype))


def read(
    gradient: Any, shape: Sequence[int], dtype: str, replicated: Collection[Any]
) -> FactorPair:
    """Finds the factors of a gradient.

    Args:
      gradient: Gradient as it comes from the tape.
      shape: Shape of the variable.
      dtype: Dtype in which the variable's gradient is exchanged.
      replicated: Variables that have the same values on all ranks.

    Returns:
      The factors of all products below one another, and the sum of all other terms in `dtype`.

    Raises:
      NoFactorsError: If there are none, or none that are certain.
    """
    if not isinstance(gradient, tf.Tensor) or not hasattr(gradient, "graph"):
        raise NoFactorsError("it is no tensor of a graph")
    products, local_terms = _terms(gradient)
    if not products:
        raise NoFactorsError(
            f"it comes from {_source(gradient).type}, which is no product of two matrices"
        )
    products = [p.of_width(shape) for p in products]
    widths = {(p.left.shape[1], p.right.shape[1]) for p in products}
    (m, n), *others = widths
    if others or m is None or n is None or m * n != tf.TensorShape(shape).num_elements():
        raise NoFactorsError("its products do not have the variable's size")
    constants = _constants_of_replicated(local_terms, _handles(replicated))
    narrow = {p.left.dtype for p in products} | {p.right.dtype for p in products}
    # Stacked rows need one dtype.
    if len(narrow) > 1:
        products = [p.cast(tf.float32) for p in products]
    parts = [tf.reshape(tf.cast(term, dtype), shape) for term in local_terms]
    left, right = _stacked([p.left for p in products]), _stacked([p.right for p in products])
    return FactorPair(left, right, tf.add_n(parts) if parts else None, constants)


def _stacked(matrices: list[tf.Tensor]) -> tf.Tensor:
    """Concatenates rows: a sum of products is the product of the stacked factors."""
    return matrices[0] if len(matrices) == 1 else tf.concat(matrices, 0)


# ---------------------------------------------------------------------- terms


def _terms(tensor: tf.Tensor) -> tuple[list[_Product], list[tf.Tensor]]:
    """Returns the products and the other terms whose sum the tensor is, up to its shape."""
    op = _source(tensor)
    # Terms of one shape only: an Add may also broadcast.
    if op.type in ("AddN", "AddV2", "Add") and len({str(t.shape) for t in op.inputs}) == 1:
        pairs = [_terms(term) for term in op.inputs]
        return [p for products, _ in pairs for p in products], [
            t for _, others in pairs for t in others
        ]
    product = _product(op)
    return ([product], []) if product else ([], [tensor])


def _source(tensor: tf.Tensor) -> tf.Operation:
    """Returns the op behind those that leave all elements in their order."""
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
        # Only if it transposes the product itself: a reshape that stands between changes what is
        # swapped.
        known = inner and [inner.left.shape[1], inner.right.shape[1]] == op.inputs[0].shape
        return replace(inner, left=inner.right, right=inner.left) if inner and known else None
    if op.type == "Sum":
        return _batched_product(op.inputs[0], op.inputs[1])
    return None


def _permutation(tensor: tf.Tensor) -> Any:
    # A permutation of two axes is its own inverse.
    return _value(tensor.op.inputs[0] if tensor.op.type == "InvertPermutation" else tensor)


def _batched_product(tensor: tf.Tensor, axes: tf.Tensor) -> _Product | None:
    """Reads a product for each element of a batch, summed over all of it.

    It is one product, with the rows of all elements one after the other.
    """
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
    return _Product(
        tf.reshape(left, [-1, left.shape[-1]]), tf.reshape(right, [-1, right.shape[-1]])
    )


def _is_over_batch(axes: tf.Tensor, rank: int | None) -> bool:
    """Returns whether a sum is over all dimensions of a batch of matrices.

    The gradient of a matrix that met a batch is summed over what `BroadcastGradientArgs` says of
    the shapes of batches, without those of matrices: over the dimensions that the matrix has not,
    which are all, if the sum has no more elements than one product (`read` checks).
    """
    if axes.op.type == "BroadcastGradientArgs":
        sizes = [shape.shape[0] for shape in axes.op.inputs]
        return rank is not None and None not in sizes and max(sizes) == rank - 2
    value = _value(axes)
    return (
        rank is not None
        and value is not None
        and sorted(axis % rank for axis in value) == list(range(rank - 2))
    )


def _value(tensor: tf.Tensor) -> Any:
    value = tf.get_static_value(tensor)
    return None if value is None else value.reshape(-1).tolist()


# ----------------------------------------------------------- the same everywhere


def _handles(variables: Collection[Any]) -> set[int]:
    # Functions capture a variable's handle, and not the variable.
    return {id((v if hasattr(v, "handle") else v.value).handle) for v in variables}


def _constants_of_replicated(tensors: Sequence[tf.Tensor], known: set[int]) -> str:
    """Returns a digest of the constants on which tensors depend, which ranks have to compare.

    Args:
      tensors: Terms that are no products.
      known: Ids of the handles of variables that have the same values on all ranks.

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
        # Reading a variable is stateful, too, but which one it is shows in its input, the handle.
        if unknown or (op.op_def.is_stateful and op.type != "ReadVariableOp"):
            raise NoFactorsError(
                f"a term that is no product depends on {op.name!r}, which may differ between ranks"
            )
        ahead.extend(t.op for t in op.inputs)
    constants = sorted(
        op.get_attr("value").SerializeToString() for op in seen.values() if op.type == "Const"
    )
    return hashlib.sha256(b"".join(constants)).hexdigest() if tensors else ""


def _captured(placeholder: tf.Tensor) -> Any:
    """Returns what a function's input stands for outside of all functions."""
    for outside, inside in getattr(placeholder.graph, "captures", ()):
        if inside is placeholder:
            # An eager tensor is outermost, and raises if it is asked for its op.
            nested = (
                not isinstance(outside, tf.__internal__.EagerTensor)
                and outside.op.type == "Placeholder"
            )
            return _captured(outside) if nested else outside
    return placeholder

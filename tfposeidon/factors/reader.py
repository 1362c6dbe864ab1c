"""Reads sufficient factors from the graph of a step, and agrees on them with other ranks.

If a kernel is multiplied with K rows, its gradient is `left^T right`, where `left` is K x M and
`right` is K x N. In graph mode, the gradient refers to the op that computes this product, and the
inputs of the op are the factors. TensorFlow prunes the op if it has no other use. Gradients are
sent as dense tensors if their factors are uncertain. A gradient is sent as factors only if all
ranks find factors of equal shape, and later traces must follow that agreement.

Source: Zhang et al. 2017 (Poseidon), section 2.1.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import tensorflow as tf

from tfposeidon.factors.pairs import (
    FactorPair,
    FactorShape,
    NoFactorsError,
    Rows,
    as_product,
    rows_of,
    shape_of,
)
from tfposeidon.gradients import Description, of_tensorflow

log = logging.getLogger("tfposeidon")


def factors_of(
    gradient: Any, shape: Sequence[int], dtype: str, replicated: Collection[Any]
) -> FactorPair:
    """Finds a gradient's factors and the sum of its other terms, or raises `NoFactorsError`."""
    if not isinstance(gradient, tf.Tensor) or not hasattr(gradient, "graph"):
        raise NoFactorsError("it is not a tensor of a graph")
    products, local_terms = _terms(gradient)
    if not products:
        kind = _source(gradient).type
        kind += ", such as one that XLA compiles" if kind.endswith("PartitionedCall") else ""
        raise NoFactorsError(f"it comes from {kind}, which is not a product of two matrices")
    products = [_of_width(product, shape) for product in products]
    (m, n), *others = {(p.left.shape[1], p.right.shape[1]) for p in products}
    if others or m is None or n is None or m * n != tf.TensorShape(shape).num_elements():
        raise NoFactorsError(
            "the shapes of its products are unknown, differ from each other, or do not match the "
            "variable's size"
        )
    constants = _constants_of_replicated(local_terms, replicated)
    # A sum of products is the product of the stacked factors, which need a common dtype.
    first, *more = {tensor.dtype for p in products for tensor in p.tensors}
    common = tf.float32 if more else first
    sides = [
        [tf.cast(matrix, common) for matrix in side]
        for side in zip(*(p.tensors for p in products), strict=True)
    ]
    left, right = (side[0] if len(side) == 1 else tf.concat(side, 0) for side in sides)
    parts = [tf.reshape(tf.cast(term, dtype), shape) for term in local_terms]
    return FactorPair(left, right, tf.add_n(parts) if parts else None, constants)


def _of_width(product: FactorPair, shape: Sequence[int]) -> FactorPair:
    """Sets widths that are unknown in the trace, as with tensordot; the step checks them."""
    if len(shape) != 2 or None not in (product.left.shape[1], product.right.shape[1]):
        return product
    pairs = zip(product.tensors, shape, strict=True)
    return FactorPair(*(tf.ensure_shape(t, [t.shape[0], width]) for t, width in pairs))


# ---------------------------------------------------------------------- terms


def _terms(tensor: tf.Tensor) -> tuple[list[FactorPair], list[tf.Tensor]]:
    """Returns the products and the other terms whose sum is the tensor, up to its shape."""
    op = _source(tensor)
    # Require equal shapes, because an Add may also broadcast.
    if op.type in ("AddN", "AddV2", "Add") and len({str(t.shape) for t in op.inputs}) == 1:
        products, others = zip(*map(_terms, op.inputs), strict=True)
        return [*itertools.chain(*products)], [*itertools.chain(*others)]
    product = _product(op)
    return ([product], []) if product else ([], [tensor])


def _source(tensor: tf.Tensor) -> tf.Operation:
    """Returns the op that computed a tensor, and skips ops that only change its dtype or shape."""
    op = tensor.op
    while op.type in ("Identity", "Reshape", "Cast", "ExpandDims", "Squeeze"):
        if op.type == "Cast" and not op.inputs[0].dtype.is_floating:
            break
        op = op.inputs[0].op
    return op


def _product(op: tf.Operation) -> FactorPair | None:
    if op.type == "MatMul":
        left, right = op.inputs
        return FactorPair(
            left if op.get_attr("transpose_a") else tf.transpose(left),
            tf.transpose(right) if op.get_attr("transpose_b") else right,
        )
    if op.type == "Transpose" and _permutation(op.inputs[1]) == [1, 0]:
        inner = _product(_source(op.inputs[0]))
        # Accept only a transposition of the product itself, because a reshape in between would swap
        # other axes.
        known = inner and [inner.left.shape[1], inner.right.shape[1]] == op.inputs[0].shape
        return replace(inner, left=inner.right, right=inner.left) if inner and known else None
    if op.type == "Sum":
        return _batched_product(op.inputs[0], op.inputs[1])
    return None


def _permutation(tensor: tf.Tensor) -> Any:
    # A permutation of two axes is its own inverse.
    return _value(tensor.op.inputs[0] if tensor.op.type == "InvertPermutation" else tensor)


def _batched_product(tensor: tf.Tensor, axes: tf.Tensor) -> FactorPair | None:
    """Reads the sum over a batch of products as one product with the rows of the whole batch."""
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
    return FactorPair(*(tf.reshape(t, [-1, t.shape[-1]]) for t in (left, right)))


def _is_over_batch(axes: tf.Tensor, rank: int | None) -> bool:
    """Returns whether a sum is over all dimensions of a batch of matrices."""
    if rank is None:
        return False
    # If a matrix multiplies a batch, TensorFlow sums its gradient over the dimensions that this op
    # computes from the shapes. The dimensions are all batch dimensions if the sum has no more
    # elements than one product, which `factors_of` checks.
    if axes.op.type == "BroadcastGradientArgs":
        sizes = [shape.shape[0] for shape in axes.op.inputs]
        return None not in sizes and max(sizes) == rank - 2
    value = _value(axes)
    return value is not None and sorted(axis % rank for axis in value) == list(range(rank - 2))


def _value(tensor: tf.Tensor) -> Any:
    value = tf.get_static_value(tensor)
    return None if value is None else value.reshape(-1).tolist()


# ---------------------------------------------------- terms equal on all ranks


def _constants_of_replicated(tensors: Sequence[tf.Tensor], replicated: Collection[Any]) -> str:
    """Returns a digest of the constants that tensors depend on; raises if ranks may differ."""
    # Functions capture a variable's handle, not the variable.
    known = {id(of_tensorflow(variable).handle) for variable in replicated}
    seen: dict[str, tf.Operation] = {}
    ahead = [tensor.op for tensor in tensors]
    while ahead:
        op = ahead.pop()
        if op.name in seen:
            continue
        seen[op.name] = op
        unknown = op.type == "Placeholder" and id(_captured(op.outputs[0])) not in known
        # Reading a variable is also stateful, but the handle in its inputs identifies the variable.
        if unknown or (op.op_def.is_stateful and op.type != "ReadVariableOp"):
            raise NoFactorsError(
                f"a term that is not a product depends on {op.name!r}, which may differ between "
                "ranks"
            )
        ahead.extend(t.op for t in op.inputs)
    constants = sorted(
        op.get_attr("value").SerializeToString() for op in seen.values() if op.type == "Const"
    )
    return hashlib.sha256(b"".join(constants)).hexdigest() if tensors else ""


def _captured(tensor: tf.Tensor) -> Any:
    """Returns the tensor that a function's input captures, resolved through nested functions."""
    # An eager tensor is outside of all functions, and access to its `op` raises an error.
    if isinstance(tensor, tf.__internal__.EagerTensor) or tensor.op.type != "Placeholder":
        return tensor
    captures = getattr(tensor.graph, "captures", ())
    outside = next((outside for outside, inside in captures if inside is tensor), None)
    return tensor if outside is None else _captured(outside)


class FactorReader:
    """`GradientReader` for sufficient factors; their size is the number of batch rows."""

    def find(
        self,
        gradients: Sequence[Any],
        descriptions: Sequence[Description],
        replicated: Collection[Any],
    ) -> list[dict[str, Any]]:
        """Returns `FactorShape` and digest of constants of each gradient, or `{"why_not": ...}`."""
        pairs = zip(gradients, descriptions, strict=True)
        found = [_factors_or_reason(g, d, replicated) for g, d in pairs]
        return [
            {"why_not": one}
            if isinstance(one, str)
            else {**asdict(one.shape), "constants": one.constants}
            for one in found
        ]

    def describe(
        self, descriptions: Sequence[Description], everybody: Sequence[Sequence[dict[str, Any]]]
    ) -> list[Description]:
        columns = zip(*everybody, strict=True)
        return [_described(d, found) for d, found in zip(descriptions, columns, strict=True)]

    def missing(self, scheme: str, description: Description) -> str:
        # Vectors, such as biases, never have factors.
        if len(description.shape) < 2:
            return ""
        return (
            f"{scheme!r} requires gradients that are products of two thin matrices, as for kernels "
            "of Dense, EinsumDense, MultiHeadAttention and Embedding outside loops. Received: "
            f"{description.path!r}, whose gradient has no factors, because "
            f'{description.why_no_structure}. Use "hybcomm", or rules that select another scheme '
            "for it."
        )

    def take(
        self,
        gradients: Sequence[Any],
        structured: Mapping[int, Description],
        replicated: Collection[Any],
    ) -> list[Any]:
        return [
            gradient
            if gradient is None or member not in structured
            else _taken(gradient, structured[member], replicated)
            for member, gradient in enumerate(gradients)
        ]

    def check_presence(
        self, structured: Mapping[int, Description], ranks: tf.Tensor, present: tf.Tensor
    ) -> None:
        # Each rank adds the regularizer's gradient, which it can read only from its own gradient.
        for member, description in structured.items():
            if shape_of(description).has_local:
                rule = (
                    "A regularized variable that is sent by factors must have a gradient on all "
                    f"ranks or on none. Received: {description.path!r}, with a gradient on some "
                    'ranks. Select another scheme for it by a rule, such as ("kernel", "ps").'
                )
                count = ranks[member]
                tf.debugging.Assert(tf.logical_or(count == 0.0, count == present), [rule])

    def sizes(
        self,
        gradients: Sequence[Any],
        descriptions: Sequence[Description],
        replicated: Collection[Any],
    ) -> tf.Tensor:
        """Returns each gradient's number of batch rows, even if it is sent dense; `[variables]`."""
        found = [
            "" if g is None or not d.structure else _factors_or_reason(g, d, replicated)
            for g, d in zip(gradients, descriptions, strict=True)
        ]
        rows = [0 if isinstance(one, str) else tf.shape(one.left)[0] for one in found]
        return tf.cast(tf.stack(rows), tf.float32)

    def artificial(self, description: Description, values: tf.Tensor) -> FactorPair:
        """Returns sufficient factors with the described batch rows, filled with `values[0]`."""
        shape = shape_of(description)
        count, value = round(shape.rows or 0), tf.cast(values[0], shape.dtype)
        right = tf.fill([count, shape.right], value)
        if shape.indexed:
            # Scatter the rows over the table, like the rows of tokens in a text.
            return Rows(tf.range(count) * 40_503 % shape.left, right, table=shape.left)
        return FactorPair(tf.fill([count, shape.left], value), right)


def _factors_or_reason(
    gradient: Any, description: Description, replicated: Collection[Any]
) -> FactorPair | str:
    try:
        if isinstance(gradient, tf.IndexedSlices):
            return rows_of(gradient, description.shape)
        return factors_of(gradient, description.shape, description.dtype, replicated)
    except NoFactorsError as error:
        return str(error)


def _described(description: Description, found: Sequence[dict[str, Any]]) -> Description:
    reasons = (f"{f['why_not']} (rank {rank})" for rank, f in enumerate(found) if "why_not" in f)
    why = next(reasons, "")
    if not why and any(one != found[0] for one in found):
        why = "its factors or the constants of its local term differ between ranks"
    if why:
        return replace(description, structure=None, why_no_structure=why)
    shape = {name: value for name, value in found[0].items() if name != "constants"}
    return replace(description, structure=FactorShape(**shape))


def _taken(gradient: Any, description: Description, replicated: Collection[Any]) -> FactorPair:
    """Reads factors of the agreed shape, or converts the matrix to such factors."""
    # A later trace on this rank may not contain the factors that other ranks expect. The product of
    # the matrix and a unit matrix then replaces them.
    agreed, found = shape_of(description), _factors_or_reason(gradient, description, replicated)
    if isinstance(found, FactorPair) and found.shape == agreed.sized(None):
        return found
    reason = found if isinstance(found, str) else f"its factors are {found.shape}, not {agreed}"
    # The matrix includes the regularizer's gradient, and all ranks would add it again.
    if agreed.has_local:
        raise ValueError(
            "A regularized variable must have factors in all traces of the step, or in none. "
            f"Received: {description.path!r}, changed since the first trace, because {reason}. "
            'Select another scheme for it by a rule, such as ("kernel", "ps").'
        )
    log.warning(
        "tfposeidon: %s is sent as a full matrix in this trace: %s.", description.path, reason
    )
    return as_product(gradient, agreed)

"""Reads sufficient factors from the graph of a step, and agrees on them with other ranks.

If a kernel is multiplied with K rows, its gradient is `left^T right`, where `left` is K x M and
`right` is K x N. In graph mode, the gradient refers to the op that multiplied them, whose inputs
are the factors. TensorFlow prunes the product itself if it has no other use. Gradients whose
factors cannot be identified with certainty are sent dense. A gradient is sent as factors only if
all ranks find factors of equal shape, and later traces must follow that agreement.

Source: Zhang et al. 2017 (Poseidon), section 2.1.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from tfposeidon.gradients import Description

log = logging.getLogger("tfposeidon")


LAYERS = "Dense, EinsumDense, MultiHeadAttention and Embedding, used outside loops"
"""Layers with kernels whose gradients have factors."""

Found = dict[str, Any]
"""Dictionary of a `FactorShape` and a digest of constants, or `{"why_not": text}`; for JSON."""


@dataclass(frozen=True)
class _Product:
    """Product `left^T right` of matrices `[K, M]` and `[K, N]`."""

    left: tf.Tensor
    right: tf.Tensor

    def of_width(self, shape: Sequence[int]) -> _Product:
        """Sets widths that only the step knows, as with tensordot, and checks them in the step."""
        if len(shape) != 2 or None not in (self.left.shape[1], self.right.shape[1]):
            return self
        pairs = zip((self.left, self.right), shape, strict=True)
        return _Product(
            *(tf.ensure_shape(tensor, [tensor.shape[0], width]) for tensor, width in pairs)
        )

    def cast(self, dtype: tf.DType) -> _Product:
        """Returns the product with both matrices in another dtype."""
        return _Product(tf.cast(self.left, dtype), tf.cast(self.right, dtype))


def factors_of(
    gradient: Any, shape: Sequence[int], dtype: str, replicated: Collection[Any]
) -> FactorPair:
    """Finds a gradient's factors: the stacked products, and the sum of all other terms in `dtype`.

    `replicated` are variables with the same values on all ranks. Raises `NoFactorsError` if there
    are no factors, or none that are certain.
    """
    if not isinstance(gradient, tf.Tensor) or not hasattr(gradient, "graph"):
        raise NoFactorsError("it is not a tensor of a graph")
    products, local_terms = _terms(gradient)
    if not products:
        raise NoFactorsError(
            f"it comes from {_source(gradient).type}, which is not a product of two matrices"
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
    """Concatenates rows, because a sum of products is the product of the stacked factors."""
    return matrices[0] if len(matrices) == 1 else tf.concat(matrices, 0)


# ---------------------------------------------------------------------- terms


def _terms(tensor: tf.Tensor) -> tuple[list[_Product], list[tf.Tensor]]:
    """Returns the products and other terms that sum to the tensor, up to its shape."""
    op = _source(tensor)
    # Require equal shapes, because an Add may also broadcast.
    if op.type in ("AddN", "AddV2", "Add") and len({str(t.shape) for t in op.inputs}) == 1:
        pairs = [_terms(term) for term in op.inputs]
        return [p for products, _ in pairs for p in products], [
            t for _, others in pairs for t in others
        ]
    product = _product(op)
    return ([product], []) if product else ([], [tensor])


def _source(tensor: tf.Tensor) -> tf.Operation:
    """Returns the op before all ops that only change dtype or shape."""
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
        # Accept only a transposition of the product itself: a reshape in between would swap other
        # axes.
        known = inner and [inner.left.shape[1], inner.right.shape[1]] == op.inputs[0].shape
        return replace(inner, left=inner.right, right=inner.left) if inner and known else None
    if op.type == "Sum":
        return _batched_product(op.inputs[0], op.inputs[1])
    return None


def _permutation(tensor: tf.Tensor) -> Any:
    # A permutation of two axes is its own inverse.
    return _value(tensor.op.inputs[0] if tensor.op.type == "InvertPermutation" else tensor)


def _batched_product(tensor: tf.Tensor, axes: tf.Tensor) -> _Product | None:
    """Reads a batch of products summed over the batch: one product with all elements' rows."""
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

    The gradient of a matrix that is multiplied with a batch is summed over the dimensions that
    `BroadcastGradientArgs` computes from the batch shapes. These are all batch dimensions if the
    sum has no more elements than one product, which `read` checks.
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


# ---------------------------------------------------- terms equal on all ranks


def _handles(variables: Collection[Any]) -> set[int]:
    # Functions capture a variable's handle, not the variable.
    return {id((v if hasattr(v, "handle") else v.value).handle) for v in variables}


def _constants_of_replicated(tensors: Sequence[tf.Tensor], known: set[int]) -> str:
    """Returns a digest of the constants behind tensors; raises if tensors may differ by rank."""
    seen: dict[str, tf.Operation] = {}
    ahead = [tensor.op for tensor in tensors]
    while ahead:
        op = ahead.pop()
        if op.name in seen:
            continue
        seen[op.name] = op
        unknown = op.type == "Placeholder" and id(_captured(op.outputs[0])) not in known
        # Reading a variable is also stateful, but the handle among its inputs identifies the
        # variable.
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


def _captured(placeholder: tf.Tensor) -> Any:
    """Returns the tensor outside of all functions that a function's input captures."""
    for outside, inside in getattr(placeholder.graph, "captures", ()):
        if inside is placeholder:
            # An eager tensor is outside of all functions, and raises on access to `op`.
            nested = (
                not isinstance(outside, tf.__internal__.EagerTensor)
                and outside.op.type == "Placeholder"
            )
            return _captured(outside) if nested else outside
    return placeholder


class FactorReader:
    """Finds the factors of gradients, as a `GradientReader`; their size is the number of rows."""

    def find(
        self,
        gradients: Sequence[Any],
        descriptions: Sequence[Description],
        replicated: Collection[Any],
    ) -> list[Found]:
        """Returns the shape of each gradient's factors, or why there are none, for JSON."""
        pairs = zip(gradients, descriptions, strict=True)
        return [_found(gradient, d, replicated) for gradient, d in pairs]

    def describe(
        self, descriptions: Sequence[Description], everybody: Sequence[Sequence[Found]]
    ) -> list[Description]:
        """Adds to descriptions the factors that all ranks found, or the first reason for none."""
        return [
            _described(description, [found[index] for found in everybody])
            for index, description in enumerate(descriptions)
        ]

    def missing(self, scheme: str, description: Description) -> str:
        """Returns the error if no gradient has factors; empty for vectors, such as biases."""
        if len(description.shape) < 2:
            return ""
        return (
            f"{scheme!r} requires gradients that are products of two thin matrices: those of "
            f"kernels of {LAYERS}. Received: none; the gradient of {description.path!r} has "
            f'no factors, because {description.why_no_structure}. Use "hybcomm", or rules that '
            "select another scheme for it."
        )

    def take(
        self,
        gradients: Sequence[Any],
        structured: Mapping[int, Description],
        replicated: Collection[Any],
    ) -> list[Any]:
        """Reads the factors of gradients that the plan exchanges as factors."""
        taken = list(gradients)
        for member, description in structured.items():
            if taken[member] is not None:
                taken[member] = _taken(taken[member], description, replicated)
        return taken

    def check_presence(
        self, structured: Mapping[int, Description], ranks: tf.Tensor, present: tf.Tensor
    ) -> None:
        """Makes a step fail if ranks disagree on whether a regularized variable has a gradient.

        Each rank adds the regularizer's gradient to the mean itself, which requires a gradient of
        its own.
        """
        for member, description in structured.items():
            shape = shape_of(description)
            if shape is not None and shape.has_local:
                rule = (
                    "A regularized variable that is sent by factors must have a gradient on all "
                    f"ranks or on none. Received: {description.path!r}, with a gradient on some "
                    "ranks. Select another scheme for it by a rule."
                )
                count = ranks[member]
                tf.debugging.Assert(tf.logical_or(count == 0.0, count == present), [rule])

    def sizes(
        self,
        gradients: Sequence[Any],
        descriptions: Sequence[Description],
        replicated: Collection[Any],
    ) -> tf.Tensor:
        """Returns the rows of each gradient's factors, even if sent dense; `[variables]`."""
        pairs = zip(gradients, descriptions, strict=True)
        return tf.stack([_row_count(gradient, d, replicated) for gradient, d in pairs])

    def artificial(self, description: Description, values: tf.Tensor) -> FactorPair:
        """Returns factors of the known number of rows, made of a vector of values."""
        shape = shape_of(description)
        assert shape is not None
        count = round(shape.rows or 0)
        right = tf.cast(_matrix(values, count, shape.right), shape.dtype)
        if shape.indexed:
            indices = tf.abs(_matrix(values, count, 1)[:, 0]) * shape.left / 10.0
            return Rows(tf.cast(indices, tf.int32) % shape.left, right, table=shape.left)
        return FactorPair(tf.cast(_matrix(values, count, shape.left), shape.dtype), right)


def _found(gradient: Any, description: Description, replicated: Collection[Any]) -> Found:
    try:
        factors = _read(gradient, description, replicated)
    except NoFactorsError as error:
        return {"why_not": str(error)}
    return {**asdict(factors.shape), "constants": factors.constants}


def _read(gradient: Any, description: Description, replicated: Collection[Any]) -> FactorPair:
    if isinstance(gradient, tf.IndexedSlices):
        return rows_of(gradient, description.shape)
    return factors_of(gradient, description.shape, description.dtype, replicated)


def _described(description: Description, found: Sequence[Found]) -> Description:
    why = next(
        (f"{one['why_not']} (rank {rank})" for rank, one in enumerate(found) if "why_not" in one),
        "",
    )
    if not why and any(one != found[0] for one in found):
        why = "its factors or the constants of its local term differ between ranks"
    if why:
        return replace(description, structure=None, why_no_structure=why)
    shape = {name: value for name, value in found[0].items() if name != "constants"}
    return replace(description, structure=FactorShape(**shape))


def _taken(gradient: Any, description: Description, replicated: Collection[Any]) -> FactorPair:
    """Reads factors of the agreed shape, or turns the matrix into such factors.

    A later trace of the step may not show the same factors, which other ranks cannot know. The
    product of the matrix with the unit matrix then takes their place. It raises for a regularized
    variable: other ranks add the regularizer's gradient themselves, and a matrix includes it
    inseparably.
    """
    agreed = shape_of(description)
    assert agreed is not None
    try:
        factors = _read(gradient, description, replicated)
    except NoFactorsError as error:
        reason = str(error)
    else:
        if factors.shape == agreed.sized(None):
            return factors
        reason = f"its factors are {factors.shape}, not {agreed}"
    if agreed.has_local:
        raise ValueError(
            "A regularized variable must have factors in all traces of the step, or in none. "
            f"Received: {description.path!r}, which had factors in the first trace: {reason}. "
            "Select another scheme for it by a rule."
        )
    log.warning(
        "tfposeidon: %s is sent as a full matrix in this trace: %s.", description.path, reason
    )
    return as_product(gradient, agreed)


def _row_count(gradient: Any, description: Description, replicated: Collection[Any]) -> tf.Tensor:
    if gradient is None or description.structure is None:
        return tf.zeros([])
    try:
        return tf.cast(tf.shape(_read(gradient, description, replicated).left)[0], tf.float32)
    except NoFactorsError:
        return tf.zeros([])


def _matrix(values: tf.Tensor, count: int, width: int) -> tf.Tensor:
    repeated = tf.tile(values, [max(1, -(-count * width // values.shape[0]))])
    return tf.reshape(repeated[: count * width], [count, width])

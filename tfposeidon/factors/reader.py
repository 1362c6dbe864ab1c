"""Sufficient factors that ranks find in their gradients at the first traced step, and agree on.

A gradient is sent as factors only if all ranks find factors of equal shape. Later traces must
follow that agreement.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfposeidon.factors import graph, rows
from tfposeidon.factors.pairs import FactorPair, FactorShape, NoFactorsError, shape_of
from tfposeidon.gradients.description import Description

log = logging.getLogger("tfposeidon")

Found = dict[str, Any]
"""Dictionary of a `FactorShape` and a digest of constants, or `{"why_not": text}`; for JSON."""


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
            f"kernels of {graph.LAYERS}. Received: none; the gradient of {description.path!r} has "
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
        return tf.stack([_rows(gradient, d, replicated) for gradient, d in pairs])

    def artificial(self, description: Description, values: tf.Tensor) -> FactorPair:
        """Returns factors of the known number of rows, made of a vector of values."""
        shape = shape_of(description)
        assert shape is not None
        count = round(shape.rows or 0)
        right = tf.cast(_matrix(values, count, shape.right), shape.dtype)
        if shape.indexed:
            indices = tf.abs(_matrix(values, count, 1)[:, 0]) * shape.left / 10.0
            return rows.Rows(tf.cast(indices, tf.int32) % shape.left, right, table=shape.left)
        return FactorPair(tf.cast(_matrix(values, count, shape.left), shape.dtype), right)


def _found(gradient: Any, description: Description, replicated: Collection[Any]) -> Found:
    try:
        factors = _read(gradient, description, replicated)
    except NoFactorsError as error:
        return {"why_not": str(error)}
    return {**dataclasses.asdict(factors.shape), "constants": factors.constants}


def _read(gradient: Any, description: Description, replicated: Collection[Any]) -> FactorPair:
    if isinstance(gradient, tf.IndexedSlices):
        return rows.read(gradient, description.shape)
    return graph.read(gradient, description.shape, description.dtype, replicated)


def _described(description: Description, found: Sequence[Found]) -> Description:
    why = next(
        (f"{one['why_not']} (rank {rank})" for rank, one in enumerate(found) if "why_not" in one),
        "",
    )
    if not why and any(one != found[0] for one in found):
        why = "its factors or the constants of its local term differ between ranks"
    if why:
        return dataclasses.replace(description, structure=None, why_no_structure=why)
    shape = {name: value for name, value in found[0].items() if name != "constants"}
    return dataclasses.replace(description, structure=FactorShape(**shape))


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
    return rows.as_product(gradient, agreed)


def _rows(gradient: Any, description: Description, replicated: Collection[Any]) -> tf.Tensor:
    if gradient is None or description.structure is None:
        return tf.zeros([])
    try:
        return tf.cast(tf.shape(_read(gradient, description, replicated).left)[0], tf.float32)
    except NoFactorsError:
        return tf.zeros([])


def _matrix(values: tf.Tensor, count: int, width: int) -> tf.Tensor:
    repeated = tf.tile(values, [max(1, -(-count * width // values.shape[0]))])
    return tf.reshape(repeated[: count * width], [count, width])

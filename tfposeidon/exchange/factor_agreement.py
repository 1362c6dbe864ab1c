"""Sufficient factors that ranks find in their gradients at the first traced step, and agree on.

A gradient is sent as factors only if all ranks find factors of equal shape. Later traces must
follow that agreement.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfposeidon.gradients import embedding_rows, sufficient_factors
from tfposeidon.gradients.description import Description
from tfposeidon.gradients.factors import FactorPair, FactorShape, NoFactorsError
from tfposeidon.planning.plan import Plan
from tfposeidon.policies import Policy

log = logging.getLogger("tfposeidon")

Found = dict[str, Any]
"""Dictionary of a `FactorShape` and a digest of constants, or `{"why_not": text}`; for JSON."""


def find_factors(
    gradients: Sequence[Any],
    descriptions: Sequence[Description],
    replicated: Collection[Any],
) -> list[Found]:
    """Returns the shape of each gradient's factors, or why there are none, for JSON."""
    return [_found(g, d, replicated) for g, d in zip(gradients, descriptions, strict=True)]


def _found(gradient: Any, description: Description, replicated: Collection[Any]) -> Found:
    try:
        factors = _read(gradient, description, replicated)
    except NoFactorsError as error:
        return {"why_not": str(error)}
    return {**dataclasses.asdict(factors.shape), "constants": factors.constants}


def _read(gradient: Any, description: Description, replicated: Collection[Any]) -> FactorPair:
    if isinstance(gradient, tf.IndexedSlices):
        return embedding_rows.read(gradient, description.shape)
    return sufficient_factors.read(gradient, description.shape, description.dtype, replicated)


def count_rows(
    gradients: Sequence[Any], descriptions: Sequence[Description], replicated: Collection[Any]
) -> tf.Tensor:
    """Returns the rows of each gradient's factors, even if sent dense; `[variables]` float32."""
    return tf.stack([_rows(g, d, replicated) for g, d in zip(gradients, descriptions, strict=True)])


def _rows(gradient: Any, description: Description, replicated: Collection[Any]) -> tf.Tensor:
    if gradient is None or description.factors is None:
        return tf.zeros([])
    try:
        return tf.cast(tf.shape(_read(gradient, description, replicated).left)[0], tf.float32)
    except NoFactorsError:
        return tf.zeros([])


def merge_findings(
    descriptions: Sequence[Description], everybody: Sequence[Sequence[Found]]
) -> list[Description]:
    """Adds to descriptions the factors that all ranks found, or the first reason for none."""
    return [
        dataclasses.replace(description, **_merged([found[index] for found in everybody]))
        for index, description in enumerate(descriptions)
    ]


def _merged(found: Sequence[Found]) -> dict[str, Any]:
    why = next(
        (f"{one['why_not']} (rank {rank})" for rank, one in enumerate(found) if "why_not" in one),
        "",
    )
    if not why and any(one != found[0] for one in found):
        why = "its factors have other shapes, or its local term other constants, on different ranks"
    if why:
        return {"factors": None, "why_no_factors": why}
    return {
        "factors": FactorShape(
            **{name: value for name, value in found[0].items() if name != "constants"}
        )
    }


def check_any_factors(plan: Plan, policy: Policy) -> None:
    """Refuses a scheme that needs factors if no variable has any.

    If some variables have factors, the others use all-reduce.
    """
    if any(bucket.takes_factors for bucket in plan.buckets):
        return
    # Skip vectors such as biases: their gradients are not expected to be products.
    for description in (
        d for bucket in plan.buckets for d in bucket.descriptions if len(d.shape) > 1
    ):
        scheme = policy.choose(description, plan.topology).scheme
        if scheme.needs_factors:
            raise ValueError(
                f"{scheme.name!r} needs gradients that are a product of two thin matrices: those "
                f"of kernels of {sufficient_factors.LAYERS}. Received: none; that of "
                f"{description.path!r} has no factors, because {description.why_no_factors}. Use "
                '"hybcomm", or rules that give it another scheme.'
            )


def extract_factors(gradients: Sequence[Any], plan: Plan, replicated: Collection[Any]) -> list[Any]:
    """Reads the factors of gradients that the plan exchanges as factors.

    A later trace of the step may not show the same factors. Such a gradient stays a matrix, which
    `convert_to_factors` turns into factors before it is sent. Raises for a regularized variable:
    other ranks add the regularizer's gradient themselves, and a matrix includes it inseparably.
    """
    extracted = list(gradients)
    for member, description in _by_factors(plan):
        if extracted[member] is None:
            continue
        agreed = description.factors
        assert agreed is not None
        try:
            factors = _read(extracted[member], description, replicated)
            same = factors.shape == agreed
            reason = "" if same else f"its factors are {factors.shape}, not {agreed}"
        except NoFactorsError as error:
            reason = str(error)
        if reason and agreed.has_local:
            raise ValueError(
                "A variable that is regularised must have factors in all traces of the step, or "
                f"in none. Received: {description.path!r}, which had them in the first: {reason}. "
                "Give it another scheme by a rule."
            )
        if reason:
            log.warning(
                "tfposeidon: %s goes as a whole matrix in this trace: %s.", description.path, reason
            )
        else:
            extracted[member] = factors
    return extracted


def convert_to_factors(gradients: Sequence[Any], plan: Plan) -> list[Any]:
    """Turns matrices into factors if the plan exchanges factors.

    A matrix is its product with the unit matrix. Every rank thus sends factors as the
    others expect, although they cannot know this rank's trace.
    """
    planned = list(gradients)
    for member, description in _by_factors(plan):
        if planned[member] is not None and not isinstance(planned[member], FactorPair):
            assert description.factors is not None
            planned[member] = embedding_rows.as_product(planned[member], description.factors)
    return planned


def _by_factors(plan: Plan) -> Iterator[tuple[int, Description]]:
    """Yields the index and description of each variable that is exchanged as factors."""
    for bucket in plan.buckets:
        for member, description in zip(bucket.members, bucket.descriptions, strict=True):
            if bucket.takes_factors and description.factors is not None:
                yield member, description

"""What ranks find out about the factors of their gradients at the first traced step, and agree on."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfposeidon.gradients import embedding_rows, sufficient_factors
from tfposeidon.gradients.description import Description
from tfposeidon.gradients.factors import Factors, FactorShape, NoFactorsError
from tfposeidon.planning.plan import Plan
from tfposeidon.policies import Policy

log = logging.getLogger("tfposeidon")

Found = dict[str, Any]
"""A `FactorShape` as it travels between ranks, with a digest of constants, or `{"why_not": text}`."""


def find_factors(
    gradients: Sequence[Any],
    descriptions: Sequence[Description],
    replicated: Collection[Any],
) -> list[Found]:
    """Which gradients of this rank are products of two thin matrices.

    Args:
      gradients: As they come from the tape.
      replicated: Variables with the same values on all ranks.
    """
    return [_found(g, d, replicated) for g, d in zip(gradients, descriptions, strict=True)]


def _found(gradient: Any, description: Description, replicated: Collection[Any]) -> Found:
    try:
        factors = _read(gradient, description, replicated)
    except NoFactorsError as error:
        return {"why_not": str(error)}
    return {**dataclasses.asdict(factors.shape), "constants": factors.constants}


def _read(gradient: Any, description: Description, replicated: Collection[Any]) -> Factors:
    if isinstance(gradient, tf.IndexedSlices):
        return embedding_rows.read(gradient, description.shape)
    return sufficient_factors.read(gradient, description.shape, description.dtype, replicated)


def merge_findings(
    descriptions: Sequence[Description], everybody: Sequence[Sequence[Found]]
) -> list[Description]:
    """Descriptions with the factors that all ranks have."""
    return [
        dataclasses.replace(description, **_merged([found[place] for found in everybody]))
        for place, description in enumerate(descriptions)
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
    """Refuses a scheme that needs factors where no variable has any; single ones without go by all-reduce.

    Args:
      plan: With what ranks have agreed on.
      policy: By which it was made.

    Raises:
      ValueError: Naming a variable, why it has none, and what would.
    """
    if any(bucket.takes_factors for bucket in plan.buckets):
        return
    for description in (
        d for bucket in plan.buckets for d in bucket.descriptions if len(d.shape) > 1
    ):
        scheme = policy.choose(description, plan.topology).scheme
        if scheme.needs_factors:
            raise ValueError(
                f"{scheme.name!r} needs gradients that are a product of two thin matrices: those of kernels of "
                f"{sufficient_factors.LAYERS}. Received: none; that of {description.path!r} is no product, because "
                f'{description.why_no_factors}. Use "hybcomm", or rules that give it another scheme.'
            )


def extract_factors(gradients: Sequence[Any], plan: Plan, replicated: Collection[Any]) -> list[Any]:
    """Gradients with `Factors` in the place of those that are to go by them, if this trace shows them.

    Raises:
      ValueError: If peers add a regulariser's part by themselves, which cannot be told from the rest of that matrix.
    """
    extracted = list(gradients)
    for member, description in _by_factors(plan):
        if extracted[member] is None:
            continue
        agreed = description.factors
        assert agreed is not None
        try:
            factors = _read(extracted[member], description, replicated)
            reason = (
                "" if factors.shape == agreed else f"its factors are {factors.shape}, not {agreed}"
            )
        except NoFactorsError as error:
            reason = str(error)
        if reason and agreed.has_local:
            raise ValueError(
                f"A variable that is regularised must have factors in all traces of the step, or in none. Received: "
                f"{description.path!r}, which had them in the first: {reason}. Give it another scheme by a rule."
            )
        if reason:
            log.warning(
                "tfposeidon: %s goes as a whole matrix in this trace: %s.", description.path, reason
            )
        else:
            extracted[member] = factors
    return extracted


def convert_to_factors(gradients: Sequence[Any], plan: Plan) -> list[Any]:
    """Gradients with matrices as `Factors`, too, where they are to go by them: times the unit matrix.

    Peers cannot know of another trace, and need not.
    """
    planned = list(gradients)
    for member, description in _by_factors(plan):
        if planned[member] is not None and not isinstance(planned[member], Factors):
            assert description.factors is not None
            planned[member] = embedding_rows.as_product(planned[member], description.factors)
    return planned


def _by_factors(plan: Plan) -> Iterator[tuple[int, Description]]:
    """Variables that are to go by factors, and their places."""
    for bucket in plan.buckets:
        for member, description in zip(bucket.members, bucket.descriptions, strict=True):
            if bucket.takes_factors and description.factors is not None:
                yield member, description

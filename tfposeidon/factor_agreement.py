"""What ranks find out about the factors of their gradients at the first traced step, and agree on."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from tfposeidon import sufficient_factors
from tfposeidon.coordinator import Plan
from tfposeidon.gradient import Description
from tfposeidon.schemes import FactorScheme
from tfposeidon.sufficient_factors import Factors, FactorShape, NoFactorsError

Found = dict[str, Any]
"""A `FactorShape` as it travels between ranks, or `{"why_not": text}`."""


def find(
    gradients: Sequence[Any],
    descriptions: Sequence[Description],
    replicated: Collection[Any],
    batch_size: int | None,
    accumulated: bool,
) -> list[Found]:
    """Which gradients of this rank are products of two thin matrices.

    Args:
      gradients: As they come from the tape.
      replicated: Variables with the same values on all ranks.
      batch_size: Samples of a step, where shapes do not tell; `None` if nobody knows.
      accumulated: Whether what is exchanged are sums over several steps.
    """
    if accumulated:
        return [{"why_not": "gradients are accumulated over steps"}] * len(descriptions)
    return [_found(g, d, replicated, batch_size) for g, d in zip(gradients, descriptions, strict=True)]


def _found(gradient: Any, description: Description, replicated: Collection[Any], batch_size: int | None) -> Found:
    try:
        factors = sufficient_factors.read(gradient, description.shape, description.dtype, replicated)
    except NoFactorsError as error:
        return {"why_not": str(error)}
    return dataclasses.asdict(FactorShape(_rows(factors, batch_size), *factors.widths, dtype=factors.left.dtype.name))


def _rows(factors: Factors, batch_size: int | None) -> int | None:
    if factors.left.shape[0] is not None:
        return int(factors.left.shape[0])
    per_sample = sufficient_factors.rows_per_sample(factors.left)
    return per_sample * batch_size if per_sample and batch_size else None


def agreed(descriptions: Sequence[Description], everybody: Sequence[Sequence[Found]]) -> list[Description]:
    """Descriptions with the factors that all ranks have; where numbers of rows differ, the largest counts."""
    return [
        dataclasses.replace(description, **_merged([found[place] for found in everybody]))
        for place, description in enumerate(descriptions)
    ]


def _merged(found: Sequence[Found]) -> dict[str, Any]:
    why = next((f"{one['why_not']} (rank {rank})" for rank, one in enumerate(found) if "why_not" in one), "")
    if not why and any({**one, "rows": 0} != {**found[0], "rows": 0} for one in found):
        why = "its factors have different shapes on different ranks"
    if why:
        return {"factors": None, "why_no_factors": why}
    rows = [one["rows"] for one in found]
    return {"factors": FactorShape(**found[0] | {"rows": None if None in rows else max(rows)})}


def check(plan: Plan) -> None:
    """Refuses schemes that need factors where there are none.

    Raises:
      ValueError: Naming the variable, why it has none, and what would.
    """
    for bucket in plan.buckets:
        description = bucket.descriptions[0]
        if isinstance(bucket.scheme, FactorScheme) and description.factors is None:
            raise ValueError(
                f"{bucket.scheme.name!r} needs gradients that are a product of two thin matrices: those of kernels of "
                f"{sufficient_factors.LAYERS}. Received: {description.path!r}: {description.why_no_factors}. "
                'Use "hybcomm", or rules that give it another scheme.'
            )


def taken(gradients: Sequence[Any], plan: Plan, replicated: Collection[Any]) -> list[Any]:
    """Gradients with `Factors` in the place of those that go by a `FactorScheme`."""
    taken = list(gradients)
    for bucket in plan.buckets:
        if isinstance(bucket.scheme, FactorScheme) and taken[bucket.members[0]] is not None:
            description = bucket.descriptions[0]
            gradient = taken[bucket.members[0]]
            taken[bucket.members[0]] = sufficient_factors.read(
                gradient, description.shape, description.dtype, replicated
            )
    return taken

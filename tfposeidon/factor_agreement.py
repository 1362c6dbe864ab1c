"""What ranks find out about the factors of their gradients at the first traced step, and agree on."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from tfposeidon import embedding_rows, sufficient_factors
from tfposeidon.coordinator import Plan
from tfposeidon.gradient import Description
from tfposeidon.schemes import FactorScheme
from tfposeidon.sufficient_factors import Factors, FactorShape, NoFactorsError

log = logging.getLogger("tfposeidon")

Found = dict[str, Any]
"""A `FactorShape` as it travels between ranks, with a digest of constants, or `{"why_not": text}`."""


def find(
    gradients: Sequence[Any],
    descriptions: Sequence[Description],
    replicated: Collection[Any],
    batch_size: int | None,
    steps: int = 1,
) -> list[Found]:
    """Which gradients of this rank are products of two thin matrices.

    Args:
      gradients: As they come from the tape.
      replicated: Variables with the same values on all ranks.
      batch_size: Samples of a step, where shapes do not tell; `None` if nobody knows.
      steps: How many of them each exchange serves.
    """
    return [_found(g, d, replicated, batch_size, steps) for g, d in zip(gradients, descriptions, strict=True)]


def _found(
    gradient: Any, description: Description, replicated: Collection[Any], batch_size: int | None, steps: int
) -> Found:
    try:
        factors = _read(gradient, description, replicated)
    except NoFactorsError as error:
        return {"why_not": str(error)}
    rows = _rows(factors, batch_size)
    found = dataclasses.replace(factors.shape, rows=rows and rows * steps)
    return {**dataclasses.asdict(found), "constants": factors.constants}


def _read(gradient: Any, description: Description, replicated: Collection[Any]) -> Factors:
    if isinstance(gradient, tf.IndexedSlices):
        return embedding_rows.read(gradient, description.shape)
    return sufficient_factors.read(gradient, description.shape, description.dtype, replicated)


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
        why = "its factors have other shapes, or its local term other constants, on different ranks"
    if why:
        return {"factors": None, "why_no_factors": why}
    rows = [one["rows"] for one in found]
    shape = {name: value for name, value in found[0].items() if name != "constants"}
    return {"factors": FactorShape(**shape | {"rows": None if None in rows else max(rows)})}


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
    """Gradients with `Factors` in the place of those that go by a `FactorScheme`, if this trace shows them.

    Raises:
      ValueError: If peers add a regulariser's part by themselves, which cannot be told from the rest of that matrix.
    """
    taken = list(gradients)
    for bucket in plan.buckets:
        (member, *_), description = bucket.members, bucket.descriptions[0]
        if not isinstance(bucket.scheme, FactorScheme) or taken[member] is None or description.factors is None:
            continue
        agreed = dataclasses.replace(description.factors, rows=None)
        try:
            factors = _read(taken[member], description, replicated)
            reason = "" if factors.shape == agreed else f"its factors are {factors.shape}, not {agreed}"
        except NoFactorsError as error:
            reason = str(error)
        if reason and agreed.has_local:
            raise ValueError(
                f"A variable that is regularised must have factors in all traces of the step, or in none. Received: "
                f"{description.path!r}, which had them in the first: {reason}. Give it another scheme by a rule."
            )
        if reason:
            log.warning("tfposeidon: %s goes as a whole matrix in this trace: %s.", description.path, reason)
        else:
            taken[member] = factors
    return taken


def as_planned(gradients: Sequence[Any], plan: Plan) -> list[Any]:
    """Gradients with matrices as `Factors`, too, where they go by a `FactorScheme`: times the unit matrix.

    Peers cannot know of another trace, and need not.
    """
    planned = list(gradients)
    for bucket in plan.buckets:
        (member, *_), factors = bucket.members, bucket.descriptions[0].factors
        if not isinstance(bucket.scheme, FactorScheme) or factors is None:
            continue
        if planned[member] is not None and not isinstance(planned[member], Factors):
            planned[member] = embedding_rows.as_product(planned[member], factors)
    return planned

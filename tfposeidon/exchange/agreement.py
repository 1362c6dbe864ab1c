"""Ranks make sure that they speak of the same variables, and say where the first difference is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfposeidon.gradients.description import Description

REMEDY = "Build the same model, with the same names, and the same optimizer on every rank."


def as_json(descriptions: Sequence[Description]) -> list[list[Any]]:
    """Descriptions as they travel between ranks and lie in checkpoints."""
    return [[d.path, list(d.shape), d.dtype] for d in descriptions]


def check_same_variables(everybody: Sequence[list[list[Any]]]) -> None:
    """Compares what each rank sent, made by `as_json`, with what rank 0 did.

    Raises:
      RuntimeError: Naming the first variable that differs, and on which rank.
    """
    for rank, other in enumerate(everybody):
        difference = first_difference(everybody[0], other)
        if difference:
            place, a, b = difference
            raise RuntimeError(
                f"All ranks must train the same variables. The first difference is variable {place}: {a} on rank 0, "
                f"{b} on rank {rank}. {REMEDY}"
            )


def first_difference(a: list[list[Any]], b: list[list[Any]]) -> tuple[int, str, str] | None:
    """Place and readable content where two lists part, or `None`."""
    if a == b:
        return None
    place = next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    return place, _readable(a, place), _readable(b, place)


def _readable(variables: list[list[Any]], place: int) -> str:
    if place >= len(variables):
        return f"none (there are {len(variables)})"
    path, shape, dtype = variables[place]
    return f"{path!r} {tuple(shape)} {dtype}"

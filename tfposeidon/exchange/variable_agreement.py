"""The check that all ranks mean the same variables, and lists of variables as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfposeidon.communication import agreement
from tfposeidon.gradients.description import Description

REMEDY = "Build the same model, with the same names, and the same optimizer on every rank."


def as_json(descriptions: Sequence[Description]) -> list[list[Any]]:
    """Returns descriptions as they travel between ranks and lie in checkpoints.

    Args:
      descriptions: Descriptions of gradients, one for each variable.

    Returns:
      `[path, shape, dtype]` for each of them.
    """
    return [[d.path, list(d.shape), d.dtype] for d in descriptions]


def check_same_variables(received: Sequence[list[list[Any]]]) -> None:
    """Raises an error if ranks have other variables, or another order of them.

    Args:
      received: Result of `as_json` on each rank, by rank.

    Raises:
      RuntimeError: On all ranks alike, naming the first variable that differs, and on which rank.
    """
    agreement.require_equal(
        received,
        "All ranks must train the same variables",
        REMEDY,
        agreement.at_first_item("variable", _readable),
    )


def first_difference(first: list[list[Any]], other: list[list[Any]]) -> tuple[int, str, str] | None:
    """Returns the first index at which two lists of variables differ, and texts of both.

    Args:
      first: Result of `as_json`.
      other: Result of `as_json`.

    Returns:
      The index, and texts for the variables there in `first` and in `other`; `None` if the lists
      are equal.
    """
    return None if first == other else agreement.first_difference(first, other, _readable)


def _readable(variable: list[Any]) -> str:
    path, shape, dtype = variable
    return f"{path!r} {tuple(shape)} {dtype}"

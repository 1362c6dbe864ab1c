"""The check that all ranks mean the same variables, and lists of variables as JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tfposeidon.communication import agreement
from tfposeidon.gradients.description import Description

REMEDY = "Build the same model and the same optimizer on every rank."


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
        [_renamed(received[0], other) for other in received],
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
    other = _renamed(first, other)
    return None if first == other else agreement.first_difference(first, other, _readable)


def is_same_path(first: str, other: str) -> bool:
    """Returns whether two paths may be of the same variable, in models that were made twice.

    Names that Keras generates have numbers, which depend on what the process has made before; and a
    variable that was made before its model lacks the name of that.

    >>> is_same_path("dense/kernel", "sequential_3/dense_1/kernel")
    True
    >>> is_same_path("dense/kernel", "dense/bias")
    False
    """
    one, two = _without_numbers(first), _without_numbers(other)
    return one.endswith(two) or two.endswith(one)


def _without_numbers(path: str) -> str:
    """A path without its outermost name and generated numbers."""
    return re.sub(r"_\d+(?=_|/|$)", "", path.partition("/")[2] or path)


def _renamed(first: list[list[Any]], other: list[list[Any]]) -> list[list[Any]]:
    """The second list by the paths of the first, where these are of the same variables."""
    names = [path for path, _, _ in first]
    return [
        [name if name and is_same_path(name, path) else path, shape, dtype]
        for name, (path, shape, dtype) in zip([*names, *[""] * len(other)], other, strict=False)
    ]


def _readable(variable: list[Any]) -> str:
    path, shape, dtype = variable
    return f"{path!r} {tuple(shape)} {dtype}"

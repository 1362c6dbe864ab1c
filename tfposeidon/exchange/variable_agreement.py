"""Checks that all ranks have the same variables, and converts lists of variables to JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tfposeidon.communication import agreement
from tfposeidon.gradients.description import Description

REMEDY = "Build the same model and the same optimizer on every rank."


def as_json(descriptions: Sequence[Description]) -> list[list[Any]]:
    """Returns `[path, shape, dtype]` of each description, for other ranks and checkpoints."""
    return [[d.path, list(d.shape), d.dtype] for d in descriptions]


def check_same_variables(received: Sequence[list[list[Any]]]) -> None:
    """Raises on all ranks, with the first difference, if variables or their order differ."""
    agreement.require_equal(
        [_renamed(received[0], other) for other in received],
        "All ranks must train the same variables",
        REMEDY,
        agreement.at_first_item("variable", _readable),
    )


def first_difference(first: list[list[Any]], other: list[list[Any]]) -> tuple[int, str, str] | None:
    """Returns the index and texts of the first variable that differs; `None` if all are equal."""
    other = _renamed(first, other)
    return None if first == other else agreement.first_difference(first, other, _readable)


def is_same_path(first: str, other: str) -> bool:
    """Returns whether two paths may be of one variable, in two instances of a model.

    Keras generates names with numbers, which depend on earlier layers of the process. The path of a
    variable that was created before its model lacks the model's name.

    >>> is_same_path("dense/kernel", "sequential_3/dense_1/kernel")
    True
    >>> is_same_path("dense/kernel", "dense/bias")
    False
    """
    one, two = _without_numbers(first), _without_numbers(other)
    return one.endswith(two) or two.endswith(one)


def _without_numbers(path: str) -> str:
    """Returns a path without its outermost name and generated numbers."""
    return re.sub(r"_\d+(?=_|/|$)", "", path.partition("/")[2] or path)


def _renamed(first: list[list[Any]], other: list[list[Any]]) -> list[list[Any]]:
    """Returns `other` with the paths of `first` for variables that may be the same."""
    names = [path for path, _, _ in first]
    return [
        [name if name and is_same_path(name, path) else path, shape, dtype]
        for name, (path, shape, dtype) in zip([*names, *[""] * len(other)], other, strict=False)
    ]


def _readable(variable: list[Any]) -> str:
    path, shape, dtype = variable
    return f"{path!r} {tuple(shape)} {dtype}"

"""Checks arguments, and values that must be equal on all ranks.

Errors state the rule, the received value and the remedy. Ranks exchange values with
`wire.exchange_objects`, and each rank compares all of them. All ranks receive the same values and
raise the same error, so no rank waits for others in its next collective.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Show = Callable[[Any, Any], tuple[str, str]]
"""Function that formats two different values as strings, in full or only where they differ."""


# ------------------------------------------------------------------ arguments


class Range(NamedTuple):
    """Allowed numbers.

    `rule` completes the sentence "`x` must be ..."; `holds` tests whether a finite number is
    allowed.
    """

    rule: str
    holds: Callable[[float], bool]


NOT_NEGATIVE = Range("a finite number >= 0", lambda value: value >= 0.0)
POSITIVE = Range("a finite number > 0", lambda value: value > 0.0)
AT_LEAST_1 = Range("a finite number >= 1", lambda value: value >= 1.0)
BELOW_1 = Range("a number in [0, 1)", lambda value: 0.0 <= value < 1.0)
FRACTION = Range("a number in (0, 1]", lambda value: 0.0 < value <= 1.0)


def check_number(name: str, value: Any, allowed: Range, remedy: str = "") -> float:
    """Returns `value` as a float, or raises `ValueError` if it is not a number in the range."""
    # In Python a bool is a number, but a bool as a numeric argument is a mistake.
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not allowed.holds(value):
        raise ValueError(_message(name, value, allowed.rule, remedy))
    return float(value)


def check_integer(name: str, value: Any, least: int, remedy: str = "") -> int:
    """Returns `value` as an int, or raises `ValueError` if it is not an integer >= `least`."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        raise ValueError(_message(name, value, f"an integer >= {least}", remedy))
    return int(value)


def check_flag(name: str, value: Any, remedy: str = "") -> bool:
    """Returns `value`, or raises `ValueError` if it is not a bool."""
    if not isinstance(value, bool):
        raise ValueError(_message(name, value, "True or False", remedy))
    return value


def _message(name: str, value: Any, rule: str, remedy: str) -> str:
    return f"`{name}` must be {rule}. Received: {name}={value!r}. {remedy}".rstrip()


# ------------------------------------------------------------------ values of all ranks


def in_full(first: Any, other: Any) -> tuple[str, str]:
    """Returns both values as text."""
    return repr(first), repr(other)


def at_first_item(noun: str, show: Callable[[Any], str] = str) -> Show:
    """Returns a function that shows the first items at which two lists differ."""

    def shown(first: Sequence[Any], other: Sequence[Any]) -> tuple[str, str]:
        index, here, there = first_difference(first, other, show)
        return f"first difference at {noun} {index}: {here}", there

    return shown


def at_first_entry(show: Show = in_full) -> Show:
    """Returns a function that shows the first entries at which two dictionaries differ."""

    def shown(first: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, str]:
        name = next(
            name
            for name in dict.fromkeys([*first, *other])
            # A missing name differs from a name with the value None.
            if (name in first, first.get(name)) != (name in other, other.get(name))
        )
        here, there = show(first.get(name), other.get(name))
        return f"{name} {here if name in first else 'none'}", there if name in other else "none"

    return shown


def require_equal(
    received: Sequence[Any] | Mapping[int, Any],
    rule: str,
    remedy: str,
    show: Show = in_full,
    error: type[Exception] = RuntimeError,
) -> None:
    """Raises an error if the values that ranks sent differ.

    `received` holds the values of all ranks, or maps some ranks to their values. All ranks raise
    the error if all pass the same `received`.
    """
    values = received if isinstance(received, Mapping) else dict(enumerate(received))
    lowest = min(values)
    for rank, value in values.items():
        if value != values[lowest]:
            here, there = show(values[lowest], value)
            raise error(
                f"{rule}. Received: {here} on rank {lowest}, {there} on rank {rank}. {remedy}"
            )


def different_ranks(received: Sequence[Any]) -> list[int]:
    """Returns the ranks whose values differ from the value of rank 0."""
    return [rank for rank, value in enumerate(received) if value != received[0]]


def first_difference(
    first: Sequence[Any], other: Sequence[Any], show: Callable[[Any], str] = str
) -> tuple[int, str, str]:
    """Returns the first index at which two lists differ, and both items there as strings."""
    pairs = enumerate(zip(first, other, strict=False))
    shorter = min(len(first), len(other))
    index = next((index for index, (a, b) in pairs if a != b), shorter)
    here, there = (
        show(items[index]) if index < len(items) else f"none (there are {len(items)})"
        for items in (first, other)
    )
    return index, here, there

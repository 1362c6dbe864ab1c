"""Comparison of values that must be equal on all ranks, and the error if they differ.

Ranks exchange values with `wire.exchange_objects`, and each rank compares all of them. All ranks
receive the same values and raise the same error, so none is left waiting in its next collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Show = Callable[[Any, Any], tuple[str, str]]
"""Function from two different values to a text for each, in full or only where they differ."""

_MISSING = object()


def in_full(first: Any, other: Any) -> tuple[str, str]:
    """Returns both values as text."""
    return repr(first), repr(other)


def at_first_item(noun: str, show: Callable[[Any], str] = str) -> Show:
    """Returns a function that shows the first different items of two lists."""

    def shown(first: Sequence[Any], other: Sequence[Any]) -> tuple[str, str]:
        index, here, there = first_difference(first, other, show)
        return f"first difference at {noun} {index}: {here}", there

    return shown


def at_first_entry(show: Show = in_full) -> Show:
    """Returns a function that shows the first different entries of two dictionaries."""

    def shown(first: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, str]:
        # A missing name is a difference even if the other value is None.
        name = next(
            name
            for name in dict.fromkeys([*first, *other])
            if first.get(name, _MISSING) != other.get(name, _MISSING)
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
    """Raises an error on all ranks if they sent different values; only some need to send one.

    >>> require_equal([1, 1, 2], "All ranks must use one rate", "Set it on all.")
    Traceback (most recent call last):
    RuntimeError: All ranks must use one rate. Received: 1 on rank 0, 2 on rank 2. Set it on all.
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
    """Returns the ranks whose value differs from that of rank 0.

    >>> different_ranks(["a", "a", "b"])
    [2]
    """
    return [rank for rank, value in enumerate(received) if value != received[0]]


def first_difference(
    first: Sequence[Any], other: Sequence[Any], show: Callable[[Any], str] = str
) -> tuple[int, str, str]:
    """Returns the first index at which two lists differ, and texts of their items there.

    >>> first_difference(["a", "b"], ["a"])
    (1, 'b', 'none (there are 1)')
    """
    pairs = enumerate(zip(first, other, strict=False))
    shorter = min(len(first), len(other))
    index = next((index for index, (a, b) in pairs if a != b), shorter)
    here, there = (
        show(items[index]) if index < len(items) else f"none (there are {len(items)})"
        for items in (first, other)
    )
    return index, here, there

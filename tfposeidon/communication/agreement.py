"""The check of what must be equal on all ranks, and its message.

Ranks send what they hold with `wire.exchange_objects`, and each of them checks what it has
received. All receive the same, so all raise the same error: none is left waiting for the others in
its next collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Show = Callable[[Any, Any], tuple[str, str]]
"""Function from two values that differ to a text for each: all of it, or the part that differs."""

_MISSING = object()


def in_full(first: Any, other: Any) -> tuple[str, str]:
    """Returns all of both values as text.

    Args:
      first: Value of the first rank.
      other: Value of another rank.
    """
    return repr(first), repr(other)


def at_first_item(noun: str, show: Callable[[Any], str] = str) -> Show:
    """Returns a function that shows the first items in which two lists differ.

    Args:
      noun: Word for an item, such as "variable".
      show: Function from an item to its text.
    """

    def shown(first: Sequence[Any], other: Sequence[Any]) -> tuple[str, str]:
        index, here, there = first_difference(first, other, show)
        return f"first difference at {noun} {index}: {here}", there

    return shown


def at_first_entry(show: Show = in_full) -> Show:
    """Returns a function that shows the first entries in which two dictionaries differ.

    Args:
      show: Function from the two values to their texts.
    """

    def shown(first: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, str]:
        # A name that one of them lacks is a difference, also where the other has None.
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
    """Raises an error if the ranks have sent different values.

    Args:
      received: Value of each rank, by rank; a mapping where only some have sent one.
      rule: Sentence "All ranks must ...", without its full stop.
      remedy: Sentence that tells what to do about it.
      show: Function from the first rank's value and another to their texts.
      error: Type of the error.

    Raises:
      RuntimeError: Or `error`, if values differ. It names the first rank whose value is another
        than that of the lowest rank, and shows both.

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
    """Returns the ranks that have sent something else than rank 0.

    Args:
      received: Value of each rank, by rank.

    >>> different_ranks(["a", "a", "b"])
    [2]
    """
    return [rank for rank, value in enumerate(received) if value != received[0]]


def first_difference(
    first: Sequence[Any], other: Sequence[Any], show: Callable[[Any], str] = str
) -> tuple[int, str, str]:
    """Returns the first index at which two lists differ, and texts for their items there.

    Args:
      first: List of the first rank.
      other: List of another rank, which is not equal to `first`.
      show: Function from an item to its text.

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

"""Numbers that make sense, or an error with the rule, what was received and the remedy."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple


class Range(NamedTuple):
    """A rule that numbers keep.

    Attributes:
      rule: In words: "`x` must be ...".
      holds: Whether a finite number keeps it.
    """

    rule: str
    holds: Callable[[float], bool]


NOT_NEGATIVE = Range("a finite number from 0", lambda value: value >= 0.0)
POSITIVE = Range("a finite number above 0", lambda value: value > 0.0)
BELOW_1 = Range("a number in [0, 1)", lambda value: 0.0 <= value < 1.0)


def number(name: str, value: Any, allowed: Range, remedy: str) -> float:
    """`value` as a float.

    Raises:
      ValueError: If it is no number, not finite, or not `allowed`.

    >>> number("momentum", 0, BELOW_1, "Use 0.9.")
    0.0
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not allowed.holds(value):
        raise ValueError(f"`{name}` must be {allowed.rule}. Received: {name}={value!r}. {remedy}")
    return float(value)


def integer(name: str, value: Any, least: int, remedy: str) -> int:
    """`value` as an int.

    Raises:
      ValueError: If it is no whole number from `least`.
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        raise ValueError(
            f"`{name}` must be a whole number from {least}. Received: {name}={value!r}. {remedy}"
        )
    return int(value)

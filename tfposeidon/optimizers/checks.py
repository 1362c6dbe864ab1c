"""Checks of numbers: errors say the rule, what was received and the remedy."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple


class Range(NamedTuple):
    """Range of numbers that an argument may have.

    Attributes:
      rule: The range in words, as in "`x` must be ...".
      holds: Tells whether a finite number lies in it.
    """

    rule: str
    holds: Callable[[float], bool]


NOT_NEGATIVE = Range("a finite number from 0", lambda value: value >= 0.0)
POSITIVE = Range("a finite number above 0", lambda value: value > 0.0)
BELOW_1 = Range("a number in [0, 1)", lambda value: 0.0 <= value < 1.0)


def number(name: str, value: Any, allowed: Range, remedy: str) -> float:
    """Returns a number as a float.

    Args:
      name: Name of the argument.
      value: What was received for it.
      allowed: Range that it must lie in.
      remedy: A sentence for the error, such as "Use 0.9.".

    Raises:
      ValueError: If `value` is not a number, not finite, or not `allowed`.

    >>> number("momentum", 0, BELOW_1, "Use 0.9.")
    0.0
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not allowed.holds(value):
        raise ValueError(f"`{name}` must be {allowed.rule}. Received: {name}={value!r}. {remedy}")
    return float(value)


def integer(name: str, value: Any, least: int, remedy: str) -> int:
    """Returns a whole number as an int.

    Args:
      name: Name of the argument.
      value: What was received for it.
      least: Smallest number allowed.
      remedy: A sentence for the error, such as "Use 0 for none.".

    Raises:
      ValueError: If `value` is not a whole number from `least`.

    >>> integer("warmup_steps", 5, 0, "Use 0 for none.")
    5
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        raise ValueError(
            f"`{name}` must be a whole number from {least}. Received: {name}={value!r}. {remedy}"
        )
    return int(value)

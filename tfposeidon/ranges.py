"""Validation of numeric arguments, with errors of rule, received value and remedy."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple


class Range(NamedTuple):
    """Allowed numbers: the end of the sentence "`x` must be ...", and a test for finite numbers."""

    rule: str
    holds: Callable[[float], bool]


NOT_NEGATIVE = Range("a finite number >= 0", lambda value: value >= 0.0)
POSITIVE = Range("a finite number > 0", lambda value: value > 0.0)
AT_LEAST_1 = Range("a finite number >= 1", lambda value: value >= 1.0)
BELOW_1 = Range("a number in [0, 1)", lambda value: 0.0 <= value < 1.0)
FRACTION = Range("a number in (0, 1]", lambda value: 0.0 < value <= 1.0)


def check_number(name: str, value: Any, allowed: Range, remedy: str = "") -> float:
    """Returns `value` as a float, or raises `ValueError` if it is not finite and in the range.

    >>> check_number("momentum", 0, BELOW_1, "Use 0.9.")
    0.0
    """
    # In Python a bool is a number, but as a numeric argument it is a mistake.
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not allowed.holds(value):
        raise ValueError(_message(name, value, allowed.rule, remedy))
    return float(value)


def check_integer(name: str, value: Any, least: int, remedy: str = "") -> int:
    """Returns `value` as an int, or raises `ValueError` if it is not an integer from `least`.

    >>> check_integer("keep", 2, 1)
    2
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        raise ValueError(_message(name, value, f"an integer >= {least}", remedy))
    return int(value)


def _message(name: str, value: Any, rule: str, remedy: str) -> str:
    return f"`{name}` must be {rule}. Received: {name}={value!r}. {remedy}".rstrip()

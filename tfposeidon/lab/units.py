"""Rates, times, shares and sizes as `tc` writes them."""

from __future__ import annotations

import re

# `tc` counts in powers of ten; its "bps" are bytes per second.
RATES = {"": 1, "bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
RATES |= {"bps": 8, "kbps": 8e3, "mbps": 8e6, "gbps": 8e9, "tbps": 8e12}
TIMES = {
    "us": 1e-6,
    "usec": 1e-6,
    "usecs": 1e-6,
    "ms": 1e-3,
    "msec": 1e-3,
    "msecs": 1e-3,
    "s": 1,
    "sec": 1,
    "secs": 1,
}
SIZES = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9}
NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)([a-z]*|%)", re.IGNORECASE)


def rate(text: str) -> float:
    """Bits per second.

    >>> rate("200mbit"), rate("1.5gbit"), rate("10mbps")
    (200000000.0, 1500000000.0, 80000000.0)
    """
    bits = _value(
        text, RATES, "a rate", "200mbit, 1gbit or 25gbit (mbps are megabytes per second, as in tc)"
    )
    if not 8e3 <= bits <= 1e12:
        raise ValueError(f"A rate must be in 8kbit..1tbit. Received: {text!r}")
    return bits


def duration(text: str) -> float:
    """Seconds.

    >>> duration("500us"), duration("2s")
    (0.0005, 2.0)
    """
    return _value(text, TIMES, "a time", "1ms, 500us or 2s")


def share(text: str) -> float:
    """A part of 1.

    >>> share("0.1%")
    0.001
    """
    part = _value(text, {"%": 0.01}, "a share", "0.1%")
    if part >= 1:
        raise ValueError(f"A share must be below 100%. Received: {text!r}")
    return part


def size(text: str) -> float:
    """Bytes.

    >>> size("400mb")
    400000000.0
    """
    return _value(text, SIZES, "a size", "400mb or 1.5gb")


def _value(text: str, units: dict[str, float], what: str, examples: str) -> float:
    found = NUMBER.fullmatch(text.strip())
    if not found or found[2].lower() not in units:
        raise ValueError(
            f"{what.capitalize()} is a number with a unit, like {examples}. Received: {text!r}"
        )
    return float(found[1]) * units[found[2].lower()]

"""Budgets: the room that a cache may take."""

from __future__ import annotations

import re

UNITS = {
    "": 1,
    "B": 1,
    "kB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


def budget_bytes(budget: int | str, free: int) -> int:
    """Returns the bytes of a budget, at most what is free.

    Args:
      budget: Bytes, "20GB", "512MiB", or a share of what is free, "80%".
      free: Bytes that are free.

    Raises:
      ValueError: If `budget` is no size, zero, or more than 100%.

    Example:
    >>> budget_bytes("80%", 1000), budget_bytes("2kB", 10**6), budget_bytes(5000, 1000)
    (800, 2000, 1000)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|[A-Za-z]*)\s*", str(budget))
    unit = match[2] if match else None
    if (
        match is None
        or not (unit == "%" or unit in UNITS)
        or float(match[1]) == 0
        or (unit == "%" and float(match[1]) > 100)
    ):
        raise ValueError(
            f'`budget` must be a size, as 10**9, "20GB" or "80%". Received: budget={budget!r}'
        )
    wanted = float(match[1]) * (free / 100 if unit == "%" else UNITS[unit or ""])
    return int(min(wanted, free))

"""Budgets: the space that a cache may use."""

from __future__ import annotations

from datacache.from_tfposeidon import parse_share, parse_size


def budget_bytes(budget: int | str, free: int) -> int:
    """Returns the bytes of a budget, at most the free bytes.

    Example:
      >>> budget_bytes("80%", 1000), budget_bytes("2kB", 10**6), budget_bytes(5000, 1000)
      (800, 2000, 1000)
    """
    text = str(budget)
    try:
        share, size_bytes = (parse_share(text), 0.0) if "%" in text else (0.0, parse_size(text))
    except ValueError:
        share = size_bytes = 0.0
    if not share and not size_bytes:
        raise ValueError(
            '`budget` must be a size above 0: bytes (10**9), "20GB" (powers of ten), "16GiB" '
            f'(powers of two) or a share of the free space ("80%"). Received: budget={budget!r}'
        )
    # Rounded, because 0.29 * 100 is slightly less than 29.
    return min(round(share * free + size_bytes), free)

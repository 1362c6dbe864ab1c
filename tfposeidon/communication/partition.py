"""Division of lists into consecutive parts, one for each rank."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def even(length: int, parts: int) -> list[tuple[int, int]]:
    """Returns begin and end of each part; lengths differ by one at most, the larger come first.

    Args:
      length: Number of elements.
      parts: Number of parts; some are empty where there are fewer elements.

    >>> even(5, 3)
    [(0, 2), (2, 4), (4, 5)]
    """
    quotient, remainder = divmod(length, parts)
    begins = [quotient * part + min(part, remainder) for part in range(parts + 1)]
    return list(itertools.pairwise(begins))


def balanced(sizes: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """Returns begin and end of each part; the largest sum of a part is as small as can be.

    Args:
      sizes: Sizes of the items, not negative.
      parts: Number of parts; some may be empty.

    >>> balanced([5, 1, 1, 1, 4], 3)
    [(0, 1), (1, 4), (4, 5)]
    """
    # Searches for the smallest limit with which filling one part after the other needs no more
    # parts.
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:
        limit = (low + high) // 2
        if len(_filled(sizes, limit)) <= parts:
            high = limit
        else:
            low = limit + 1
    ends = _filled(sizes, low)
    ends += [len(sizes)] * (parts - len(ends))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _filled(sizes: Sequence[int], limit: int) -> list[int]:
    """Returns the ends of parts that take items for as long as their sum keeps within a limit."""
    ends, total = [], 0
    for index, size in enumerate(sizes):
        if total + size > limit and total:
            ends.append(index)
            total = 0
        total += size
    return [*ends, len(sizes)]

"""Division of lists into consecutive parts, one per rank."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def even(length: int, parts: int) -> list[tuple[int, int]]:
    """Returns start and end of each part; lengths differ by one at most, larger parts first.

    >>> even(5, 3)
    [(0, 2), (2, 4), (4, 5)]
    """
    quotient, remainder = divmod(length, parts)
    begins = [quotient * part + min(part, remainder) for part in range(parts + 1)]
    return list(itertools.pairwise(begins))


def balanced(sizes: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """Returns start and end of each part so that the largest sum of a part is minimal.

    >>> balanced([5, 1, 1, 1, 4], 3)
    [(0, 1), (1, 4), (4, 5)]
    """
    # Binary search for the smallest limit with which greedy filling needs no more than `parts`
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
    """Returns the ends of parts that are filled greedily up to a limit on their sum."""
    ends, total = [], 0
    for index, size in enumerate(sizes):
        if total + size > limit and total:
            ends.append(index)
            total = 0
        total += size
    return [*ends, len(sizes)]

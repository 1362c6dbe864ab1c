"""Exchanges that a rank with exhausted input joins, until all ranks have ended the epoch.

Collectives need all ranks, so such a rank contributes zeros to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

Join = Callable[[bool], bool]
"""Joins the next exchange, eagerly or as a graph; returns true once no rank of it has data."""


class JoinHook(NamedTuple):
    """One kind of exchange that a rank with exhausted input joins.

    `is_ordered` is true if its collectives are eager in eager steps, where they match by order.
    """

    join: Join
    is_ordered: bool = True


def join_until_all_have_ended(hooks: Sequence[JoinHook], eagerly: bool) -> bool:
    """Joins exchanges until all ranks' input is exhausted; returns whether others had data."""
    # The number and order of exchanges in the other ranks' steps is unknown here, so join all
    # concurrently, except for those that match by order.
    ordered = [hook for hook in hooks if eagerly and hook.is_ordered]
    groups = [[hook] for hook in hooks if hook not in ordered] + ([ordered] if ordered else [])

    def join(group: list[JoinHook]) -> bool:
        return _join_in_turn(group, eagerly)

    with ThreadPoolExecutor(len(groups)) as threads:
        # Use a list, because `map` raises a thread's error only when its result is read.
        return any(list(threads.map(join, groups)))


def _join_in_turn(hooks: Sequence[JoinHook], eagerly: bool) -> bool:
    others_went_on = False
    # Use a list, because each turn must join all of them.
    while not all([hook.join(eagerly) for hook in hooks]):  # noqa: C419
        others_went_on = True
    return others_went_on

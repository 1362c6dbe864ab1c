"""Exchanges that a rank with exhausted input joins, until all ranks have ended the epoch.

Collectives need all ranks, so such a rank contributes zeros to them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from tfposeidon.exchange.exchanger import Afterwards, Exchanger
from tfposeidon.exchange.step import Step

Join = Callable[[bool], bool]
"""Joins the next exchange, eagerly or as a graph; returns true once no rank of it has data."""


class JoinHook(NamedTuple):
    """One kind of exchange that a rank with exhausted input joins.

    `is_ordered` is true if its collectives are eager in eager steps, where they match by order.
    """

    join: Join
    is_ordered: bool = True


def join_with_zeros(
    exchanger: Exchanger, call: int, eagerly: bool, afterwards: Afterwards | None = None
) -> bool:
    """Joins one exchange of a step with zeros; returns true if all ranks do."""
    join = exchanger.contribute_nothing_eagerly if eagerly else exchanger.contribute_nothing
    # Pass it as an argument, so that another function is traced again.
    absent, _ = join(call, afterwards)
    return int(absent) == exchanger.wire.topology.size


def join_hooks(
    exchange: Step, join: Callable[[Exchanger, int, bool], bool] = join_with_zeros
) -> list[JoinHook]:
    """Returns a hook for each exchange of a traced step; none before the first step."""
    return [
        JoinHook(functools.partial(join, exchanger, call))
        for exchanger in exchange.exchangers
        for call in range(exchanger.calls)
    ]


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

"""Exchanges that a rank without data joins, until all ranks have ended the epoch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from tfposeidon.exchange.exchanger import Afterwards, Exchanger
from tfposeidon.exchange.step import Step

Join = Callable[[bool], bool]
"""Joins the next exchange, eagerly or as a graph; returns True once none of its ranks has data."""


class JoinHook(NamedTuple):
    """One kind of exchange that a rank without data joins.

    Attributes:
      join: Joins the next exchange of this kind.
      is_ordered: True if its collectives are eager in eager steps, where they match by their order.
    """

    join: Join
    is_ordered: bool = True


def join_with_zeros(
    exchanger: Exchanger, call: int, eagerly: bool, afterwards: Afterwards | None = None
) -> bool:
    """Joins one exchange of a step with zeros; returns True if all of its ranks do."""
    join = exchanger.contribute_nothing_eagerly if eagerly else exchanger.contribute_nothing
    # As an argument, so that another function is traced anew.
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
    """Joins the other ranks' exchanges until no rank has data; returns whether others had some."""
    # How often, and in which order, the others' step exchanges by each is not known here: so all
    # are joined at once, but for those that match by their order.
    ordered = [hook for hook in hooks if eagerly and hook.is_ordered]
    groups = [[hook] for hook in hooks if hook not in ordered] + ([ordered] if ordered else [])

    def join(group: list[JoinHook]) -> bool:
        return _join_in_turn(group, eagerly)

    with ThreadPoolExecutor(len(groups)) as threads:
        # A list, for `map` raises a thread's error only where its result is asked for.
        return any(list(threads.map(join, groups)))


def _join_in_turn(hooks: Sequence[JoinHook], eagerly: bool) -> bool:
    others_went_on = False
    # A list, as all are joined in each turn.
    while not all([hook.join(eagerly) for hook in hooks]):  # noqa: C419
        others_went_on = True
    return others_went_on

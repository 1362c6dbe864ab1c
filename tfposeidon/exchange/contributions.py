"""Exchanges that a rank without data takes part in, until all ranks are out of data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tfposeidon.exchange.exchanger import Exchanger
from tfposeidon.exchange.step import Step

Contribution = Callable[[], bool]
"""Takes part in the next exchange of one kind; returns whether all ranks are out of data."""


def contribute_zeros(exchanger: Exchanger, call: int, eagerly: bool) -> bool:
    """Takes part in one exchange with zeros; returns whether all ranks do.

    Args:
      exchanger: Exchanger of the gradients.
      call: Index of the exchange among those of a step.
      eagerly: True for steps that run eagerly.
    """
    contribute = exchanger.contribute_nothing_eagerly if eagerly else exchanger.contribute_nothing
    # As an argument, so that another function is traced anew.
    absent, _ = contribute(call, exchanger.afterwards)
    return int(absent) == exchanger.wire.topology.size


def contributions(
    exchange: Step,
    eagerly: bool,
    contribute: Callable[[Exchanger, int, bool], bool] = contribute_zeros,
) -> list[Contribution]:
    """Returns what a rank that is out of data takes part in; see `OptimizerWrapper.contributions`.

    Args:
      exchange: Exchange of gradients in each step.
      eagerly: True for steps that run eagerly.
      contribute: Function that takes part in one call.
    """
    return [
        functools.partial(contribute, exchanger, call, eagerly)
        for exchanger in exchange.exchangers
        for call in range(exchanger.calls)
    ]


def contribute_until_all_are_done(contributions: Sequence[Contribution], eagerly: bool) -> bool:
    """Takes part in the other ranks' exchanges until all ranks are out of data.

    Args:
      contributions: What to take part in, at least one.
      eagerly: True for steps that run eagerly, whose exchanges match by their order.

    Returns:
      True if other ranks had a batch when this one was out of data.
    """
    if eagerly:
        return _in_turn(contributions)
    # All at once: how often, and in which order, the others' step exchanges by each is not known
    # here.
    with ThreadPoolExecutor(len(contributions)) as threads:
        # A list, for `map` raises a thread's error only where its result is asked for.
        return any(list(threads.map(lambda contribute: _in_turn([contribute]), contributions)))


def _in_turn(contributions: Sequence[Contribution]) -> bool:
    others_went_on = False
    # A list, as all are to take part in each turn.
    while not all([contribute() for contribute in contributions]):  # noqa: C419
        others_went_on = True
    return others_went_on

"""Compares the previous and the updated plan by real steps, whose train functions run in turn."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfposeidon.autotune.forecast import forecasts_of
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.exchange.agreed_plan import AgreedPlans
from tfposeidon.exchange.exchanger import Exchanger
from tfposeidon.training.session import Session

PAIRS, TURN_S = 5, 0.25
"""Number of turns of each plan, and minimum seconds of a turn, so that pauses of the operating
system, which last milliseconds, change no median."""
LEAST_LEFT = 4
"""Minimum number of remaining steps, as a multiple of the steps of a comparison."""


class Comparison:
    """Runs the updated and the previous plan in turn, at the same steps on all ranks.

    Both train functions stay traced with their exchangers. A turn has `executions`, or lasts an
    epoch if that is `None`. The updated plan has the first turn, after `untimed` executions.
    """

    def __init__(
        self,
        own: Session,
        plans: Sequence[AgreedPlans],
        turns: int,
        executions: int | None,
        untimed: int,
    ) -> None:
        self._session, self._plans, self._turns = own, plans, turns
        self._executions, self._untimed = executions, untimed
        self._waiting = self._current
        self._function = own.model.train_function
        # Seconds of each execution, by turn.
        self._times: list[list[float]] = []

    @property
    def _current(self) -> tuple[Any, list[dict[Any, Exchanger]]]:
        return self._session.model.train_function, [dict(one.exchangers) for one in self._plans]

    @property
    def is_valid(self) -> bool:
        """False if the step has been traced again for another reason."""
        return self._function is self._session.model.train_function

    @property
    def has_begun(self) -> bool:
        return bool(self._times)

    @property
    def is_complete(self) -> bool:
        """True if the last turn has begun."""
        return len(self._times) == self._turns

    def begin_turn(self) -> None:
        """Starts a turn with the plan in use."""
        self._function = self._session.model.train_function
        self._times.append([])

    def add(self, seconds: float) -> bool:
        """Records an execution; returns whether the turn is over before the epoch ends."""
        if self._untimed:
            self._untimed -= 1
            return False
        self._times[-1].append(seconds)
        return len(self._times[-1]) == self._executions

    def changing(self) -> list[Exchanger]:
        """Returns the exchangers of the plan in use that the waiting plan lacks."""
        return _only(self._current[1], self._waiting[1])

    def switch(self) -> None:
        """Uses the waiting plan; the schemes in use must have sent all residuals."""
        (function, found), self._waiting = self._waiting, self._current
        self._session.model.train_function = function
        for plans, exchangers in zip(self._plans, found, strict=True):
            plans.exchangers = exchangers
        for exchanger in self.changing():
            exchanger.states.reset()

    def ends_with_waiting(self) -> bool:
        """Returns whether the waiting, updated plan is faster; all ranks must call this."""
        # A rank without timed steps makes the result unknown, and the updated plan is used.
        mine = [statistics.median(own) if own else math.nan for own in self._times]
        slowest = np.max(exchange_objects(mine, runtime.wire(), "tp.comparison"), axis=0)
        updated_s, previous_s = slowest.reshape(-1, 2).T
        ratio = float(np.median(updated_s / previous_s))
        plans = [_only(self._waiting[1], self._current[1]), self.changing()]
        is_slower = ratio > 1.0
        if is_slower:
            ratio, plans = 1.0 / ratio, plans[::-1]
        faster, slower = (
            ", ".join(str(f.chosen) for e in own for f in forecasts_of(e.plan)) for own in plans
        )
        text = f"timed steps are {1.0 - ratio:.1%} shorter with {faster} than with {slower}"
        runtime.log_once("tfposeidon: %s.", text)
        for exchanger in plans[0]:
            exchanger.notes = (*exchanger.notes, text)
        return not is_slower


def _only(
    these: Sequence[dict[Any, Exchanger]], those: Sequence[dict[Any, Exchanger]]
) -> list[Exchanger]:
    """Returns the exchangers of the first plans that the second plans lack."""
    others = [one for found in those for one in found.values()]
    return [one for found in these for one in found.values() if one not in others]

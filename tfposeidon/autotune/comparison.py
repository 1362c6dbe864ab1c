"""Changes to the updated plan, and compares its real steps with those of the previous plan."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfposeidon.autotune.forecast import forecasts_of
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.exchange.exchanger import Exchanger
from tfposeidon.exchange.scheme_states import SchemeStates
from tfposeidon.training.session import Session

UNTIMED_STEPS, TIMED_STEPS = 2, 5
"""Number of updates before timing starts (the first one traces the step), and of timed updates."""
PAIRS, TURN_S = 5, 0.25
"""Number of turns of each plan, and minimum seconds of a turn, so that pauses of the operating
system, which last milliseconds, change no median."""
LEAST_LEFT = 4
"""Minimum number of remaining steps, as a multiple of the steps of a comparison. Half of these use
the slower plan, so it is used for at most an eighth of the steps."""
CLOCKS_S = 1e-4
"""Approximate seconds per step for the clock ops, with the small model of `benchmarks.wrapper`."""


class Comparison:
    """Applies proposed plans, and then runs them and the previous plans in turn.

    All ranks switch at the same steps. Both train functions stay traced, with their exchangers.
    """

    def __init__(self, own: Session, plans: Sequence[Any]) -> None:
        self._session, self._plans = own, plans
        self._function = own.model.train_function
        # A switch is due at first, and after each turn.
        self.is_due, self.has_ended = True, False
        # A turn has this number of executions, or lasts an epoch if that is `None`.
        self._turns, self._executions, self._untimed, self._calls = 0, None, 0, 1
        # The seconds of each execution, by turn, and the other train function with its exchangers.
        self._times: list[list[float]] = []
        self._waiting: Any = None

    def plan_turns(self, updates: float, calls: int, step_s: float, in_epoch: float) -> None:
        """Plans turns if enough `updates` are left, each of which has `calls` executions."""
        # If plans change only between epochs, each plan has a single turn.
        turns, executions, length = 2, None, in_epoch
        if not self._session.watches_absence:
            steps = self._session.model.steps_per_execution
            turn = max(1, math.ceil(TURN_S / max(step_s, CLOCKS_S) / steps))
            turns, executions, length = 2 * PAIRS, calls * turn, steps * turn
        if LEAST_LEFT * turns * length <= updates:
            self._turns, self._executions, self._untimed = turns, executions, UNTIMED_STEPS * calls
            self._calls = calls

    @property
    def is_active(self) -> bool:
        """False after the last turn, or if the step has been traced again for another reason."""
        return not self.has_ended and self._function is self._session.model.train_function

    @property
    def unsent(self) -> list[SchemeStates]:
        """Scheme states of the plans in use whose residuals must be sent before a switch."""
        if self._waiting:
            found = _only(self._exchangers, self._waiting[1])
        else:
            found = [one for plans in self._plans for one in plans.planner.changing(plans)]
        return [one.states for one in found if not one.states.has_flushed]

    @property
    def _exchangers(self) -> list[dict[Any, Exchanger]]:
        return [dict(one.exchangers) for one in self._plans]

    def switch(self) -> None:
        """Uses the other plans, and starts a turn unless all are over."""
        model, waiting = self._session.model, self._waiting
        self._waiting = model.train_function, self._exchangers
        if waiting is None:
            for plans in self._plans:
                plans.planner.apply(plans)
            self._session.retrace()
        else:
            model.train_function = waiting[0]
            for plans, exchangers in zip(self._plans, waiting[1], strict=True):
                plans.exchangers = exchangers
            for exchanger in _only(waiting[1], self._waiting[1]):
                exchanger.states.reset()
        self._function, self.is_due = model.train_function, False
        self.has_ended = len(self._times) == self._turns
        self._times.append([])

    def add(self, begin_s: float) -> bool:
        """Records an execution; returns whether the turn is over before the epoch ends."""
        # Wait for the GPU, on which ops are only queued.
        for variable in [v for plans in self._plans for own in plans.lists for v in own][-1:]:
            tf.reshape(variable, [-1])[:1].numpy()
        if self._untimed:
            self._untimed -= 1
            return False
        self._times[-1].append(time.perf_counter() - begin_s)
        return len(self._times[-1]) == self._executions

    def end_turn(self) -> None:
        """Requests a switch unless the plans in use are the previous ones, and faster."""
        self.is_due = len(self._times) < self._turns or self._waiting_are_faster()
        self.has_ended = not self.is_due

    def _waiting_are_faster(self) -> bool:
        """Returns whether steps with the updated plans are shorter; all ranks must call this."""
        # With gradient accumulation, ranks exchange gradients once in several executions.
        per = self._calls
        sums = [
            [sum(own[i : i + per]) for i in range(0, len(own) - per + 1, per)]
            for own in self._times
        ]
        mine = [statistics.median(own) if own else math.nan for own in sums]
        slowest = np.max(exchange_objects(mine, runtime.wire(), "tp.comparison"), axis=0)
        updated_s, previous_s = slowest.reshape(-1, 2).T
        clocks_s = CLOCKS_S * self._session.model.steps_per_execution
        ratio = float(np.median(updated_s / (previous_s - clocks_s)))
        both = self._exchangers, self._waiting[1]
        previous, updated = _only(*both), _only(*both[::-1])
        # A rank may have timed no step, and a function inside of the step may retain its plan.
        if math.isnan(ratio) or not updated:
            return True
        faster, slower = (previous, updated) if ratio > 1.0 else (updated, previous)
        names = [
            ", ".join(str(f.chosen) for e in own for f in forecasts_of(e.plan))
            for own in (faster, slower)
        ]
        share = 1.0 - min(ratio, 1.0 / ratio)
        text = f"timed steps are {share:.1%} shorter with {' than with '.join(names)}"
        runtime.log_once("tfposeidon: %s.", text)
        for exchanger in faster:
            exchanger.notes = (*exchanger.notes, text)
        return faster is updated


def _only(
    these: Sequence[dict[Any, Exchanger]], those: Sequence[dict[Any, Exchanger]]
) -> list[Exchanger]:
    """Returns the exchangers of the first plans that the second plans lack."""
    others = [one for found in those for one in found.values()]
    return [one for found in these for one in found.values() if one not in others]

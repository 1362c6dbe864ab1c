"""A second look at plans, once steps have told how long they compute."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from typing_extensions import override

from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.exchange.measured import Measured
from tfposeidon.training import session

UNTIMED_STEPS, TIMED_STEPS = 2, 5
"""Steps that are not timed, the first of which is traced, and those after them that are."""
LEAST_GAIN = 3.0
"""Time to be saved in the steps that are left, as a multiple of that of tracing a step."""


class PlanAgain(keras.callbacks.Callback):
    """Plans again, by measured times of forward and backward pass, where `auto` decides.

    All ranks do it at the same batch: after the first steps, or, where an epoch ends with the first
    rank that is out of data, at the beginning of the next one. The step is traced anew only if the
    new plan is predicted to save more time than that takes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_skipping = self._has_decided = self._waits_for_flush = False
        self._steps = 0
        self._trace_s = 0.0
        self._found: list[list[Any]] | None = None

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        self._session = session.of(self.model)
        self._open = [one for one in self._session.optimizers if one.exchange.plans.may_learn]
        self._has_decided = not self._open

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        for exchanger in self._exchangers:
            exchanger.times.pause()
        if epoch > 0 and self._session.watches_absence:
            self._continue()

    @override
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._is_skipping = self._session.is_skipping
        self._begin_s = time.perf_counter()

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._has_decided and not self._waits_for_flush:
            return
        if self._is_skipping:
            return
        self._time_step()
        # Ranks that end an epoch together need the exchange that they know until its end.
        if not self._session.watches_absence:
            self._continue()

    @property
    def _exchangers(self) -> list[Any]:
        return [exchanger for one in self._open for exchanger in one.exchange.exchangers]

    def _time_step(self) -> None:
        self._steps += 1
        if self._steps == 1:
            self._trace_s = time.perf_counter() - self._begin_s
        if self._steps == UNTIMED_STEPS:
            for exchanger in self._exchangers:
                exchanger.times.reset()
        elif self._steps == UNTIMED_STEPS + TIMED_STEPS:
            self._found = [
                [_measured(one, e) for e in one.exchange.exchangers] for one in self._open
            ]

    def _continue(self) -> None:
        """Decides once all ranks have timed their steps, and changes once nothing is kept."""
        if not self._has_decided and self._all_have_tried:
            self._decide()
        elif self._waits_for_flush and self._session.has_flushed:
            self._change()

    @property
    def _all_have_tried(self) -> bool:
        # Where epochs end early on some ranks, they are asked in `_decide`.
        return self._session.watches_absence or self._steps >= UNTIMED_STEPS + TIMED_STEPS

    def _decide(self) -> None:
        everybody = exchange_objects([self._found, self._trace_s], runtime.wire(), "tp.plan_again")
        ranks = [found for found, _ in everybody]
        if any(found is None or not all(map(all, found)) for found in ranks):
            # Too few steps on one of them; without absence to be watched there will be no more.
            self._has_decided = not self._session.watches_absence
            return
        self._has_decided = True
        saved_s = sum(
            one.exchange.plans.learn([_joined(same) for same in zip(*lists, strict=True)])
            for one, *lists in zip(self._open, *ranks, strict=True)
        )
        trace_s = max(trace_s for _, trace_s in everybody)
        if saved_s * self._steps_left <= LEAST_GAIN * trace_s:
            return
        runtime.say(
            "tfposeidon: planned again by measured times: steps should take %.3g ms less.",
            1e3 * saved_s,
        )
        self._waits_for_flush = True
        if not self._session.flush():
            self._change()

    def _change(self) -> None:
        self._waits_for_flush = False
        for one in self._open:
            one.exchange.plans.forget()
        self._session.retrace()

    @property
    def _steps_left(self) -> int:
        """Steps that are known to be left; where epochs have no known end, those of this one."""
        steps, epochs = self.params.get("steps"), self.params.get("epochs", 1)
        if steps is None:
            return self._steps
        return max(0, steps * (epochs - self._epoch) - self._steps)


def _measured(optimizer: Any, exchanger: Any) -> list[Any] | None:
    """Returns what this rank has measured for one list of variables, for JSON.

    Returns:
      Times of the first and the last gradient, and rows of an exchange; `None` if there was none.
    """
    means = exchanger.times.means
    if means is None:
        return None
    calls = optimizer.gradient_accumulation_steps or 1
    return [means.first_s, means.compute_s, (calls * exchanger.own_rows.numpy()).tolist()]


def _joined(ranks: Sequence[list[Any]]) -> Measured:
    """Returns the times of the slowest rank, and the mean rows."""
    first_s, compute_s, rows = zip(*ranks, strict=True)
    return Measured(max(first_s), max(compute_s), tuple(np.mean(rows, axis=0).tolist()))

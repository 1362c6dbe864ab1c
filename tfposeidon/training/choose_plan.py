"""Choice of plans by what the first steps have measured, where `auto` decides."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.exchange.agreed_plan import AgreedPlans
from tfposeidon.exchange.measured import Measured
from tfposeidon.exchange.planner import Paths
from tfposeidon.training import session

UNTIMED_STEPS, TIMED_STEPS = 2, 5
"""Updates that are not timed, the first of which is traced, and those after them that decide."""
LEAST_GAIN = 3.0
"""Time to be saved in the steps that are left, as a multiple of that of tracing a step."""
CLOCKS_S = 1e-4
"""Seconds that clocks take in a step, about: of the small model of `benchmarks.wrapper`."""
LEAST_TRACE_S = 0.5
"""Seconds that tracing a step takes at least; unknown where it was traced in an earlier `fit`."""

Found = dict[str, list[Any]]
"""What a rank has measured, for JSON: by the numbers of the optimizer and of a list of variables,
whose paths may be others on each rank, the times of its first and last gradient and of a whole
step, and the rows of each gradient's factors in an exchange."""


class ChoosePlan(keras.callbacks.Callback):
    """Chooses plans once, by measured times of forward and backward pass, where `auto` decides.

    All ranks do it at the same batch, after the first steps, which follow a plan for exchanges
    alone. The step is traced anew, then without clocks, only if that is predicted to save more time
    than it takes. The choice stays until a schedule changes the policy.

    What schemes have kept is sent by the step before. Where an epoch ends with the first rank that
    is out of data, plans change between epochs only: that step is then the last one of an epoch, if
    it has as many as the epoch before.

    On GPUs, where ops are queued, nothing tells how long steps compute: the first plan stays.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_skipping = self._is_watching = False
        self._steps = self._epoch = self._batches = self._batches_before = 0
        # The step after which times begin, and the last one that is timed.
        self._begin = self._end = 0
        self._trace_s = LEAST_TRACE_S
        self._on_gpu: bool | None = None
        self._open: dict[str, AgreedPlans] = {}
        self._found: Found | None = None

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        self._session = session.of(self.model)

    def _watch(self) -> None:
        """Begins to time steps, if there are optimizers whose plans are not chosen yet."""
        undecided = [plans for plans in self._find_open().values() if plans.planner.may_learn]
        if not undecided or self._is_changing:
            return
        if self._on_gpu is None:
            own = bool(tf.config.list_physical_devices("GPU"))
            # All ranks watch or none does, also where one of them lacks its GPU.
            self._on_gpu = any(exchange_objects(own, runtime.wire(), "tp.choose_plan.gpu"))
        if self._on_gpu:
            for plans in undecided:
                plans.keep()
            return
        self._is_watching = True
        if not all(plans.planner.is_watched for plans in undecided):
            for plans in undecided:
                plans.planner.is_watched = True
            # With clocks; in a first `fit` nothing is traced yet.
            self._session.retrace()
        # An optimizer that accumulates exchanges once in several steps.
        self._begin = self._steps + UNTIMED_STEPS * self._calls
        self._end = self._begin + TIMED_STEPS * self._calls
        self._found = None

    def _find_open(self) -> dict[str, AgreedPlans]:
        """Finds the plans that may change, by the number of their optimizer.

        A schedule may have changed policies since the last time.
        """
        every = {str(n): o.exchange.plans for n, o in enumerate(self._session.optimizers)}
        self._open = {n: plans for n, plans in every.items() if plans.planner.leaves_open}
        return self._open

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._batches_before, self._batches = epoch, self._batches, 0
        # What passes between epochs is no step.
        for optimizer in self._session.optimizers:
            for exchanger in optimizer.exchange.exchangers:
                exchanger.times.pause()
        # A schedule may leave plans open from a later epoch on.
        if not self._is_watching:
            self._watch()
        if self._steps and self._session.watches_absence:
            self._continue()

    @override
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._is_skipping = self._session.is_skipping
        self._begin_s = time.perf_counter() - self._spent_s

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches = batch + 1
        is_idle = not self._is_watching and not self._is_changing
        if is_idle or self._is_skipping:
            return
        self._time_step()
        # Ranks that end an epoch together need the exchange that they know until its end.
        if not self._session.watches_absence:
            self._continue()
        elif self._is_changing and not self._has_flushed and self._is_time_to_flush:
            self._flush()

    def _time_step(self) -> None:
        self._steps += 1
        if self._steps == 1:
            # To measure links is no part of tracing a step.
            traced_s = time.perf_counter() - self._spent_s - self._begin_s
            self._trace_s = max(LEAST_TRACE_S, traced_s)
        if self._steps == self._begin:
            for plans in self._open.values():
                for exchanger in plans.agreed_exchangers:
                    exchanger.times.reset()
        elif self._steps == self._end:
            self._found = self._measured()

    @property
    def _spent_s(self) -> float:
        """Seconds for which links were measured and exchanges raced."""
        return sum(plans.planner.spent_s for plans in self._open.values())

    @property
    def _calls(self) -> int:
        """Steps between two exchanges, at most."""
        return max((self._calls_of(number) for number in self._open), default=1)

    @property
    def _is_time_to_flush(self) -> bool:
        """True once a single exchange of the epoch is left, by the length of the one before."""
        return 0 < self._batches_before - self._batches <= self._until_exchange

    @property
    def _until_exchange(self) -> int:
        every = self._session.optimizers
        return self._session.steps_until_exchange(every[int(number)] for number in self._open)

    def _calls_of(self, number: str) -> int:
        return self._session.optimizers[int(number)].gradient_accumulation_steps or 1

    def _measured(self) -> Found:
        found: Found = {}
        for number, plans in self._find_open().items():
            calls = self._calls_of(number)
            for place, exchanger in enumerate(plans.agreed_exchangers):
                means = exchanger.times.means
                if means is not None:
                    rows = (calls * exchanger.own_rows.numpy()).tolist()
                    times = [means.first_s, means.compute_s, means.step_s]
                    found[f"{number} {place}"] = [*times, rows]
        return found

    def _continue(self) -> None:
        """Decides once all ranks have timed their steps, and changes once nothing is kept."""
        if self._is_changing:
            self._change_or_flush()
        # Where epochs end early on some ranks, all are asked whether they have timed enough.
        elif self._is_watching and (self._session.watches_absence or self._steps == self._end):
            self._choose()

    def _choose(self) -> None:
        everybody = exchange_objects([self._found, self._trace_s], runtime.wire(), "tp.choose_plan")
        ranks = [found for found, _ in everybody]
        if any(found is None for found in ranks):
            # Too few steps on one of them; the next epoch may have more.
            return
        self._is_watching = False
        joined = _joined(ranks)
        if not joined:
            # A schedule has changed the policy meanwhile: the next epoch begins once more.
            return
        saved_s = self._learn(joined)
        waits_for_epoch = self._session.watches_absence and not self._has_flushed
        steps_left = self._steps_left - (self._batches_before if waits_for_epoch else 0)
        trace_s = max(trace_s for _, trace_s in everybody)
        if (saved_s + CLOCKS_S) * steps_left / self._calls <= LEAST_GAIN * trace_s:
            self._stay()
            return
        if self._is_changing:
            runtime.say(
                "tfposeidon: planned again by measured times: steps should take %.3g ms less.",
                1e3 * saved_s,
            )
        self._change_or_flush()

    def _learn(self, joined: Mapping[str, Measured]) -> float:
        """Plans by what all ranks have measured; returns the seconds that a step would save."""
        saved_s = 0.0
        for number, plans in self._find_open().items():
            if plans.planner.may_learn:
                found: Mapping[Paths, Measured] = {
                    exchanger.plan.paths: joined[f"{number} {place}"]
                    for place, exchanger in enumerate(plans.agreed_exchangers)
                    if f"{number} {place}" in joined
                }
                saved_s += plans.learn(found)
        return saved_s

    def _stay(self) -> None:
        for plans in self._open.values():
            if plans.are_changing:
                plans.keep()
            elif plans.planner.may_learn:
                plans.adopt()

    @property
    def _is_changing(self) -> bool:
        """True while plans wait to change, also those of an earlier `fit` or run."""
        return any(plans.are_changing for plans in self._open.values())

    @property
    def _has_flushed(self) -> bool:
        """True if the schemes of plans that change keep nothing."""
        return all(plans.have_flushed for plans in self._open.values())

    def _change_or_flush(self) -> None:
        if self._has_flushed:
            for plans in self._open.values():
                plans.adopt()
            self._session.retrace()
            return
        # An epoch of a single exchange has no step before its last one.
        is_last = 0 < self._batches_before <= self._until_exchange
        if is_last or not self._session.watches_absence:
            self._flush()

    def _flush(self) -> None:
        for plans in self._open.values():
            plans.flush()

    @property
    def _steps_left(self) -> int:
        """Steps that are left; as many as there were, where the length of epochs is not known."""
        steps, epochs = self.params.get("steps"), self.params.get("epochs", 1)
        if steps is None:
            return self._steps
        return max(0, steps * (epochs - self._epoch) - self._batches)


def _joined(ranks: list[Found]) -> dict[str, Measured]:
    """Returns the times of the slowest rank and the mean rows, of what all ranks have measured."""
    joined = {}
    for key in ranks[0]:
        same = [found[key] for found in ranks if key in found]
        if len(same) == len(ranks):
            first_s, compute_s, step_s, rows = zip(*same, strict=True)
            mean_rows = tuple(np.mean(rows, axis=0).tolist())
            joined[key] = Measured(max(first_s), max(compute_s), max(step_s), mean_rows)
    return joined

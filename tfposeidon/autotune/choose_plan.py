"""Chooses communication plans by the times of the first training steps."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfposeidon.autotune.comparison import CLOCKS_S, TIMED_STEPS, UNTIMED_STEPS, Comparison
from tfposeidon.autotune.search import CLOSE_WITHIN
from tfposeidon.autotune.simulation import Timeline
from tfposeidon.checks import require_equal
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.exchange.observer import Done, clock_variable, time_after
from tfposeidon.gradients import Description, GradientReader
from tfposeidon.training import session

LEAST_GAIN = 3.0
"""Minimum time saved in the remaining steps, as a multiple of the time for tracing a step, so that
a change that saves nothing costs at most a third of the predicted saving."""


class Measured(NamedTuple):
    """Mean times of timed steps, from the end of the previous exchange, for a list of variables.

    `first_s` and `compute_s` end with the first and the last gradient, `step_s` with the exchange
    of the step. `sizes` has the size of each gradient's structure on a rank, 0 for dense gradients.
    """

    first_s: float
    compute_s: float
    step_s: float
    sizes: Sequence[float]

    @classmethod
    def of_all(cls, ranks: Sequence[Any]) -> Measured | None:
        """Returns maximum times and mean sizes over ranks; `None` if a rank has timed no step."""
        if not all(ranks):
            return None
        first_s, compute_s, step_s, sizes = zip(*ranks, strict=True)
        return cls(max(first_s), max(compute_s), max(step_s), np.mean(sizes, axis=0).tolist())

    @property
    def timeline(self) -> Timeline:
        # Limit the times, because the clock may have been set back during a step.
        first_s, compute_s = max(0.0, min(self.first_s, self.compute_s)), max(0.0, self.compute_s)
        return Timeline.even(variables=len(self.sizes), first_s=first_s, compute_s=compute_s)


class StepTimes:
    """Sums the times of this rank's steps, each from the end of the previous exchange."""

    def __init__(self, variables: int, reader: GradientReader | None = None) -> None:
        self._reader = reader
        with tf.init_scope():
            self._end_s = clock_variable([], "end_of_exchange")
            # The elements are sums of `first_s`, `compute_s`, `step_s`, steps, and sizes.
            self._sums = clock_variable([4 + variables], "step_times")

    def ready(
        self,
        descriptions: Sequence[Description],
        gradients: Sequence[Any],
        sent: Sequence[Any],
        replicated: Collection[Any],
    ) -> Done:
        """Reads the clock after the first and last gradient, and after all averaged gradients."""
        read = self._reader.sizes if self._reader else lambda *_: tf.zeros([len(gradients)])
        sizes = read(gradients, descriptions, replicated)
        # Backpropagation computes the gradient of the last variable first.
        present = [gradient for gradient in sent if gradient is not None]
        first_s, ready_s = time_after(present[-1:]), time_after(sent)

        def record(means: Sequence[Any]) -> None:
            begin_s, end_s = self._end_s.read_value(), time_after(means)
            times = tf.stack([first_s - begin_s, ready_s - begin_s, end_s - begin_s, 1.0])
            own = tf.concat([times, tf.cast(sizes, times.dtype)], 0)
            # Exclude the first step, which would include the time before training.
            self._sums.assign_add(tf.where(begin_s > 0.0, own, tf.zeros_like(own)))
            self._end_s.assign(end_s)

        return record

    def reset(self) -> None:
        self._sums.assign(tf.zeros_like(self._sums))

    def pause(self) -> None:
        """Excludes the time until the end of the next step, which may contain an evaluation."""
        self._end_s.assign(0.0)

    @property
    def measured(self) -> Measured | None:
        """Mean times and sizes of the steps since `reset`; `None` if there were no steps."""
        sums = self._sums.numpy()
        if not sums[3]:
            return None
        first_s, compute_s, step_s, _, *sizes = (sums / sums[3]).tolist()
        return Measured(first_s, compute_s, step_s, sizes)


class ChoosePlan(keras.callbacks.Callback):
    """Chooses tunable plans once, from measured times of the forward and backward pass.

    All ranks choose after the same batch. Before a plan changes, one step sends the residuals. If
    epochs may end early, plans change only between epochs. The residuals are then sent in the step
    that is the last one if the epoch has the length of the previous epoch. If enough steps are
    left, steps with the previous and the updated plan then run in turn, and the faster one is used.
    """

    def __init__(self) -> None:
        super().__init__()
        self._epoch = self._batches = self._batches_before = 0
        # `_steps` counts steps since timing began; timing ends after `_end` steps. Ranks exchange
        # gradients once every `_calls` steps.
        self._steps, self._trace_s = 0, 0.0
        self._optimizers: list[Any] = []
        self._comparison: Comparison | None = None

    @property
    def _plans(self) -> list[Any]:
        # Check at every call, because a schedule may have changed the planner of an optimizer.
        plans = [optimizer.exchange.plans for optimizer in self._optimizers]
        return [one for one in plans if one.planner.callback is ChoosePlan]

    @property
    def _undecided(self) -> list[Any]:
        return [p for p in self._plans if not (p.policy.is_fixed or p.planner.has_decided)]

    @property
    def _timed(self) -> list[Any]:
        return [one for one in self._undecided if one.planner.is_watching]

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._batches_before, self._batches = epoch, self._batches, 0
        self._session = session.of(self.model)
        self._optimizers = self._session.optimizers
        # With gradient accumulation, ranks exchange gradients once in several steps.
        self._calls = max((o.gradient_accumulation_steps or 1 for o in self._optimizers), default=1)
        self._end = (UNTIMED_STEPS + TIMED_STEPS) * self._calls
        self._pause()
        self._comparison = self._active
        # A change of an earlier `fit` or run may be pending.
        if not self._active and any(one.planner.proposed for one in self._plans):
            self._comparison = Comparison(self._session, self._plans)
        if not self._active:
            self._end_flush()
        # A schedule may make plans tunable in a later epoch.
        if not self._active and len(self._timed) < len(self._undecided):
            self._watch()
        elif self._batches_before and self._session.watches_absence:
            self._continue()

    @override
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._begin_s, self._comparison = time.perf_counter(), self._active

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches, is_timing = batch + 1, bool(self._timed)
        comparison = self._active
        if self._session.was_skipped or not (is_timing or comparison):
            return
        if comparison and not comparison.is_due:
            if comparison.add(self._begin_s):
                self._continue()
            return
        self._steps += 1
        if self._steps == 1:
            self._trace_s = time.perf_counter() - self._begin_s
        if self._steps == UNTIMED_STEPS * self._calls:
            for times in self._step_times():
                times.reset()
        ends = is_timing and self._steps == self._end and not self._session.watches_absence
        if comparison or ends:
            self._continue()

    def _watch(self) -> None:
        """Starts timing steps if measured times can change plans."""
        tunable = [one for one in self._undecided if one.planner.is_tunable]
        own = [len(tunable), runtime.network_profile() is None]
        ranks = exchange_objects(own, runtime.wire(), "tp.choose_plan.begin")
        numbers, measures = zip(*ranks, strict=True)
        require_equal(
            numbers,
            "All ranks must choose plans by the network, or none",
            "Pass the same `network` to tp.init on all ranks, and enable op determinism on all or "
            "none.",
        )
        # If epochs may end early, plans change only between epochs, so timing the last epoch is
        # useless. For a single epoch, a timed trial of exchanges chooses the plan instead.
        is_last = self._session.watches_absence and self.params.get("epochs", 1) <= self._epoch + 1
        if is_last or not tunable:
            return
        for plans in tunable:
            # Measure the network before the first step, whose duration counts as tracing time. If
            # only some ranks have a profile, the first step raises an error.
            if all(measures):
                plans.planner.measure_network()
            plans.planner.is_watching = True
        # Trace the step again with clock ops, if an earlier `fit` has traced it without them.
        self._session.retrace()
        self._steps = 0

    def _end_flush(self) -> None:
        # After an interrupted comparison, a scheme would send whole gradients in each step.
        for states in [e.states for plans in self._plans for e in plans.exchangers.values()]:
            if states.exist and states.has_flushed:
                states.reset()

    def _pause(self) -> None:
        for times in self._step_times():
            times.pause()

    def _step_times(self) -> list[StepTimes]:
        exchangers = [e for one in self._optimizers for e in one.exchange.exchangers]
        return [e.observer for e in exchangers if isinstance(e.observer, StepTimes)]

    @property
    def _active(self) -> Comparison | None:
        return self._comparison if self._comparison and self._comparison.is_active else None

    def _end_turn(self, comparison: Comparison) -> None:
        comparison.end_turn()
        # If the previous plan is faster, its function still contains clock ops.
        clocks_s = CLOCKS_S * self._left / self._calls
        if comparison.has_ended and clocks_s > LEAST_GAIN * self._trace_s:
            self._session.retrace()

    def _continue(self) -> None:
        """Chooses plans if steps were timed, ends a turn, or switches plans."""
        if self._timed:
            self._decide()
        comparison, watches = self._active, self._session.watches_absence
        if comparison is None:
            return
        if not comparison.is_due:
            self._end_turn(comparison)
        if comparison.has_ended:
            return
        unsent, left = comparison.unsent, self._batches_before - self._batches
        # If epochs may end early, plans cannot change within them, because a rank without data can
        # join only the exchange that it has traced.
        if not (watches and self._batches) and not unsent:
            comparison.switch()
            self._pause()
        elif not watches or 0 < left <= self._session.steps_until_exchange(self._optimizers):
            for states in unsent:
                states.flush()

    @property
    def _left(self) -> int:
        """Number of remaining steps on this rank."""
        # Assume that an epoch of unknown length is as long as the previous one.
        steps = self.params.get("steps") or self._batches_before
        return steps * (self.params.get("epochs", 1) - self._epoch) - self._batches

    def _decide(self) -> None:
        timed = self._timed
        own = [[e.observer.measured for e in plans.agreed_exchangers] for plans in timed]
        updates_now, in_epoch = self._left / self._calls, self._batches_before / self._calls
        mine = [own if self._steps >= self._end else None, self._trace_s, updates_now, in_epoch]
        everybody = exchange_objects(mine, runtime.wire(), "tp.choose_plan")
        # Ranks may have executed different numbers of steps, and must make the same decision.
        ranks, traces_s, lefts, before = zip(*everybody, strict=True)
        if any(found is None for found in ranks):
            # A rank has timed too few steps; the next epoch may have more.
            return
        saved_s, least_s, updates = 0.0, LEAST_GAIN * max(traces_s), min(lefts)
        # Time close plans only if their difference may save enough time to justify a change.
        shortest_s = least_s / CLOSE_WITHIN / max(1.0, updates)
        step_s = 0.0
        for plans, *found in zip(timed, *ranks, strict=True):
            measured = [Measured.of_all(one) for one in zip(*found, strict=True)]
            saved_s += plans.planner.propose(plans, measured, shortest_s)
            step_s = max([step_s, *(one.step_s for one in measured if one)])
        comparison = Comparison(self._session, self._plans)
        if self._session.watches_absence and comparison.unsent:
            # The plan changes only after another epoch.
            updates -= max(before)
        if (saved_s + CLOCKS_S) * updates <= least_s:
            for plans in self._plans:
                plans.planner.proposed.clear()
                plans.planner.apply(plans)
            return
        self._comparison = comparison
        if any(plans.planner.proposed for plans in self._plans):
            comparison.plan_turns(updates, self._calls, step_s, max(before))
            runtime.log_once(
                "tfposeidon: the plan was updated from measured times; the predicted step is "
                "%.3g ms shorter.",
                1e3 * saved_s,
            )

"""Choice of communication plans from the times of the first training steps.

Think of `ChoosePlan` as a callback that times a few steps on all ranks and then fixes the plans
that the `auto` policy left tunable. It retraces the step only if the predicted gain repays the time
for tracing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfposeidon.autotune.step_times import Measured, StepTimes
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.exchange.exchanger import Exchanger
from tfposeidon.training import session

UNTIMED_STEPS, TIMED_STEPS = 2, 5
"""Updates before timing starts, of which the first is traced, and timed updates after them."""
LEAST_GAIN = 3.0
"""Least time to save in the remaining steps, as a multiple of the time for tracing a step."""
CLOCKS_S = 1e-4
"""Approximate seconds per step for the clock ops, from the small model of `benchmarks.wrapper`."""
LEAST_TRACE_S = 0.5
"""Lower bound of the seconds to trace a step; an earlier `fit` may have traced it already."""

Found = dict[str, list[Any]]
"""Measurements of one rank as JSON, keyed by the indices of the optimizer and of its exchanger.

Variable paths may differ between ranks and cannot be keys. A value holds the times of the first
gradient, of the last gradient and of a whole step, and the size of each gradient's structure.
"""


class ChoosePlan(keras.callbacks.Callback):
    """Keras callback that chooses tunable plans once, from measured forward and backward times.

    All ranks choose at the same batch, and a choice stays until a schedule changes the policy. The
    preceding step flushes error-feedback state, so where epochs may end early, a plan changes
    between epochs only, after a flush in the last step of an epoch as long as the previous one. On
    GPUs, ops are queued and their times cannot be measured, so the first plan stays.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_skipping = self._is_watching = False
        self._steps = self._epoch = self._batches = self._batches_before = 0
        # The step after which timing starts, and the last timed step.
        self._begin = self._end = 0
        self._trace_s = LEAST_TRACE_S
        self._on_gpu: bool | None = None
        self._optimizers: dict[str, Any] = {}
        self._found: Found | None = None

    @property
    def _session(self) -> session.Session:
        return session.of(self.model)

    @property
    def _open(self) -> dict[str, Any]:
        """The plans that are tunable now, by index of the optimizer."""
        # A schedule may have changed the planner of an optimizer.
        every = {number: one.exchange.plans for number, one in self._optimizers.items()}
        return {
            number: plans
            for number, plans in every.items()
            if plans.planner.callback is type(self) and plans.planner.is_tunable
        }

    def _watch(self) -> None:
        """Starts to time steps if any optimizer has a tunable plan."""
        undecided = [plans for plans in self._open.values() if plans.planner.is_undecided]
        if not undecided or self._is_changing:
            return
        if self._on_gpu is None:
            own = bool(tf.config.list_physical_devices("GPU"))
            # All ranks must take the same branch, even if one of them lacks its GPU.
            self._on_gpu = any(exchange_objects(own, runtime.wire(), "tp.choose_plan.gpu"))
        if self._on_gpu:
            for plans in undecided:
                plans.planner.retain()
            return
        self._is_watching = True
        if not all(plans.planner.is_watching for plans in undecided):
            for plans in undecided:
                plans.planner.is_watching = True
            # Adds the clock ops. In a first `fit`, the step has not been traced yet.
            self._session.retrace()
        # With gradient accumulation, an exchange takes place once in several steps.
        self._begin = self._steps + UNTIMED_STEPS * self._calls
        self._end = self._begin + TIMED_STEPS * self._calls
        self._found = None

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._batches_before, self._batches = epoch, self._batches, 0
        self._optimizers = {str(n): one for n, one in enumerate(self._session.optimizers)}
        # Exclude time between epochs from step timing.
        for optimizer in self._optimizers.values():
            for _, times in _step_times(optimizer.exchange.exchangers):
                times.pause()
        # A schedule may make plans tunable in a later epoch.
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
        # Where epochs end early, a rank that joins after its last batch knows only the traced
        # exchange.
        if not self._session.watches_absence:
            self._continue()
        elif self._is_changing and not self._has_flushed and self._is_time_to_flush:
            self._flush()

    def _time_step(self) -> None:
        self._steps += 1
        if self._steps == 1:
            # Exclude network measurements from the tracing time.
            traced_s = time.perf_counter() - self._spent_s - self._begin_s
            self._trace_s = max(LEAST_TRACE_S, traced_s)
        if self._steps == self._begin:
            for plans in self._open.values():
                for _, times in _step_times(plans.agreed_exchangers):
                    times.reset()
        elif self._steps == self._end:
            self._found = self._measured()

    @property
    def _spent_s(self) -> float:
        """Seconds spent on network measurements and timed trials."""
        return sum(plans.planner.spent_s for plans in self._open.values())

    @property
    def _calls(self) -> int:
        """Largest number of steps per exchange."""
        return max((self._calls_of(number) for number in self._open), default=1)

    @property
    def _is_time_to_flush(self) -> bool:
        """True if one exchange is left in this epoch, assuming the length of the previous epoch."""
        return 0 < self._batches_before - self._batches <= self._until_exchange

    @property
    def _until_exchange(self) -> int:
        return self._session.steps_until_exchange(self._optimizers[n] for n in self._open)

    def _calls_of(self, number: str) -> int:
        return self._optimizers[number].gradient_accumulation_steps or 1

    def _measured(self) -> Found:
        found: Found = {}
        for number, plans in self._open.items():
            for place, times in _step_times(plans.agreed_exchangers):
                if (means := times.means) is not None:
                    seconds = [means.first_s, means.compute_s, means.step_s]
                    found[f"{number} {place}"] = [*seconds, times.sizes]
        return found

    def _continue(self) -> None:
        """Chooses plans once all ranks have timed steps; applies them once schemes are flushed."""
        if self._is_changing:
            self._change_or_flush()
        # Where epochs may end early, ranks check at each epoch whether all have timed enough steps.
        elif self._is_watching and (self._session.watches_absence or self._steps == self._end):
            self._choose()

    def _choose(self) -> None:
        everybody = exchange_objects([self._found, self._trace_s], runtime.wire(), "tp.choose_plan")
        ranks = [found for found, _ in everybody]
        if any(found is None for found in ranks):
            # A rank has timed too few steps; the next epoch may have more.
            return
        self._is_watching = False
        joined = _joined(ranks)
        if not joined:
            # A schedule has changed the policy meanwhile; timing starts again with the next epoch.
            return
        saved_s = self._update(joined)
        waits_for_epoch = self._session.watches_absence and not self._has_flushed
        steps_left = self._steps_left - (self._batches_before if waits_for_epoch else 0)
        trace_s = max(trace_s for _, trace_s in everybody)
        if (saved_s + CLOCKS_S) * steps_left / self._calls <= LEAST_GAIN * trace_s:
            self._stay()
            return
        if self._is_changing:
            runtime.say(
                "tfposeidon: the plan was updated from measured times; the predicted step is "
                "%.3g ms shorter.",
                1e3 * saved_s,
            )
        self._change_or_flush()

    def _update(self, joined: dict[str, Measured]) -> float:
        """Plans with all ranks' measurements; returns the predicted seconds saved per step."""
        saved_s = 0.0
        for number, plans in self._open.items():
            if plans.planner.is_undecided:
                found = {
                    exchanger.plan.paths: joined[f"{number} {place}"]
                    for place, exchanger in enumerate(plans.agreed_exchangers)
                    if f"{number} {place}" in joined
                }
                saved_s += plans.planner.update(plans, found)
        return saved_s

    def _stay(self) -> None:
        for plans in self._open.values():
            if plans.planner.are_changing:
                plans.planner.retain()
            elif plans.planner.is_undecided:
                plans.planner.apply(plans)

    @property
    def _is_changing(self) -> bool:
        """True while a changed plan, also of an earlier `fit` or run, waits to be applied."""
        return any(plans.planner.are_changing for plans in self._open.values())

    @property
    def _has_flushed(self) -> bool:
        """True if the schemes of all changing plans hold no error-feedback state."""
        return all(plans.planner.has_flushed(plans) for plans in self._open.values())

    def _change_or_flush(self) -> None:
        if self._has_flushed:
            for plans in self._open.values():
                plans.planner.apply(plans)
            self._session.retrace()
            return
        # An epoch with a single exchange has no earlier step for the flush.
        is_last = 0 < self._batches_before <= self._until_exchange
        if is_last or not self._session.watches_absence:
            self._flush()

    def _flush(self) -> None:
        for plans in self._open.values():
            plans.planner.flush(plans)

    @property
    def _steps_left(self) -> int:
        """Remaining steps; as many as are done if the length of epochs is unknown."""
        steps, epochs = self.params.get("steps"), self.params.get("epochs", 1)
        if steps is None:
            return self._steps
        return max(0, steps * (epochs - self._epoch) - self._batches)


def _step_times(exchangers: Iterable[Exchanger]) -> Iterator[tuple[int, StepTimes]]:
    """Yields what times the steps of exchangers, with their place."""
    for place, exchanger in enumerate(exchangers):
        if isinstance(exchanger.observer, StepTimes):
            yield place, exchanger.observer


def _joined(ranks: list[Found]) -> dict[str, Measured]:
    """Combines the measurements of all ranks: maximum times and mean sizes."""
    joined = {}
    for key in ranks[0]:
        same = [found[key] for found in ranks if key in found]
        if len(same) == len(ranks):
            first_s, compute_s, step_s, sizes = zip(*same, strict=True)
            mean_sizes = tuple(np.mean(sizes, axis=0).tolist())
            joined[key] = Measured(max(first_s), max(compute_s), max(step_s), mean_sizes)
    return joined

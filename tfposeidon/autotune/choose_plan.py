"""Choice of communication plans from the times of the first training steps.

Think of `ChoosePlan` as a callback that times a few steps on all ranks and then fixes the plans
that the `auto` policy left tunable. It retraces the step only if the predicted gain repays the time
for tracing.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfposeidon.autotune.search import RACED_WITHIN
from tfposeidon.autotune.simulation import Timeline
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.exchange.observer import Done, clock_variable, time_after
from tfposeidon.exchange.plan import Plan
from tfposeidon.gradients.description import Description, GradientReader
from tfposeidon.training import session

UNTIMED_STEPS, TIMED_STEPS = 2, 5
"""Updates before timing starts, of which the first is traced, and timed updates after them."""
LEAST_GAIN = 3.0
"""Least time to save in the remaining steps, as a multiple of the time for tracing a step."""
CLOCKS_S = 1e-4
"""Approximate seconds per step for the clock ops, from the small model of `benchmarks.wrapper`."""
LEAST_TRACE_S = 0.5
"""Lower bound of the seconds to trace a step; an earlier `fit` may have traced it already."""


class Measured(NamedTuple):
    """Mean times and sizes of some steps, for one list of variables.

    Times are in seconds from the end of one exchange, to the first and last gradient and the end of
    the next. `step_s - compute_s` is exposed communication. `sizes` has the size of each gradient's
    structure on a rank; 0 without one.
    """

    first_s: float
    compute_s: float
    step_s: float
    sizes: Sequence[float]

    @classmethod
    def of_all(cls, ranks: Sequence[Sequence[Any]]) -> Measured:
        """Returns the measurements of all ranks together: maximum times and mean sizes."""
        first_s, compute_s, step_s, sizes = zip(*ranks, strict=True)
        return cls(max(first_s), max(compute_s), max(step_s), np.mean(sizes, axis=0).tolist())

    @property
    def timeline(self) -> Timeline:
        """Times of the gradients of a step."""
        # The clock may have been set back during a step.
        first_s, compute_s = max(0.0, min(self.first_s, self.compute_s)), max(0.0, self.compute_s)
        return Timeline.even(variables=len(self.sizes), first_s=first_s, compute_s=compute_s)

    def sized(self, descriptions: Sequence[Description]) -> list[Description]:
        """Returns descriptions whose structures have the measured sizes."""
        pairs = zip(descriptions, self.sizes, strict=True)
        return [description.sized(size) if size else description for description, size in pairs]


class StepTimes:
    """Observer that sums the times of an optimizer's steps on this rank.

    A step begins when the previous exchange ends, so that input and update count as computation.
    """

    def __init__(self, variables: int, reader: GradientReader | None = None) -> None:
        self._reader = reader
        with tf.init_scope():
            self._end_s = clock_variable([], "end_of_exchange")
            self._sums = clock_variable([4], "step_times")
            with tf.device("/CPU:0"):
                self._sizes = tf.Variable(tf.zeros([variables]), trainable=False, name="sizes")

    def ready(
        self,
        plan: Plan,
        gradients: Sequence[Any],
        sent: Sequence[Any],
        replicated: Collection[Any],
    ) -> Done:
        """Reads the clock after the first and the last gradient, and later after the last mean."""
        if self._reader is not None:
            self._sizes.assign(self._reader.sizes(gradients, plan.descriptions, replicated))
        # The gradient of the last variable is the first to be ready.
        present = [gradient for gradient in sent if gradient is not None]
        first_s, ready_s = time_after(present[-1:]), time_after(sent)
        return lambda means: self._record(first_s, ready_s, time_after(means))

    def _record(self, first_s: tf.Tensor, ready_s: tf.Tensor, end_s: tf.Tensor) -> None:
        begin_s = self._end_s.read_value()
        own = tf.stack([first_s - begin_s, ready_s - begin_s, end_s - begin_s, tf.ones_like(end_s)])
        # Exclude the first step, which would include the time before training.
        self._sums.assign_add(tf.where(begin_s > 0.0, own, tf.zeros_like(own)))
        self._end_s.assign(end_s)

    def reset(self) -> None:
        """Discards all steps so far."""
        self._sums.assign(tf.zeros_like(self._sums))

    def pause(self) -> None:
        """Excludes the time until the end of the next step, such as an evaluation."""
        self._end_s.assign(tf.zeros_like(self._end_s))

    @property
    def measured(self) -> Measured | None:
        """Means over the steps since `reset`, with the last sizes; `None` if there were none."""
        *sums, steps = self._sums.numpy().tolist()
        if not steps:
            return None
        first_s, compute_s, step_s = (value / steps for value in sums)
        return Measured(first_s, compute_s, step_s, self._sizes.numpy().tolist())


class ChoosePlan(keras.callbacks.Callback):
    """Keras callback that decides tunable plans once, from measured forward and backward times.

    All ranks decide at the same batch, and a decision holds until a schedule changes the policy. A
    step before the change sends residuals. Where epochs may end early, ranks decide between epochs,
    and a plan with residuals stays. On GPUs, ops are queued and their times cannot be measured, so
    the first plan stays.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_skipping = self._is_changing = False
        self._steps = self._epoch = self._batches = 0
        # The last timed step; 0 while no steps are timed.
        self._end = 0
        self._trace_s = LEAST_TRACE_S
        self._on_gpu: bool | None = None
        self._optimizers: list[Any] = []
        # This rank's measurements as JSON, by the indices of the optimizer and of its exchanger:
        # the paths of variables may differ between ranks.
        self._found: dict[str, Measured] | None = None

    @property
    def _session(self) -> session.Session:
        return session.of(self.model)

    @property
    def _plans(self) -> dict[int, Any]:
        """Plans that are tunable, by the index of the optimizer."""
        # A schedule may have changed the planner of an optimizer.
        plans = {n: optimizer.exchange.plans for n, optimizer in enumerate(self._optimizers)}
        return {
            number: one
            for number, one in plans.items()
            if one.planner.callback is type(self) and one.planner.is_tunable
        }

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        is_later, self._epoch, self._batches = self._batches > 0, epoch, 0
        self._optimizers = self._session.optimizers
        # Exclude time between epochs from step timing.
        for _, times in self._step_times():
            times.pause()
        # A change of an earlier `fit` or run may still wait.
        self._is_changing = any(plans.planner.proposed for plans in self._plans.values())
        # A schedule may make plans tunable in a later epoch.
        if not self._end and not self._is_changing:
            self._watch()
        elif is_later and self._session.watches_absence:
            self._continue()

    @override
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._is_skipping = self._session.is_skipping
        if self._end and not self._steps:
            self._begin_s = time.perf_counter() - self._spent_s

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches = batch + 1
        if self._is_skipping or not (self._end or self._is_changing):
            return
        if self._end:
            self._time_step()
        # Where epochs end early, a rank that joins after its last batch knows only the traced
        # exchange.
        if not self._session.watches_absence and self._steps >= self._end:
            self._continue()

    def _continue(self) -> None:
        if self._end:
            self._decide()
        if self._is_changing:
            self._change()

    def _watch(self) -> None:
        """Starts to time steps if any plan is undecided."""
        undecided = [one for one in self._plans.values() if not one.planner.has_decided]
        if not undecided:
            return
        if self._on_gpu is None:
            own = bool(tf.config.list_physical_devices("GPU"))
            # All ranks must take the same branch, even if one of them lacks its GPU.
            self._on_gpu = any(exchange_objects(own, runtime.wire(), "tp.choose_plan.gpu"))
        if self._on_gpu:
            for plans in undecided:
                plans.planner.apply(plans)
            return
        if not all(plans.planner.is_watching for plans in undecided):
            for plans in undecided:
                plans.planner.is_watching = True
            # Adds the clock ops. In a first `fit`, the step has not been traced yet.
            self._session.retrace()
        self._steps, self._end, self._found = 0, (UNTIMED_STEPS + TIMED_STEPS) * self._calls, None

    def _time_step(self) -> None:
        self._steps += 1
        if self._steps == 1:
            # Exclude network measurements from the tracing time.
            traced_s = time.perf_counter() - self._spent_s - self._begin_s
            self._trace_s = max(LEAST_TRACE_S, traced_s)
        if self._steps == UNTIMED_STEPS * self._calls:
            for _, times in self._step_times():
                times.reset()
        elif self._steps == self._end:
            found = {key: times.measured for key, times in self._step_times()}
            self._found = {key: one for key, one in found.items() if one is not None}

    def _step_times(self) -> Iterator[tuple[str, StepTimes]]:
        """Yields what times the steps of the optimizers' exchangers."""
        for number, optimizer in enumerate(self._optimizers):
            for place, exchanger in enumerate(optimizer.exchange.exchangers):
                if isinstance(exchanger.observer, StepTimes):
                    yield f"{number} {place}", exchanger.observer

    @property
    def _spent_s(self) -> float:
        """Seconds spent on network measurements."""
        return sum(plans.planner.spent_s for plans in self._plans.values())

    @property
    def _calls(self) -> int:
        """Largest number of steps per exchange: accumulation exchanges once in several."""
        steps = (self._optimizers[n].gradient_accumulation_steps or 1 for n in self._plans)
        return max(steps, default=1)

    def _decide(self) -> None:
        """Decides once all ranks have timed enough steps."""
        everybody = exchange_objects([self._found, self._trace_s], runtime.wire(), "tp.choose_plan")
        ranks = [found for found, _ in everybody]
        if any(found is None for found in ranks):
            # A rank has timed too few steps; the next epoch may have more.
            return
        self._end = 0
        cost_s = LEAST_GAIN * max(trace_s for _, trace_s in everybody)
        joined = {
            key: Measured.of_all([found[key] for found in ranks])
            for key in ranks[0]
            if all(key in found for found in ranks)
        }
        # A difference of plans that are close must repay a trace, too.
        longest_s = max((one.step_s for one in joined.values()), default=0.0)
        races = RACED_WITHIN * longest_s * self._updates_left > cost_s
        # Where epochs may end early, no step before the change could send residuals.
        flushes, saved_s = not self._session.watches_absence, 0.0
        for number, plans in self._plans.items():
            if not plans.planner.has_decided:
                keys = (f"{number} {place}" for place, _ in enumerate(plans.agreed_exchangers))
                found = [joined.get(key) for key in keys]
                saved_s += plans.planner.propose(plans, found, races, flushes)
        self._is_changing = (saved_s + CLOCKS_S) * self._updates_left > cost_s
        for plans in () if self._is_changing else self._plans.values():
            plans.planner.proposed.clear()
            plans.planner.apply(plans)
        if any(plans.planner.proposed for plans in self._plans.values()):
            runtime.say(
                "tfposeidon: the plan was updated from measured times; the predicted step is "
                "%.3g ms shorter.",
                1e3 * saved_s,
            )

    def _change(self) -> None:
        """Applies the proposed plans once their predecessors have sent all residuals."""
        # A list, so that all of them are asked to.
        if all([plans.planner.has_flushed(plans) for plans in self._plans.values()]):  # noqa: C419
            self._is_changing = False
            for plans in self._plans.values():
                plans.planner.apply(plans)
            self._session.retrace()

    @property
    def _updates_left(self) -> float:
        """Remaining updates; as many as are done if the length of epochs is unknown."""
        steps, epochs = self.params.get("steps"), self.params.get("epochs", 1)
        left = self._steps if steps is None else steps * (epochs - self._epoch) - self._batches
        return max(0, left) / self._calls

"""Times of an optimizer's steps on this rank, in variables that the steps themselves update.

The planner uses their means to predict which communication computation hides.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfposeidon.autotune.simulation import Timeline
from tfposeidon.exchange.observer import Done, clock_variable, time_after
from tfposeidon.exchange.plan import Plan
from tfposeidon.gradients.description import Description, GradientReader


@dataclass(frozen=True)
class MeanTimes:
    """Mean times of some steps, in seconds from the end of the previous exchange.

    `first_s` is the time of the first gradient, `compute_s` that of the last, and `step_s` that of
    the last mean. `step_s - compute_s` is exposed communication.
    """

    first_s: float
    compute_s: float
    step_s: float


class StepTimes:
    """Observer that sums the times of steps, for one list of variables.

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
    def means(self) -> MeanTimes | None:
        """Means over the steps since `reset`; `None` if there were none."""
        *sums, steps = self._sums.numpy().tolist()
        if not steps:
            return None
        first_s, compute_s, step_s = (value / steps for value in sums)
        return MeanTimes(first_s, compute_s, step_s)

    @property
    def sizes(self) -> list[float]:
        """Size of the structure of each gradient in the last step, 0 without one."""
        sizes: list[float] = self._sizes.numpy().tolist()
        return sizes


@dataclass(frozen=True)
class Measured:
    """Measurements of one list of variables, the same on all ranks.

    Times are in seconds from the end of one exchange, to the first and last gradient and the end of
    the next. `sizes` has the size of each gradient's structure on a rank; 0 without one.
    """

    first_s: float
    compute_s: float
    step_s: float
    sizes: tuple[float, ...]

    @property
    def timeline(self) -> Timeline:
        """Times of the gradients of a step."""
        return Timeline.even(
            variables=len(self.sizes),
            # The clock may have been set back during a step.
            first_s=max(0.0, min(self.first_s, self.compute_s)),
            compute_s=max(0.0, self.compute_s),
        )

    def sized(self, descriptions: Sequence[Description]) -> list[Description]:
        """Returns descriptions whose structures have the measured sizes."""
        pairs = zip(descriptions, self.sizes, strict=True)
        return [description.sized(size) if size else description for description, size in pairs]

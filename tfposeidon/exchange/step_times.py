"""Times of an optimizer's steps on this rank, in variables that the steps themselves update.

The planner uses their means to predict which communication computation hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfposeidon.gradients.description import Description, tensors_of
from tfposeidon.native import library
from tfposeidon.planning.simulation import Timeline


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
    """Sums of the times of steps, for one list of variables.

    A step begins when the previous exchange ends, so that input and update count as computation.
    """

    def __init__(self) -> None:
        with tf.init_scope():
            # Use float64: float32 seconds since 1970 have a resolution of 128 s.
            self._end_s = _variable([], "end_of_exchange")
            self._sums = _variable([4], "step_times")

    def record(self, first_s: tf.Tensor, ready_s: tf.Tensor, end_s: tf.Tensor) -> None:
        """Adds a step, in ops of the step; times are float64 seconds since 1970."""
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


def time_after(gradients: Sequence[Any]) -> tf.Tensor:
    """Returns the time at which all gradients are ready, in float64 seconds since 1970."""
    tensors = [tensor for gradient in gradients for tensor in tensors_of(gradient)]
    # `tf.timestamp` would wait for all earlier stateful ops, such as Python functions in the
    # backward pass, regardless of its control dependencies.
    return library().tfposeidon_time_after(values=tensors) if tensors else tf.timestamp()


def _variable(shape: list[int], name: str) -> tf.Variable:
    return tf.Variable(tf.zeros(shape, tf.float64), trainable=False, name=name)


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

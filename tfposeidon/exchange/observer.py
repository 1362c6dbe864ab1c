"""Observes traced steps: an observer adds ops, such as clocks. By default, there is none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfposeidon.gradients import Description, tensors_of
from tfposeidon.native import library

Done = Callable[[Sequence[Any]], None]
"""Receives the averaged gradients of a step after the exchange, while the step is traced."""


class Observer(Protocol):
    """Observes the exchange of a step while it is traced."""

    def ready(
        self,
        descriptions: Sequence[Description],
        gradients: Sequence[Any],
        sent: Sequence[Any],
        replicated: Collection[Any],
    ) -> Done:
        """Receives this rank's gradients before the exchange; returns a callback to run after it.

        `sent` has the same gradients, some of them as structures that the plan exchanges.
        `replicated` has the variables with the same values on all ranks.
        """


class ExposedTime:
    """Sums the times from a step's last local gradient to its last averaged gradient."""

    def __init__(self) -> None:
        self.has_observed = False
        with tf.init_scope():
            self._sum = clock_variable([], "exposed_s")

    @property
    def seconds(self) -> float:
        """Exposed communication of all steps so far."""
        return float(self._sum.numpy())

    def ready(
        self,
        descriptions: Sequence[Description],
        gradients: Sequence[Any],
        sent: Sequence[Any],
        replicated: Collection[Any],
    ) -> Done:
        self.has_observed = True
        ready_s = time_after(sent)

        def done(means: Sequence[Any]) -> None:
            self._sum.assign_add(time_after(means) - ready_s)

        return done


def clock_variable(shape: list[int], name: str) -> tf.Variable:
    """Returns a variable for seconds since 1970 or their sums, initially zeros."""
    # Use float64: float32 seconds since 1970 have a resolution of 128 s.
    return tf.Variable(tf.zeros(shape, tf.float64), trainable=False, name=name)


def time_after(gradients: Sequence[Any]) -> tf.Tensor:
    """Returns the time at which all gradients are ready, in float64 seconds since 1970."""
    tensors = [tensor for gradient in gradients for tensor in tensors_of(gradient)]
    if tensors and tf.config.list_physical_devices("GPU"):
        # Ops on a GPU are only queued when the next op starts. A copy of one element to the CPU
        # waits for all of them.
        with tf.control_dependencies(tensors):
            element = tf.reshape(tensors[-1], [-1])[:1]
        with tf.device("/CPU:0"):
            tensors = [tf.identity(element)]
    # `tf.timestamp` would wait for all earlier stateful ops, such as Python functions in the
    # backward pass, regardless of its control dependencies.
    return library().tfposeidon_time_after(values=tensors) if tensors else tf.timestamp()

"""Optimizer state that workers and the server exchange, and its mean on the server.

Workers send their state at the end of epochs, and resumed runs start with the mean.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import tensorflow as tf

from tfposeidon.communication.wire import Wire
from tfposeidon.elastic_averaging.calls import give, receive


class Slots(NamedTuple):
    """Optimizer state as a float32 vector, with its number of steps, as bias correction uses it."""

    values: tf.Tensor
    steps: int


def give_slots(wire: Wire, slots: Slots) -> None:
    """Sends optimizer state to the other side of a pair, which calls `receive_slots`."""
    give(wire, slots.values, "tp.slots")
    give(wire, tf.constant([slots.steps], tf.int64), "tp.steps")


def receive_slots(wire: Wire) -> Slots:
    """Returns the optimizer state that the other side of a pair sends with `give_slots`."""
    values = receive(wire, "tp.slots", tf.float32)
    return Slots(values, int(receive(wire, "tp.steps", tf.int64).numpy()[0]))


class ServedSlots:
    """Optimizer state on the server: a mean of the newest states that workers have sent.

    Workers start with it in a resumed run, and after their weights were not finite. A second state
    of the same worker starts a new mean, so that each worker counts once without a stored vector
    per worker. So a fast worker's state may temporarily be the whole mean.
    """

    def __init__(self, start: Slots) -> None:
        self._start_steps = start.steps
        self._values = tf.Variable(start.values, trainable=False)
        self._steps: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def now(self) -> Slots:
        """The mean of the states, and of their numbers of steps."""
        with self._lock:
            steps = list(self._steps.values()) or [self._start_steps]
            return Slots(self._values.read_value(), sum(steps) // len(steps))

    def take(self, wire: Wire, worker: int) -> None:
        """Receives a worker's state after its call, and updates the mean."""
        slots = receive_slots(wire)
        with self._lock:
            if worker in self._steps:
                self._steps.clear()
            self._steps[worker] = slots.steps
            # In place, since the state may be twice as large as the weights.
            tf.raw_ops.ResourceApplyGradientDescent(
                var=self._values.handle,
                alpha=1.0 / len(self._steps),
                delta=self._values - slots.values,
                use_locking=True,
            )

    def give(self, wire: Wire) -> None:
        """Sends the state to a worker after its call."""
        give_slots(wire, self.now)

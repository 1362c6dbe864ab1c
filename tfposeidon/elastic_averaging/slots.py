"""Slots of optimizers on their way between workers and the server, and what the server keeps."""

from __future__ import annotations

import threading
from typing import NamedTuple

import tensorflow as tf

from tfposeidon.communication.wire import Wire
from tfposeidon.elastic_averaging.calls import give, receive


class Slots(NamedTuple):
    """Slots of an optimizer, with the number of steps in which it has gathered them.

    Attributes:
      values: Its slots, a float32 vector.
      steps: Steps that it has taken, by which it may correct the bias of its slots.
    """

    values: tf.Tensor
    steps: int


def give_slots(wire: Wire, slots: Slots) -> None:
    """Gives the other side of a pair slots; it calls `receive_slots`.

    Args:
      wire: Wire of the pair.
      slots: The slots.
    """
    give(wire, slots.values, "tp.slots")
    give(wire, tf.constant([slots.steps], tf.int64), "tp.steps")


def receive_slots(wire: Wire) -> Slots:
    """Returns the slots that the other side of a pair gives.

    Args:
      wire: Wire of the pair.
    """
    values = receive(wire, "tp.slots", tf.float32)
    return Slots(values, int(receive(wire, "tp.steps", tf.int64).numpy()[0]))


class ServedSlots:
    """An optimizer's slots on the server: a mean of the newest that workers have handed over.

    Each worker begins with them, in a run that is resumed or where its own weights were not finite.

    Slots of a worker that is in the mean already begin another one, so that each worker is in it
    once at most, without a vector for each of them. A fast worker's are then the mean for a while.

    Args:
      start: Slots that all workers begin with.
    """

    def __init__(self, start: Slots) -> None:
        self._start_steps = start.steps
        self._values = tf.Variable(start.values, trainable=False)
        self._steps: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def now(self) -> Slots:
        """The mean of slots, and of the steps in which they were gathered."""
        with self._lock:
            steps = list(self._steps.values()) or [self._start_steps]
            return Slots(self._values.read_value(), sum(steps) // len(steps))

    def take(self, wire: Wire, worker: int) -> None:
        """Takes a worker's slots, once it has called.

        Args:
          wire: Wire of the pair.
          worker: The worker's rank.
        """
        slots = receive_slots(wire)
        with self._lock:
            if worker in self._steps:
                self._steps.clear()
            self._steps[worker] = slots.steps
            # In place, as they may be twice as large as the weights.
            tf.raw_ops.ResourceApplyGradientDescent(
                var=self._values.handle,
                alpha=1.0 / len(self._steps),
                delta=self._values - slots.values,
                use_locking=True,
            )

    def give(self, wire: Wire) -> None:
        """Gives a worker the slots, once it has called.

        Args:
          wire: Wire of the pair.
        """
        give_slots(wire, self.now)

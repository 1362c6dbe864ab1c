"""Slots of optimizers on their way between workers and the server, and what the server keeps."""

from __future__ import annotations

import threading
from typing import NamedTuple

import tensorflow as tf

from tfposeidon.asynchronous.calls import give, receive
from tfposeidon.communication.wire import Wire


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

    Slots of a worker that hands over others replace the mean, so that it has each worker's once,
    and not one vector for each of them.

    Args:
      start: Slots that all workers begin with.
    """

    def __init__(self, start: Slots) -> None:
        self._start_steps, self._values = start.steps, start.values
        self._in_mean: set[int] = set()
        self._steps: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def now(self) -> Slots:
        """The mean of slots, and of the steps of all workers, as they were handed over last."""
        with self._lock:
            steps = list(self._steps.values()) or [self._start_steps]
            return Slots(self._values, sum(steps) // len(steps))

    def take(self, wire: Wire, worker: int) -> None:
        """Takes a worker's slots, once it has called.

        Args:
          wire: Wire of the pair.
          worker: The worker's rank.
        """
        slots = receive_slots(wire)
        with self._lock:
            if worker in self._in_mean:
                self._in_mean.clear()
            self._in_mean.add(worker)
            share = 1.0 / len(self._in_mean)
            self._values = self._values + share * (slots.values - self._values)
            self._steps[worker] = slots.steps

    def give(self, wire: Wire) -> None:
        """Gives a worker the slots, once it has called.

        Args:
          wire: Wire of the pair.
        """
        give_slots(wire, self.now)

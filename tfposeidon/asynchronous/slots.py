"""Slots of optimizers on their way between workers and the server, and what the server keeps."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

import tensorflow as tf

from tfposeidon.asynchronous.calls import give, receive
from tfposeidon.communication.wire import Wire

_STEPS = 2**20
"""Steps that one word counts: float32 holds whole numbers exactly up to 2**24."""


class Slots(NamedTuple):
    """What an optimizer has gathered, and in how many steps: the two belong together.

    Attributes:
      values: Its slots, a float32 vector.
      steps: Steps that it has taken, by which it may correct the bias of its slots.
    """

    values: tf.Tensor
    steps: int


def to_vector(slots: Slots) -> tf.Tensor:
    """Returns slots as they travel: a float32 vector that ends with two words for the steps.

    Args:
      slots: The slots.
    """
    words = [slots.steps // _STEPS, slots.steps % _STEPS]
    return tf.concat([slots.values, tf.constant(words, tf.float32)], 0)


def from_vector(vector: tf.Tensor) -> Slots:
    """Returns slots from what `to_vector` has returned.

    Args:
      vector: Float32 vector.
    """
    high, low = vector[-2:].numpy()
    return Slots(vector[:-2], int(high) * _STEPS + int(low))


class ServedSlots:
    """An optimizer's slots on the server: a mean of those that workers have handed over.

    Each worker begins with them, in a run that is resumed or where its own weights were not finite.

    Args:
      start: Slots that all workers begin with.
      workers: Ranks of the workers.
    """

    def __init__(self, start: Slots, workers: Iterable[int]) -> None:
        self._values, self._given = start.values, 0
        self._steps = dict.fromkeys(workers, start.steps)
        self._lock = threading.Lock()

    @property
    def now(self) -> Slots:
        """The mean of the slots, and of the workers' steps, as they were handed over last."""
        with self._lock:
            return Slots(self._values, sum(self._steps.values()) // len(self._steps))

    def take(self, wire: Wire, worker: int) -> None:
        """Takes a worker's slots, once it has called.

        Args:
          wire: Wire of the pair.
          worker: The worker's rank.
        """
        slots = from_vector(receive(wire, "tp.slots"))
        with self._lock:
            self._given += 1
            # The first ones replace those of the start. Later the newest of all workers count.
            share = 1.0 / min(self._given, len(self._steps))
            self._values = self._values + share * (slots.values - self._values)
            self._steps[worker] = slots.steps

    def give(self, wire: Wire) -> None:
        """Gives a worker the slots, once it has called.

        Args:
          wire: Wire of the pair.
        """
        give(wire, to_vector(self.now), "tp.slots")

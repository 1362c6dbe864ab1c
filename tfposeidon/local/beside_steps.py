"""Rounds whose exchange runs runs beside steps, and is taken after a step that all ranks know."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfposeidon.exchange.step_times import time_after
from tfposeidon.local.background import Background
from tfposeidon.local.meeting import Found, Meeting, Sent


class BesideSteps:
    """The round that is under way, if any.

    What this rank has contributed lies in variables, so that a run that is resumed in the middle
    makes the exchange once more.

    Args:
      meeting: What ranks do in a round.

    Attributes:
      in_flight: Bool variable: True while a round is under way.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        # On the CPU, as branches follow from them.
        with tf.init_scope(), tf.device("/CPU:0"):
            self.in_flight = tf.Variable(False, trainable=False, name="in_flight")
            self._count = tf.Variable(tf.zeros([]), trainable=False, name="sent_count")
            self._finite = tf.Variable(True, trainable=False, name="sent_finite")
        self._sent: list[tf.Variable] = []
        self._background = Background(lambda: meeting.traced(self._exchange)())

    def prepare(self) -> None:
        """Makes the variables that steps need, if there are none yet."""
        with tf.init_scope():
            for variable in self._meeting.centre.variables[len(self._sent) :]:
                zeros = tf.zeros_like(tf.convert_to_tensor(variable))
                name = f"sent_{len(self._sent)}"
                self._sent.append(tf.Variable(zeros, trainable=False, name=name))

    @property
    def variables(self) -> list[tf.Variable]:
        """What a resumed run needs of it, the same number on each rank."""
        return [self.in_flight, self._count, self._finite, *self._sent]

    def send(self, sent: Sent, number: tf.Tensor) -> None:
        """Begins a round.

        Args:
          sent: What this rank contributes.
          number: Number of the round, an int64 scalar.
        """
        values = [*sent.differences, *sent.statistics]
        kept = [variable.assign(v) for variable, v in zip(self._sent, values, strict=True)]
        kept += [self._count.assign(sent.count), self._finite.assign(sent.finite)]
        self.in_flight.assign(True)
        with tf.control_dependencies(kept):
            tf.py_function(self._background.start, [number], [])

    def arrive(self, number: tf.Tensor) -> None:
        """Ends the round: waits for what it has found, and follows.

        Args:
          number: Number of the round.
        """
        sent = self._sent_before()
        begin = time_after([sent.count])
        with tf.control_dependencies([begin]):
            done = self._wait(number)
        with tf.control_dependencies([done]):
            found = self._found(sent)
        self._meeting.exchange.add_exposed(time_after(found.means) - begin)
        self._meeting.settle(sent, found, is_late=True)
        self.in_flight.assign(False)

    def discard(self) -> None:
        """Drops the round, once its exchange is done."""
        self._background.discard()
        self.in_flight.assign(False)

    def _sent_before(self) -> Sent:
        values, trained = [v.read_value() for v in self._sent], self._meeting.centre.trained
        count, finite = self._count.read_value(), self._finite.read_value()
        return Sent(values[:trained], values[trained:], count, finite)

    def _exchange(self) -> list[tf.Tensor]:
        found = self._meeting.exchanged(self._sent_before())
        flags = [found.total, found.counts, found.absent]
        return [*found.means, *found.statistics, *found.states, *flags]

    def _wait(self, number: tf.Tensor) -> tf.Tensor:
        """Waits for the exchange that is under way, and returns True."""

        def look(_: tf.Tensor) -> tuple[tf.Tensor]:
            is_done = tf.py_function(self._background.is_done, [number], tf.bool)
            return (tf.ensure_shape(is_done, []),)

        (done,) = tf.while_loop(
            lambda done: tf.logical_not(done), look, [tf.constant(False)], parallel_iterations=1
        )
        return done

    def _found(self, sent: Sent) -> Found:
        """Returns what `_exchange` has returned."""
        states = itertools.chain(*self._meeting.exchanger.states.variables)
        like = [*sent.differences, *sent.statistics, *map(tf.convert_to_tensor, states)]
        dtypes = [*(value.dtype for value in like), tf.float32, tf.bool, tf.float32]
        shapes = [*(known.shape for known in like), *[tf.TensorShape([])] * 3]
        returned: Sequence[Any] = tf.py_function(self._background.result, [], dtypes)
        *values, total, counts, absent = [
            tf.ensure_shape(value, shape) for value, shape in zip(returned, shapes, strict=True)
        ]
        trained, all_sent = len(sent.differences), len(sent.differences) + len(sent.statistics)
        return Found(
            means=values[:trained],
            statistics=values[trained:all_sent],
            total=total,
            counts=counts,
            absent=absent,
            states=values[all_sent:],
        )

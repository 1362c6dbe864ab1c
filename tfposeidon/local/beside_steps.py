"""Rounds whose exchange runs beside steps, and is taken after a step that all ranks know."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfposeidon.exchange.step_times import time_after
from tfposeidon.local.background import Background
from tfposeidon.local.meeting import Found, Meeting, Opened, Part, Sent, found_of


class BesideSteps:
    """The round that is under way, if any.

    What this rank has contributed lies in variables, so that a run that is resumed in the middle
    makes the exchange once more.

    Args:
      meeting: What ranks do in a round.
      steps: Steps over which its buckets are spread, on all ranks alike; 1 exchanges all at once.

    Attributes:
      in_flight: Bool variable: True while a round is under way.
    """

    def __init__(self, meeting: Meeting, steps: int) -> None:
        self._meeting, self._steps = meeting, steps
        # On the CPU, as branches follow from them.
        with tf.init_scope(), tf.device("/CPU:0"):
            self.in_flight = tf.Variable(False, trainable=False, name="in_flight")
            self._count = tf.Variable(tf.zeros([]), trainable=False, name="sent_count")
            self._finite = tf.Variable(True, trainable=False, name="sent_finite")
        self._sent: list[tf.Variable] = []
        self._background = Background(self._exchange)

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

    @property
    def spreads(self) -> bool:
        """True if its buckets are exchanged after several steps."""
        return self._steps > 1

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
            tf.py_function(self._background.go_on, [number, 0], [])

    def go_on(self, number: tf.Tensor, since: tf.Tensor) -> None:
        """Lets the round exchange the buckets that are due, where it `spreads`.

        Args:
          number: Number of the round.
          since: Steps since its begin, an int64 scalar.
        """
        tf.py_function(self._background.go_on, [number, since], [])

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

    # ------------------------------------------------------------------ in the background

    def _exchange(self, wait_for: Callable[[int], None]) -> list[tf.Tensor]:
        """Exchanges a few buckets after each step, and those of a step after those before.

        So what else a step exchanges, as ranks of a node do, waits for few buckets.

        Args:
          wait_for: Function that returns once so many steps have passed since the round began.

        Returns:
          What the round has found, as `_found` takes it.
        """
        meeting, count = self._meeting, len(self._meeting.exchanger.plan.buckets)
        opened: Opened = meeting.traced(self._open)()
        parts: list[Part] = []
        for step, due in enumerate(spread(count, self._steps)):
            wait_for(step)
            if due:
                parts.append(meeting.traced(self._exchange_buckets, due)(opened.weight))
        everything = Part(
            finite=tf.reduce_all([part.finite for part in parts]),
            means={member: mean for part in parts for member, mean in part.means.items()},
            states=[state for part in parts for state in part.states],
        )
        found = found_of(opened, everything, self._sent[: meeting.centre.trained])
        flags = [found.total, found.counts, found.absent]
        return [*found.means, *found.statistics, *found.states, *flags]

    def _open(self) -> Opened:
        return self._meeting.opened(self._sent_before())

    def _exchange_buckets(self, due: tuple[int, ...], weight: tf.Tensor) -> Part:
        buckets = self._meeting.exchanger.plan.buckets
        members = {member for index in due for member in buckets[index].members}
        differences = [
            variable.read_value() if index in members else None
            for index, variable in enumerate(self._sent[: self._meeting.centre.trained])
        ]
        return self._meeting.exchanged_buckets(differences, weight, due)

    # ------------------------------------------------------------------ in a step

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


def spread(count: int, steps: int) -> list[tuple[int, ...]]:
    """Returns which buckets are exchanged after each step of a round, in their order.

    Args:
      count: Number of buckets.
      steps: Steps over which they are spread.

    >>> spread(5, 3), spread(2, 4)
    ([(0, 1), (2, 3), (4,)], [(0,), (), (1,), ()])
    """
    due = [index * steps // count for index in range(count)]
    return [tuple(i for i in range(count) if due[i] == step) for step in range(steps)]

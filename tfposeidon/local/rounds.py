"""Rounds: how far ranks are from the centre is exchanged once in several steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfposeidon.exchange.step_times import time_after
from tfposeidon.local.beside_steps import BesideSteps
from tfposeidon.local.meeting import Meeting
from tfposeidon.local.schedule import Schedule
from tfposeidon.state.placement import Placement
from tfposeidon.state.rank_state import StateDescription


class Rounds:
    """Counts steps, and has ranks meet when a round is due.

    Args:
      meeting: What ranks do in a round.
      schedule: When rounds are.
      number: Keras variable that counts rounds: not steps, of which ranks with fewer batches have
        done fewer.
      spreads: True if a round beside steps exchanges some of its buckets after each of them.

    Attributes:
      centre: The centre, beside what this rank trains.
    """

    def __init__(self, meeting: Meeting, schedule: Schedule, number: Any, spreads: bool) -> None:
        self._meeting, self._schedule, self._number = meeting, schedule, number
        self.centre = meeting.centre
        # On the CPU, as branches follow from them.
        with tf.init_scope(), tf.device("/CPU:0"):
            self._since = _counter("steps_of_the_round", tf.int64)
            self._samples = _counter("samples_of_the_round", tf.float32)
        self._beside: BesideSteps | None = None
        if schedule.delay:
            self._beside = BesideSteps(meeting, schedule.delay if spreads else 1)

    def prepare(self, statistics: Sequence[Any]) -> None:
        """Makes the variables that steps need beside the centre, if there are none yet.

        Args:
          statistics: Floating-point variables that travel with the weights.
        """
        self.centre.carry(statistics)
        if self._beside is not None:
            self._beside.prepare()

    def begin(self) -> None:
        """Begins a step, before the update of this rank's weights."""
        self.centre.begin()

    def step(self, count: Any) -> None:
        """Ends a step, after the update, and carries out the round that is due, if any.

        Args:
          count: Samples of the step on this rank, a scalar; `None` for equal weights.
        """
        self._since.assign_add(1)
        self._samples.assign_add(tf.cast(1.0 if count is None else count, tf.float32))
        starts = self._number < self._schedule.start_after
        if self._beside is not None:
            if self._beside.spreads:
                self._go_on()
            self._arrive(self._since >= self._schedule.delay)
        every = tf.where(starts, tf.constant(1, tf.int64), self._schedule.every)
        tf.cond(self._since >= every, lambda: self._begin_round(starts), lambda: None)

    def _begin_round(self, starts: tf.Tensor) -> None:
        if self._beside is None:
            self._exchange_now()
            return
        if not self._schedule.start_after:
            # No round is at once, and a step that held one would take a third longer to trace.
            self._send()
            return

        def exchange_now() -> None:
            self._exchange_now()

        tf.cond(starts, exchange_now, self._send)

    def end(self, eagerly: bool) -> tf.Tensor:
        """Takes part in one round with what this rank has, as it is out of data.

        Args:
          eagerly: True for steps that run eagerly: their collectives have other names than those of
            graphs, and match only eager ones.

        Returns:
          Number of ranks that are out of data, a float32 scalar.
        """
        return self._end() if eagerly else self._meeting.traced(self._end)()

    def _end(self) -> tf.Tensor:
        # A rank without a single step begins here.
        self.centre.begin()
        if self._beside is not None:
            self._arrive(True)
        return self._exchange_now(has_batch=False)

    def forget(self) -> None:
        """Makes this rank go on from what the variables hold, and drops what it has done since."""
        if self._beside is not None:
            self._beside.discard()
        self._meeting.exchanger.states.drop()
        self._since.assign(0)
        self._samples.assign(0.0)
        self.centre.forget()

    # ------------------------------------------------------------------ one round

    def _exchange_now(self, has_batch: bool = True) -> tf.Tensor:
        meeting = self._meeting
        sent = meeting.contribution(self._samples.read_value())
        ready = time_after(sent.differences)
        found = meeting.exchanged(sent, has_batch)
        meeting.exchange.add_exposed(time_after(found.means) - ready)
        meeting.settle(sent, found, is_late=False)
        self._restart()
        return found.absent

    def _send(self) -> None:
        assert self._beside is not None
        sent = self._meeting.contribution(self._samples.read_value())
        self._restart()
        self._beside.send(sent, tf.convert_to_tensor(self._number))

    def _go_on(self) -> None:
        """Lets the round that is under way, if any, exchange its buckets of this step."""
        beside = self._beside
        assert beside is not None
        number, since = tf.convert_to_tensor(self._number), self._since.read_value()
        tf.cond(beside.in_flight, lambda: beside.go_on(number, since), lambda: None)

    def _arrive(self, is_due: Any) -> None:
        """Ends the round that is under way, if there is one and it is due."""
        beside = self._beside
        assert beside is not None
        number = tf.convert_to_tensor(self._number)
        is_there = tf.logical_and(beside.in_flight, is_due)
        tf.cond(is_there, lambda: beside.arrive(number), lambda: None)

    def _restart(self) -> None:
        self._number.assign_add(1)
        self._since.assign(0)
        self._samples.assign(0.0)

    # ------------------------------------------------------------------ state

    @property
    def has_yet_to_settle(self) -> bool:
        """True if steps were taken and no round has been settled so far."""
        is_late = self._beside is not None and bool(self._beside.in_flight.numpy())
        # Counted when they are sent.
        has_none = int(self._number.numpy()) <= is_late
        return has_none and (is_late or int(self._since.numpy()) > 0)

    @property
    def rank_state(self) -> list[tuple[Any, StateDescription]]:
        """Variables that belong to this rank, each with its description."""
        centre = self.centre
        private = [centre.has_begun, *centre.copies, self._since, self._samples]
        if self._beside is not None:
            private += self._beside.variables
        descriptions = [
            StateDescription(name=f"local {index}", placement=Placement.LOCAL)
            for index, _ in enumerate(private)
        ]
        return list(zip(private, descriptions, strict=True))


def _counter(name: str, dtype: tf.DType) -> tf.Variable:
    return tf.Variable(tf.zeros([], dtype), trainable=False, name=name)

"""Rounds: how far ranks are from the centre is exchanged once in several steps."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from tfposeidon.communication import runtime
from tfposeidon.exchange.exchanger import Exchanger
from tfposeidon.exchange.step import Step
from tfposeidon.exchange.step_times import time_after
from tfposeidon.local.background import Background
from tfposeidon.local.centre import Centre
from tfposeidon.local.rules import Rule
from tfposeidon.state.rank_state import StateDescription

log = logging.getLogger("tfposeidon")


@dataclass(frozen=True)
class Schedule:
    """When rounds are.

    Attributes:
      every: Steps from one round to the next.
      delay: Steps from an exchange to its result; 0 waits for it.
      start_after: Rounds at the beginning that have one step each, without delay.
    """

    every: int
    delay: int
    start_after: int


class _Sent(NamedTuple):
    """What this rank contributes to a round.

    Attributes:
      differences: How far it is from the centre, one tensor for each trained variable.
      statistics: Its values of statistics.
      count: What it counts, a float32 scalar: 0 if it has done nothing, or is not finite.
    """

    differences: list[tf.Tensor]
    statistics: list[tf.Tensor]
    count: tf.Tensor


class _Found(NamedTuple):
    """What a round has found, the same on all ranks but for the state.

    Attributes:
      means: Mean difference of each trained variable.
      statistics: Mean of each statistic.
      counts: True if anybody has contributed and the means are finite, a bool scalar.
      absent: Ranks that were out of data, a float32 scalar.
      states: New values of what schemes keep.
    """

    means: list[tf.Tensor]
    statistics: list[tf.Tensor]
    counts: tf.Tensor
    absent: tf.Tensor
    states: list[tf.Tensor]


class Rounds:
    """Counts steps, and exchanges how far ranks are from the centre when a round is due.

    Args:
      exchange: What makes ranks agree, plans, and counts samples and absent ranks.
      inner: Function that returns the optimizer inside; `fit` may replace it.
      rule: What a round makes of the mean difference.
      schedule: When rounds are.
      variables: Variables that the optimizer trains.
      replicas: Number of replicas that train by themselves: ranks, or nodes.

    Attributes:
      centre: The centre, beside what this rank trains.
    """

    def __init__(
        self,
        exchange: Step,
        inner: Any,
        rule: Rule,
        schedule: Schedule,
        variables: Sequence[Any],
        replicas: int,
    ) -> None:
        self._replicas = replicas
        self._exchange, self._inner, self._rule, self._schedule = exchange, inner, rule, schedule
        self.centre = Centre(variables)
        rule.build(self.centre.copies)
        self._variables = list(variables)
        with tf.init_scope():
            # Not of steps, of which ranks with fewer batches have done fewer.
            self._rounds = _counter("rounds", tf.int64)
            self._since = _counter("steps_of_the_round", tf.int64)
            self._samples = _counter("samples_of_the_round", tf.float32)
            self._in_flight = tf.Variable(False, trainable=False, name="in_flight")
            self._sent_count = _counter("sent_count", tf.float32)
        self._sent: list[tf.Variable] = []
        self._background = Background(self._exchange_sent)

    # ------------------------------------------------------------------ steps

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
        starts = self._rounds < self._schedule.start_after
        if self._schedule.delay:
            arrives = tf.logical_and(self._in_flight, self._since >= self._schedule.delay)
            tf.cond(arrives, self._arrive, lambda: None)
        every = tf.where(starts, tf.constant(1, tf.int64), self._schedule.every)
        tf.cond(self._since >= every, lambda: self._begin_round(starts), lambda: None)

    def _begin_round(self, starts: tf.Tensor) -> None:
        if not self._schedule.delay:
            self._exchange_now()
            return

        def exchange_now() -> None:
            self._exchange_now()

        tf.cond(starts, exchange_now, self._send)

    @tf.function(autograph=False)
    def end(self) -> tf.Tensor:
        """Takes part in one round with what this rank has, as it is out of data.

        Returns:
          Number of ranks that are out of data, a float32 scalar.
        """
        return self.end_eagerly()

    def end_eagerly(self) -> tf.Tensor:
        """Does as `end` for steps that run eagerly.

        Their collectives have other names than those of graphs, and match only eager ones.

        Returns:
          Number of ranks that are out of data, a float32 scalar.
        """
        if self._schedule.delay:
            tf.cond(self._in_flight, self._arrive, lambda: None)
        return self._exchange_now(has_batch=False)

    # ------------------------------------------------------------------ one round

    def _exchange_now(self, has_batch: bool = True) -> tf.Tensor:
        sent = self._contribution()
        ready = time_after(sent.differences)
        found = self._exchanged(sent, has_batch)
        self._exchange.add_exposed(time_after(found.means) - ready)
        self._settle(sent, found, is_late=False)
        self._restart()
        return found.absent

    def _contribution(self) -> _Sent:
        differences = self.centre.differences
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(d)) for d in differences])
        worked = tf.cast(self._since > 0, tf.float32)
        counted = self._samples.read_value() if self._rule.weighs_samples else worked
        count = tf.where(finite, counted, 0.0)
        return _Sent(differences, self.centre.own_statistics, count)

    def _restart(self) -> None:
        self._rounds.assign_add(1)
        self._since.assign(0)
        self._samples.assign(0.0)

    def _exchanged(self, sent: _Sent, has_batch: bool = True) -> _Found:
        exchanger = self._exchange.exchanger(self._variables)
        presence = exchanger.presence(sent.differences, sent.count, has_batch)
        means, states = exchanger.exchange(sent.differences, presence.weight)
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(mean)) for mean in means])
        assert presence.weight is not None
        return _Found(
            means=means,
            statistics=self._mean_statistics(exchanger, sent.statistics, presence.weight),
            counts=tf.logical_and(finite, presence.samples > 0.0),
            absent=presence.absent,
            states=list(itertools.chain(*states)),
        )

    def _mean_statistics(
        self, exchanger: Exchanger, statistics: list[tf.Tensor], weight: tf.Tensor
    ) -> list[tf.Tensor]:
        if not statistics:
            return []
        wire = exchanger.wire
        flat = tf.concat([tf.reshape(tf.cast(s, tf.float32), [-1]) for s in statistics], 0)
        # What does not count need not be finite.
        flat = tf.where(weight > 0.0, flat * weight, tf.zeros_like(flat))
        mean = wire.all_reduce(
            flat, wire.topology.world, f"{exchanger.prefix}.statistics", 1.0 / wire.topology.size
        )
        parts = tf.split(mean, [s.shape.num_elements() for s in statistics])
        pairs = zip(parts, statistics, strict=True)
        return [tf.cast(tf.reshape(part, s.shape), s.dtype) for part, s in pairs]

    def _settle(self, sent: _Sent, found: _Found, is_late: bool) -> None:
        """Moves the centre and this rank by what a round has found."""
        # Here, so that all ranks know of it after the same step.
        self._exchange.absence.record(found.absent)
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(d)) for d in sent.differences])
        before = [tf.identity(copy) for copy in self.centre.copies] if is_late else []
        tf.cond(found.counts, lambda: self._move_centre(found), lambda: None)
        self._follow(sent, tf.logical_not(finite), found.counts, before)
        tf.cond(finite, lambda: None, self._recover)

    def _move_centre(self, found: _Found) -> None:
        centre, exchanger = self.centre, self._exchange.exchanger(self._variables)
        states = itertools.chain(*exchanger.states.variables)
        for variable, value in zip(states, found.states, strict=True):
            variable.assign(value)
        self._rule.move(centre.copies[: centre.trained], found.means)
        for copy, mean in zip(centre.copies[centre.trained :], found.statistics, strict=True):
            copy.assign(mean)

    def _follow(
        self, sent: _Sent, takes_centre: tf.Tensor, counts: tf.Tensor, before: list[tf.Tensor]
    ) -> None:
        """Moves this rank's weights after the centre.

        Args:
          sent: What this rank has contributed.
          takes_centre: True if it goes on from the centre whatever the rule, a bool scalar.
          counts: True if the centre has moved, a bool scalar.
          before: The centre before that, for a result that comes late; else empty.
        """
        # By `where` and not in branches, which would take long to trace; rounds are rare.
        centre, pull = self.centre, self._rule.pull(self._replicas)
        # Who contributed nothing gives up nothing.
        share = tf.where(counts, pull * tf.minimum(sent.count, 1.0), 0.0)
        for index, (variable, copy) in enumerate(zip(centre.variables, centre.copies, strict=True)):
            own, now = tf.convert_to_tensor(variable), tf.convert_to_tensor(copy)
            is_statistic = index >= centre.trained
            if pull < 1.0 or (is_statistic and before):
                # Statistics of ranks that stay apart do so, too.
                moved = own
                if not is_statistic:
                    moved = own - tf.cast(share, own.dtype) * sent.differences[index]
            elif before:
                # What this rank has trained meanwhile stays.
                late = own + (now - before[index]) - sent.differences[index]
                moved = tf.where(counts, late, own)
            else:
                moved = tf.where(counts, now, own)
            variable.assign(tf.where(takes_centre, now, moved))

    def _recover(self) -> None:
        """Makes slots finite again on a rank whose weights were not."""
        for variable in self._inner().variables:
            value = tf.convert_to_tensor(variable)
            if value.dtype.is_floating:
                variable.assign(tf.where(tf.math.is_finite(value), value, tf.zeros_like(value)))
        tf.py_function(_say_recovered, [], [])

    # ------------------------------------------------------------------ rounds beside steps

    def prepare(self, statistics: Sequence[Any]) -> None:
        """Makes the variables that steps need beside the centre, if there are none yet.

        Args:
          statistics: Floating-point variables that travel with the weights.
        """
        self.centre.carry(statistics)
        if not self._schedule.delay:
            return
        with tf.init_scope():
            for variable in self.centre.variables[len(self._sent) :]:
                zeros = tf.zeros_like(tf.convert_to_tensor(variable))
                name = f"sent_{len(self._sent)}"
                self._sent.append(tf.Variable(zeros, trainable=False, name=name))

    def _send(self) -> None:
        sent = self._contribution()
        values = [*sent.differences, *sent.statistics]
        kept = [variable.assign(v) for variable, v in zip(self._sent, values, strict=True)]
        kept.append(self._sent_count.assign(sent.count))
        self._in_flight.assign(True)
        self._restart()
        with tf.control_dependencies(kept):
            tf.py_function(self._background.start, [], [])

    def _sent_before(self) -> _Sent:
        values, trained = [v.read_value() for v in self._sent], self.centre.trained
        return _Sent(values[:trained], values[trained:], self._sent_count.read_value())

    @tf.function(autograph=False)
    def _exchange_sent(self) -> list[tf.Tensor]:
        found = self._exchanged(self._sent_before())
        return [*found.means, *found.statistics, *found.states, found.counts, found.absent]

    def _arrive(self) -> None:
        sent, exchanger = self._sent_before(), self._exchange.exchanger(self._variables)
        states = [tf.convert_to_tensor(v) for v in itertools.chain(*exchanger.states.variables)]
        like = [*sent.differences, *sent.statistics, *states]
        dtypes = [*(value.dtype for value in like), tf.bool, tf.float32]
        begin = time_after([sent.count])
        with tf.control_dependencies([begin]):
            *values, counts, absent = tf.py_function(self._background.result, [], dtypes)
        for value, known in zip(values, like, strict=True):
            value.set_shape(known.shape)
        trained, all_sent = len(sent.differences), len(sent.differences) + len(sent.statistics)
        counts.set_shape([])
        absent.set_shape([])
        found = _Found(
            means=values[:trained],
            statistics=values[trained:all_sent],
            counts=counts,
            absent=absent,
            states=values[all_sent:],
        )
        self._exchange.add_exposed(time_after(found.means) - begin)
        self._settle(sent, found, is_late=True)
        self._in_flight.assign(False)

    # ------------------------------------------------------------------ state

    @property
    def variables(self) -> list[Any]:
        """Variables beside the centre that are equal on all ranks."""
        return [self._rounds, *self._rule.variables]

    @property
    def rank_state(self) -> list[tuple[Any, StateDescription]]:
        """Variables that belong to this rank, each with its description."""
        centre = self.centre
        private = [centre.has_begun, *centre.copies, self._since, self._samples]
        if self._schedule.delay:
            private += [self._in_flight, self._sent_count, *self._sent]
        descriptions = [
            StateDescription(name=f"local {index}", private=True) for index, _ in enumerate(private)
        ]
        return list(zip(private, descriptions, strict=True))


def _counter(name: str, dtype: tf.DType) -> tf.Variable:
    return tf.Variable(tf.zeros([], dtype), trainable=False, name=name)


def _say_recovered() -> None:
    log.warning(
        "tfposeidon: the weights of rank %d are not finite; it goes on from the centre.",
        runtime.rank(),
    )

"""Rounds: how far ranks are from the centre is exchanged once in several steps."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from tfposeidon.communication import runtime
from tfposeidon.communication.wire import numbered_names
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
      finite: True if all of it is finite, a bool scalar.
    """

    differences: list[tf.Tensor]
    statistics: list[tf.Tensor]
    count: tf.Tensor
    finite: tf.Tensor


class _Found(NamedTuple):
    """What a round has found, the same on all ranks but for the state.

    Attributes:
      means: Mean difference of each trained variable.
      statistics: Mean of each statistic.
      total: What all ranks count, a float32 scalar.
      counts: True if anybody has contributed and the means are finite, a bool scalar.
      absent: Ranks that were out of data, a float32 scalar.
      states: New values of what schemes keep.
    """

    means: list[tf.Tensor]
    statistics: list[tf.Tensor]
    total: tf.Tensor
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
      share: Share of this rank in its replica: 1, or one over the ranks of its node.

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
        share: float,
    ) -> None:
        self._replicas, self._share = replicas, share
        self._exchange, self._inner, self._rule, self._schedule = exchange, inner, rule, schedule
        self.centre = Centre(variables)
        rule.build(self.centre.copies)
        self._variables = list(variables)
        # On the CPU, as branches follow from them.
        with tf.init_scope(), tf.device("/CPU:0"):
            # Not of steps, of which ranks with fewer batches have done fewer.
            self._rounds = _counter("rounds", tf.int64)
            self._since = _counter("steps_of_the_round", tf.int64)
            self._samples = _counter("samples_of_the_round", tf.float32)
            self._in_flight = tf.Variable(False, trainable=False, name="in_flight")
            self._sent_count = _counter("sent_count", tf.float32)
            self._sent_finite = tf.Variable(True, trainable=False, name="sent_finite")
        self._sent: list[tf.Variable] = []
        self._background = Background(lambda: self._traced[1]())
        self._traced_for: tuple[Any, int] | None = None

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

    def end(self, eagerly: bool) -> tf.Tensor:
        """Takes part in one round with what this rank has, as it is out of data.

        Args:
          eagerly: True for steps that run eagerly: their collectives have other names than those of
            graphs, and match only eager ones.

        Returns:
          Number of ranks that are out of data, a float32 scalar.
        """
        return self._end() if eagerly else self._traced[0]()

    def _end(self) -> tf.Tensor:
        if self._schedule.delay:
            tf.cond(self._in_flight, self._arrive, lambda: None)
        return self._exchange_now(has_batch=False)

    @property
    def _traced(self) -> tuple[Any, Any]:
        """`_end` and `_exchange_sent` in graphs, made anew for other schemes and statistics."""
        now = self._exchange.exchanger(self._variables), len(self.centre.variables)
        if self._traced_for is None or self._traced_for[0] is not now[0] or self._traced_for != now:
            self._traced_for = now
            self._functions = tuple(
                tf.function(function, autograph=False)
                for function in (self._end, self._exchange_sent)
            )
        return self._functions

    def forget(self) -> None:
        """Makes this rank go on from what the variables hold, and drops what it has done since."""
        self._background.discard()
        self._in_flight.assign(False)
        self._since.assign(0)
        self._samples.assign(0.0)
        self.centre.forget()

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
        differences, statistics = self.centre.differences, self.centre.own_statistics
        finite = _all_finite([*differences, *statistics])
        worked = self._share * tf.cast(self._since > 0, tf.float32)
        counted = self._samples.read_value() if self._rule.weighs_samples else worked
        return _Sent(differences, statistics, tf.where(finite, counted, 0.0), finite)

    def _restart(self) -> None:
        self._rounds.assign_add(1)
        self._since.assign(0)
        self._samples.assign(0.0)

    def _exchanged(self, sent: _Sent, has_batch: bool = True) -> _Found:
        exchanger = self._exchange.exchanger(self._variables)
        # Each round is in a branch of its own, and has the same names in all of them, as those have
        # in which a rank takes part that is out of data.
        with numbered_names(0):
            presence = exchanger.presence(sent.differences, sent.count, has_batch)
            means, states = exchanger.exchange(sent.differences, presence.weight)
            assert presence.weight is not None
            statistics = self._mean_statistics(exchanger, sent.statistics, presence.weight)
        return _Found(
            means=means,
            statistics=statistics,
            total=presence.samples,
            counts=tf.logical_and(_all_finite(means), presence.samples > 0.0),
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
        before = [tf.identity(copy) for copy in self.centre.copies] if is_late else []
        tf.cond(found.counts, lambda: self._move_centre(found), lambda: None)
        self._follow(sent, found.counts, before)
        tf.cond(sent.finite, lambda: None, self._recover)

    def _move_centre(self, found: _Found) -> None:
        centre, exchanger = self.centre, self._exchange.exchanger(self._variables)
        states = itertools.chain(*exchanger.states.variables)
        for variable, value in zip(states, found.states, strict=True):
            variable.assign(value)
        means = found.means
        if not self._rule.weighs_samples:
            # Of all replicas: those that contribute nothing do not move the centre either.
            share = found.total / self._replicas
            means = [mean * tf.cast(share, mean.dtype) for mean in means]
        self._rule.move(centre.copies[: centre.trained], means)
        for variable, copy in zip(self._variables, centre.copies, strict=False):
            constraint = getattr(variable, "constraint", None)
            if constraint is not None:
                copy.assign(constraint(tf.convert_to_tensor(copy)))
        for copy, mean in zip(centre.copies[centre.trained :], found.statistics, strict=True):
            copy.assign(mean)

    def _follow(self, sent: _Sent, counts: tf.Tensor, before: list[tf.Tensor]) -> None:
        """Moves this rank's weights after the centre.

        Args:
          sent: What this rank has contributed.
          counts: True if the centre has moved, a bool scalar.
          before: The centre before that, for a result that comes late; else empty.
        """
        # By `where` and not in branches, which would take long to trace; rounds are rare.
        centre, pull = self.centre, self._rule.pull(self._replicas)
        # Who contributed nothing gives up nothing.
        share = tf.where(tf.logical_and(counts, sent.count > 0.0), pull, 0.0)
        for index, (variable, copy) in enumerate(zip(centre.variables, centre.copies, strict=True)):
            own, now = tf.convert_to_tensor(variable), tf.convert_to_tensor(copy)
            is_trained = index < centre.trained
            if is_trained and pull < 1.0:
                moved = own - tf.cast(share, own.dtype) * sent.differences[index]
            elif is_trained and before:
                # What this rank has trained meanwhile stays.
                late = own + (now - before[index]) - sent.differences[index]
                moved = tf.where(counts, late, own)
            elif pull < 1.0 or before:
                # Statistics of ranks that stay apart.
                moved = own
            else:
                moved = tf.where(counts, now, own)
            variable.assign(tf.where(sent.finite, moved, now))

    def _recover(self) -> None:
        """Begins with new slots on a rank whose weights were not finite."""
        for variable in self._inner().variables:
            # Scalars are rates, scales and counters.
            if tf.as_dtype(variable.dtype).is_floating and len(variable.shape):
                variable.assign(tf.zeros_like(tf.convert_to_tensor(variable)))
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
        kept += [self._sent_count.assign(sent.count), self._sent_finite.assign(sent.finite)]
        self._in_flight.assign(True)
        self._restart()
        with tf.control_dependencies(kept):
            tf.py_function(self._background.start, [self._rounds.read_value()], [])

    def _sent_before(self) -> _Sent:
        values, trained = [v.read_value() for v in self._sent], self.centre.trained
        count, finite = self._sent_count.read_value(), self._sent_finite.read_value()
        return _Sent(values[:trained], values[trained:], count, finite)

    def _exchange_sent(self) -> list[tf.Tensor]:
        sent = self._sent_before()
        found = self._exchanged(sent)
        # Means of bfloat16 come in float32.
        pairs = zip(found.means, sent.differences, strict=True)
        means = [tf.cast(mean, difference.dtype) for mean, difference in pairs]
        flags = [found.total, found.counts, found.absent]
        return [*means, *found.statistics, *found.states, *flags]

    def _wait(self) -> tf.Tensor:
        """Waits for the exchange that is under way, and returns True."""
        number = self._rounds.read_value()

        def look(_: tf.Tensor) -> tuple[tf.Tensor]:
            is_done = tf.py_function(self._background.is_done, [number], tf.bool)
            return (tf.ensure_shape(is_done, []),)

        (done,) = tf.while_loop(
            lambda done: tf.logical_not(done), look, [tf.constant(False)], parallel_iterations=1
        )
        return done

    def _arrive(self) -> None:
        sent, exchanger = self._sent_before(), self._exchange.exchanger(self._variables)
        states = [tf.convert_to_tensor(v) for v in itertools.chain(*exchanger.states.variables)]
        like = [*sent.differences, *sent.statistics, *states]
        dtypes = [*(value.dtype for value in like), tf.float32, tf.bool, tf.float32]
        begin = time_after([sent.count])
        with tf.control_dependencies([begin]):
            done = self._wait()
        with tf.control_dependencies([done]):
            found_values = tf.py_function(self._background.result, [], dtypes)
        shapes = [*(known.shape for known in like), *[tf.TensorShape([])] * 3]
        *values, total, counts, absent = [
            tf.ensure_shape(value, shape) for value, shape in zip(found_values, shapes, strict=True)
        ]
        trained, all_sent = len(sent.differences), len(sent.differences) + len(sent.statistics)
        found = _Found(
            means=values[:trained],
            statistics=values[trained:all_sent],
            total=total,
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
    def has_yet_to_settle(self) -> bool:
        """True if steps were taken and no round has been settled so far."""
        is_late = bool(self._in_flight.numpy())
        # Counted when they are sent.
        has_none = int(self._rounds.numpy()) <= is_late
        return has_none and (is_late or int(self._since.numpy()) > 0)

    @property
    def rank_state(self) -> list[tuple[Any, StateDescription]]:
        """Variables that belong to this rank, each with its description."""
        centre = self.centre
        private = [centre.has_begun, *centre.copies, self._since, self._samples]
        if self._schedule.delay:
            private += [self._in_flight, self._sent_count, self._sent_finite, *self._sent]
        descriptions = [
            StateDescription(name=f"local {index}", private=True) for index, _ in enumerate(private)
        ]
        return list(zip(private, descriptions, strict=True))


def kept_alone(rule: Rule, variables: Sequence[Any]) -> list[Any]:
    """Returns variables like those of `Rounds`, for one rank, which has no rounds.

    Args:
      rule: The rule, which is built.
      variables: Variables that the optimizer trains.
    """
    # Of copies, as in rounds: Keras names what an optimizer keeps after them.
    rule.build(Centre(variables).copies)
    with tf.init_scope(), tf.device("/CPU:0"):
        return [_counter("rounds", tf.int64), *rule.variables]


def _counter(name: str, dtype: tf.DType) -> tf.Variable:
    return tf.Variable(tf.zeros([], dtype), trainable=False, name=name)


def _all_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors])


def _say_recovered() -> None:
    log.warning(
        "tfposeidon: the weights of rank %d are not finite; it goes on from the centre.",
        runtime.rank(),
    )

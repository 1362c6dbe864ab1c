"""Synchronizes ranks once in several steps, in Python between the executions of train functions.

Think of three graphs: `contribute` computes the differences between local and global weights,
`exchange` averages them over the ranks, and `apply` updates the global weights with the average,
and then this rank's weights. With `overlap_steps`, a thread runs `exchange` during the next steps,
and all ranks run `apply` after that number of steps.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import tensorflow as tf

from tfposeidon.communication import runtime
from tfposeidon.communication.wire import pack, summed_dtype, unpack
from tfposeidon.exchange.exchanger import Exchanger
from tfposeidon.exchange.means import weight_of
from tfposeidon.exchange.step import Step
from tfposeidon.local.global_weights import GlobalWeights, either, is_finite
from tfposeidon.local.outer_optimizers import Rule
from tfposeidon.local.schedule import Contribution, ExchangeResult, Schedule, in_background
from tfposeidon.optimizers.wrapper import reset_slots
from tfposeidon.state.placement import Placement, StateDescription

log = logging.getLogger("tfposeidon")

EXIT_PATIENCE_S = 3.0
"""Maximum seconds for which an exiting process waits for a pending exchange."""


class Synchronization:
    """Counts steps, and synchronizes after `sync_every` of them.

    A replica is a group of ranks with equal weights: one rank, or with `hierarchical` the ranks of
    one node. `_share` is this rank's share in its replica.
    """

    def __init__(
        self,
        exchange: Step,
        inner: Callable[[], Any],
        outer: Rule,
        variables: Sequence[Any],
        schedule: Schedule,
        number: Any,
        hierarchical: bool,
    ) -> None:
        # `inner` is a function, because `fit` may replace the inner optimizer.
        self._exchange, self._inner, self._outer = exchange, inner, outer
        self._variables, self._schedule, self._number = list(variables), schedule, number
        topology = runtime.wire().topology
        self._replicas = len(topology.nodes) if hierarchical else topology.size
        self._share = 1.0 / topology.node.size if hierarchical else 1.0
        self.weights = GlobalWeights(variables)
        outer.build(self.weights.copies)
        with tf.init_scope(), tf.device("/CPU:0"):
            self._samples = tf.Variable(0.0, trainable=False, name="samples")
            self._count = tf.Variable(0.0, trainable=False, name="sent_count")
            self._finite = tf.Variable(True, trainable=False, name="sent_finite")
        self._steps = 0
        self._has_counted = self._have_agreed = self._is_pending = False
        self._pending: tuple[Contribution, Future[ExchangeResult]] | None = None
        # Checkpoints include the sent values, so that a resumed run can repeat the exchange.
        self._sent: list[tf.Variable] = []
        self._graphs: dict[str, Any] = {}
        self._traced_for: tuple[Exchanger, int] | None = None
        # `exposed_s` sums the seconds for which steps have waited for exchanges.
        self.exposed_s = 0.0
        # Wait before Horovod shuts down, because its shutdown aborts a pending exchange.
        atexit.register(_wait_at_exit, weakref.ref(self))

    def prepare(self, statistics: Sequence[Any]) -> None:
        """Creates missing variables; `statistics` are synchronized together with the weights."""
        self.weights.add_statistics(statistics)
        if self._schedule.overlap_steps:
            with tf.init_scope():
                for variable in self.weights.variables[len(self._sent) :]:
                    zeros = tf.zeros_like(tf.convert_to_tensor(variable))
                    self._sent.append(tf.Variable(zeros, trainable=False, name="sent"))

    # ------------------------------------------------------------------ steps

    def count_samples(self, count: Any) -> None:
        """Adds an update's number of samples, within a step; `None` weights all steps equally."""
        self._samples.assign_add(tf.cast(1.0 if count is None else count, tf.float32))

    def begin_step(self) -> None:
        """Assigns this rank's local weights to the variables; the first step initializes them."""
        if not self.weights.has_begun:
            # All ranks start from the assigned weights, so earlier error-feedback state is invalid.
            self._restart_count()
            if self.exchanger.states.exist:
                self.exchanger.states.drop()
        self.weights.begin()

    def end_step(self, steps: int = 1) -> None:
        """Counts executed steps, and synchronizes when the schedule requires it."""
        self._has_counted = True
        if not self._have_agreed:
            # Ranks agree on the exchange in the optimizer's first step.
            self._have_agreed = self.exchanger.prefix is not None
            if not self._have_agreed:
                return
        self._steps += steps
        if self._is_pending:
            _, future = self._pending_exchange()
            has_failed = future.done() and future.exception() is not None
            if has_failed or self._steps >= self._schedule.overlap_steps:
                self._finish()
        warmup = self._schedule.warmup_steps
        is_warming_up = warmup > 0 and int(self._number.numpy()) < warmup
        if self._steps < (1 if is_warming_up else self._schedule.sync_every):
            return
        if self._schedule.overlap_steps and not is_warming_up:
            self._start()
        else:
            self._synchronize(has_data=True)

    def join(self) -> bool:
        """Joins the next synchronization without data; returns True if no other rank has data."""
        # Evaluation may have shown the global weights before the end of the epoch.
        was_shown = self.weights.is_shown
        self.begin_step()
        self._finish()
        absent = self._synchronize(has_data=False)
        if was_shown:
            self.weights.show()
        return absent == self.exchanger.wire.topology.size

    def restart(self) -> None:
        """Restarts from the values of the variables, and discards a pending exchange."""
        self.discard()
        self.weights.restart()

    def warn_if_none_has_completed(self) -> None:
        """Warns if training ended before the first synchronization."""
        has_none = int(self._number.numpy()) <= self._is_pending
        if has_none and (self._is_pending or self._steps > 0):
            runtime.log_once(
                "tfposeidon: LocalUpdates(sync_every=%d): training ended before the first "
                "synchronization, so the model holds its initial weights. Use a smaller "
                "`sync_every`, or train for longer.",
                self._schedule.sync_every,
            )

    def check_steps_are_counted(self) -> None:
        """Refuses updates if no step was ever counted."""
        has_steps = self._steps > 0 or self._has_counted
        if not has_steps and float(self._samples.numpy()) > 0.0:
            raise RuntimeError(
                "Steps must be counted, so that ranks synchronize. Received: steps without a "
                "call of LocalUpdates.end_step(). Call it after each step of a custom loop."
            )

    # ------------------------------------------------------------------ one synchronization

    def _synchronize(self, has_data: bool) -> int:
        sent = self._contribute()
        begin = time.perf_counter()
        found = self._graph("exchange" if has_data else "join")(sent)
        absent = self._apply(sent, found, is_late=False)
        self.exposed_s += time.perf_counter() - begin
        return absent

    def _start(self) -> None:
        sent = self._contribute()
        values = [*sent.differences, *sent.statistics, sent.count, sent.finite]
        for variable, value in zip([*self._sent, self._count, self._finite], values, strict=True):
            variable.assign(value)
        self._is_pending = True
        self._pending = self._in_background(sent)

    def _finish(self) -> None:
        """Waits for the pending exchange, if any, and applies its result."""
        if not self._is_pending:
            return
        sent, future = self._pending_exchange()
        self._is_pending, self._pending = False, None
        begin = time.perf_counter()
        self._apply(sent, future.result(), is_late=True)
        self.exposed_s += time.perf_counter() - begin

    def discard(self, timeout_s: float | None = None) -> None:
        """Discards the pending exchange after it has completed or the timeout has expired."""
        pending, self._pending, self._is_pending = self._pending, None, False
        if pending is not None:
            _, future = pending
            wait([future], timeout_s)
            if timeout_s is None:
                # Raise the error of a failed exchange.
                future.result()

    def _pending_exchange(self) -> tuple[Contribution, Future[ExchangeResult]]:
        """Returns the pending exchange; a resumed run starts it again."""
        if self._pending is None:
            self._pending = self._in_background(self._sent_before())
        return self._pending

    def _in_background(self, sent: Contribution) -> tuple[Contribution, Future[ExchangeResult]]:
        graph = self._graph("exchange")
        # Trace the graph in this thread, because traces in several threads can interfere.
        graph.get_concrete_function(sent)
        return sent, in_background(lambda: graph(sent))

    def _sent_before(self) -> Contribution:
        values, trained = [v.read_value() for v in self._sent], self.weights.trained
        count, finite = self._count.read_value(), self._finite.read_value()
        return Contribution(values[:trained], values[trained:], count, finite)

    def _contribute(self) -> Contribution:
        sent: Contribution = self._graph("contribute")()
        self._number.assign_add(1)
        self._restart_count()
        return sent

    def _restart_count(self) -> None:
        self._steps = 0
        self._samples.assign(0.0)

    def _apply(self, sent: Contribution, found: ExchangeResult, is_late: bool) -> int:
        are_finite = bool(self._graph("apply late" if is_late else "apply")(sent, found).numpy())
        absent = int(found.absent.numpy())
        self._exchange.absence.note(absent)
        if not sent.finite.numpy():
            reset_slots(self._inner())
            _log_recovery("weights")
        if not are_finite:
            _log_recovery("statistics of layers")
        return absent

    # ------------------------------------------------------------------ graphs

    @property
    def exchanger(self) -> Exchanger:
        """Exchanger of pseudo-gradients with the current scheme."""
        return self._exchange.exchanger(self._variables)

    def _graph(self, name: str) -> Any:
        """Returns a graph by name; a change of scheme or statistics causes new traces."""
        now = self.exchanger, len(self.weights.variables)
        if self._traced_for != now:
            # Use partials: TensorFlow counts traces of a method over all objects, and would warn.
            functions = {
                "contribute": functools.partial(self._contribution),
                "exchange": functools.partial(self._exchanged, has_data=True),
                "join": functools.partial(self._exchanged, has_data=False),
                "apply": functools.partial(self._applied, is_late=False),
                "apply late": functools.partial(self._applied, is_late=True),
            }
            self._graphs = {key: tf.function(f, autograph=False) for key, f in functions.items()}
            self._traced_for = now
        return self._graphs[name]

    def _contribution(self) -> Contribution:
        differences, statistics = self.weights.differences, self.weights.own_statistics
        samples, finite = self._samples.read_value(), _all_finite(differences)
        # Count samples and not steps, because the ranks of a node drop an update if one of them is
        # absent.
        worked = self._share * tf.cast(samples > 0.0, tf.float32)
        count = samples if self._outer.weighs_samples else worked
        return Contribution(differences, statistics, tf.where(finite, count, 0.0), finite)

    def _exchanged(self, sent: Contribution, has_data: bool) -> ExchangeResult:
        exchanger = self.exchanger
        presence = exchanger.presence(sent.differences, sent.count, has_data)
        weight = weight_of(sent.count, presence.total, exchanger.wire.topology.size)
        statistics = self._mean_statistics(exchanger, sent.statistics, weight)
        means, states = self._mean_differences(exchanger, sent.differences, weight)
        counts = tf.logical_and(_all_finite(means), presence.total > 0.0)
        # Averages of bfloat16 differences are float32.
        means = [tf.cast(m, like.dtype) for m, like in zip(means, sent.differences, strict=True)]
        return ExchangeResult(means, statistics, states, presence.total, counts, presence.absent)

    def _mean_differences(
        self, exchanger: Exchanger, differences: list[tf.Tensor], weight: tf.Tensor
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        if not self._schedule.overlap_steps:
            means, states = exchanger.exchange(differences, weight)
            return means, list(itertools.chain(*states))
        found: dict[int, tf.Tensor] = {}
        new_states: list[tf.Tensor] = []
        last = weight
        for index, bucket in enumerate(exchanger.plan.buckets):
            # Exchange buckets in sequence, so that a collective of a step waits for at most one.
            with tf.control_dependencies([last]):
                own = [
                    tf.identity(difference) if member in bucket.members else None
                    for member, difference in enumerate(differences)
                ]
                means, states = exchanger.exchange(own, weight, buckets=[index])
            found |= {member: means[member] for member in bucket.members}
            new_states += itertools.chain(*states)
            last = means[bucket.members[0]]
        return [found[index] for index in range(len(differences))], new_states

    def _mean_statistics(
        self, exchanger: Exchanger, statistics: list[tf.Tensor], weight: tf.Tensor
    ) -> list[tf.Tensor]:
        if not statistics:
            return []
        wire = exchanger.wire
        flat = pack(statistics, summed_dtype(statistics))
        weight = tf.cast(weight, flat.dtype)
        # Replace the statistics of a rank with zero weight, which may be NaN or infinite.
        flat = tf.where(weight > 0.0, flat * weight, tf.zeros_like(flat))
        mean = wire.all_reduce(
            flat, wire.topology.world, f"{exchanger.prefix}.statistics", 1.0 / wire.topology.size
        )
        return unpack(mean, statistics)

    def _applied(self, sent: Contribution, found: ExchangeResult, is_late: bool) -> tf.Tensor:
        """Updates global and local weights; returns whether this rank's statistics were finite."""
        weights = self.weights
        before = [tf.identity(copy) for copy in weights.copies] if is_late else []
        are_finite = _all_finite(weights.variables[weights.trained :])
        tf.cond(found.counts, lambda: self._move(found), lambda: None)
        self._follow(sent, found.counts, before)
        return are_finite

    def _move(self, found: ExchangeResult) -> None:
        weights, means = self.weights, found.means
        states = itertools.chain(*self.exchanger.states.variables)
        for variable, value in zip(states, found.states, strict=True):
            variable.assign(value)
        if not self._outer.weighs_samples:
            # Divide by all replicas: a replica without samples contributes a zero difference.
            share = found.total / self._replicas
            means = [mean * tf.cast(share, mean.dtype) for mean in means]
        self._outer.move(weights.copies[: weights.trained], means)
        for variable, copy in zip(self._variables, weights.copies, strict=False):
            constraint = getattr(variable, "constraint", None)
            if constraint is not None:
                copy.assign(constraint(tf.convert_to_tensor(copy)))
        for copy, mean in zip(weights.copies[weights.trained :], found.statistics, strict=True):
            # Discard averages that are not finite: a rank may have started with such statistics.
            copy.assign(either(is_finite(mean), mean, tf.convert_to_tensor(copy)))

    def _follow(self, sent: Contribution, counts: tf.Tensor, before: list[tf.Tensor]) -> None:
        """Updates this rank's weights; `before` has the global weights before a late update."""
        weights, pull = self.weights, self._outer.pull(self._replicas)
        # A replica that processed no samples keeps its weights.
        share = tf.where(tf.logical_and(counts, sent.count > 0.0), pull, 0.0)
        pairs = zip(weights.variables, weights.copies, strict=True)
        for index, (variable, copy) in enumerate(pairs):
            own, now = tf.convert_to_tensor(variable), tf.convert_to_tensor(copy)
            is_trained = index < weights.trained
            if is_trained and pull < 1.0:
                moved = own - tf.cast(share, own.dtype) * sent.differences[index]
            elif is_trained and before:
                # Preserve the training of this rank during the exchange.
                late = own + (now - before[index]) - sent.differences[index]
                moved = either(counts, late, own)
            elif pull < 1.0 or before:
                # Ranks with different weights keep separate statistics.
                moved = own
            else:
                moved = either(counts, now, own)
            # Statistics differ between ranks, even within a node whose ranks share weights.
            stays = sent.finite if is_trained else tf.logical_and(sent.finite, is_finite(own))
            variable.assign(either(stays, moved, now))

    # ------------------------------------------------------------------ state

    @property
    def rank_state(self) -> list[tuple[Any, StateDescription]]:
        """State that this rank saves, with descriptions."""
        counters = Counters(self._counters, self._restore)
        variables = [counters, self._samples, *self.weights.copies]
        if self._schedule.overlap_steps:
            variables += [self._count, self._finite, *self._sent]
        return [
            (variable, StateDescription(name=f"local {index}", placement=Placement.LOCAL))
            for index, variable in enumerate(variables)
        ]

    def _counters(self) -> list[int]:
        if self.weights.was_assigned:
            # A resumed run must restart from the assigned weights, as this run will.
            return [0, 0, 0]
        return [int(self.weights.has_begun), self._steps, int(self._is_pending)]

    def _restore(self, counters: Any) -> None:
        self.discard()
        has_begun, self._steps, is_pending = np.asarray(counters).tolist()
        self._is_pending = bool(is_pending)
        self.weights.restore(bool(has_begun))


class Counters:
    """Python counters that a checkpoint reads and assigns like a variable, `[3]` int64."""

    name, shape, dtype = "local_counters", (3,), tf.int64

    def __init__(self, read: Callable[[], list[int]], assign: Callable[[Any], None]) -> None:
        self._read, self.assign = read, assign

    def numpy(self) -> np.ndarray:
        return np.asarray(self._read(), "int64")

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.numpy()


def _wait_at_exit(reference: weakref.ref[Synchronization]) -> None:
    # Wait for a limited time, because the other ranks may have exited.
    if (synchronization := reference()) is not None:
        synchronization.discard(EXIT_PATIENCE_S)


def _all_finite(values: Sequence[Any]) -> tf.Tensor:
    return tf.reduce_all([True, *map(is_finite, values)])


def _log_recovery(what: str) -> None:
    log.warning(
        "tfposeidon: the %s of rank %d are not finite; the rank continues from the global weights.",
        what,
        runtime.rank(),
    )

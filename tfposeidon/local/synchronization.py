"""Synchronizes ranks periodically, in Python between the executions of train functions.

Think of three parts: `_contribution` computes the differences between local and global weights,
`_exchanged` averages them over the ranks, and `_applied` updates the global weights with the
average, and then this rank's weights. Without overlap, one graph contains all parts. With
`overlap_steps`, each part has its own graph: a thread runs the second graph during the next steps,
and all ranks run the third graph after `overlap_steps` steps.
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
from tfposeidon.gradients import all_finite
from tfposeidon.local.global_weights import GlobalWeights, either
from tfposeidon.local.outer_optimizers import Rule
from tfposeidon.local.schedule import Contribution, ExchangeResult, Schedule, in_background
from tfposeidon.optimizers.wrapper import reset_slots
from tfposeidon.state.placement import Placement, StateDescription

log = logging.getLogger("tfposeidon")

EXIT_PATIENCE_S = 3.0
"""Maximum seconds for which an exiting process waits for a pending exchange."""


class Synchronization:
    """Counts steps, and synchronizes the ranks every `sync_every` steps.

    A replica is a group of ranks with equal weights: one rank, or with `hierarchical` the ranks of
    one node. `_share` is 1 divided by the number of ranks in this rank's replica.
    """

    def __init__(
        self,
        optimizer: Any,
        outer: Rule,
        variables: Sequence[Any],
        schedule: Schedule,
        number: Any,
        hierarchical: bool,
    ) -> None:
        self._optimizer, self._outer = optimizer, outer
        self._exchange: Step = optimizer.exchange
        self._variables, self._schedule, self._number = list(variables), schedule, number
        topology = runtime.wire().topology
        self._replicas = len(topology.nodes) if hierarchical else topology.size
        self._share = 1.0 / topology.node.size if hierarchical else 1.0
        self.weights = GlobalWeights(variables)
        outer.build(self.weights.copies)
        with tf.init_scope(), tf.device("/CPU:0"):
            self._samples = tf.Variable(0.0, trainable=False, name="samples")
            # Variables that store a `Contribution`. Checkpoints include them, so that a resumed run
            # can repeat the exchange.
            self._sent = [tf.Variable(value, trainable=False, name="sent") for value in (0.0, True)]
        self._steps, self._is_pending = 0, False
        self._pending: Future[ExchangeResult] | None = None
        self._graphs: dict[str, Any] = {}
        self._traced_for: tuple[Exchanger, int] | None = None
        # `exposed_s` sums the seconds for which steps have waited for exchanges.
        self.exposed_s = 0.0
        # Wait before Horovod shuts down, because its shutdown aborts a pending exchange.
        atexit.register(_wait_at_exit, weakref.ref(self))

    def prepare(self) -> None:
        """Creates copies of statistics, and the variables that store a pending contribution."""
        self.weights.add(self._optimizer.statistics())
        if self._schedule.overlap_steps:
            with tf.init_scope():
                for variable in self.weights.variables[len(self._sent) - 2 :]:
                    zeros = tf.zeros_like(tf.convert_to_tensor(variable))
                    self._sent.append(tf.Variable(zeros, trainable=False, name="sent"))

    # ------------------------------------------------------------------ steps

    def count_samples(self, count: Any) -> None:
        self._samples.assign_add(tf.cast(1.0 if count is None else count, tf.float32))

    def begin_step(self) -> None:
        """Assigns local weights to the variables; the first step initializes the global weights."""
        if not self.weights.has_begun:
            # Add statistics now, because the step changes them before it calls the optimizer.
            self.prepare()
            # All ranks start from the current values, so earlier error-feedback state is invalid.
            self._restart_count()
            if self.exchanger.states.exist:
                self.exchanger.states.drop()
        self.weights.begin()

    def end_step(self, steps: int = 1) -> None:
        # No exchange exists before the optimizer's first step, in which ranks agree on it.
        if not self._exchange.exchangers:
            if self._samples.numpy() > 0.0:
                raise RuntimeError(
                    "A step must be traced again after change_scheme(). Received: a step that was "
                    "traced before the change. Create the tf.function of the step again."
                )
            return
        self._steps += steps
        if self._is_pending:
            future = self._pending_exchange()
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
        self.discard()
        self.weights.restart(has_begun=False)

    def warn_if_none_has_completed(self) -> None:
        has_none = int(self._number.numpy()) <= self._is_pending
        if has_none and (self._is_pending or self._steps > 0):
            runtime.log_once(
                "tfposeidon: LocalUpdates(sync_every=%d): training ended before the first "
                "synchronization, so the model holds its initial weights. Use a smaller "
                "`sync_every`, or train for longer.",
                self._schedule.sync_every,
            )

    def check_steps_are_counted(self) -> None:
        """Raises an error if the loop has executed steps without calls of `end_step`."""
        if self.weights.has_begun and not self._steps and self._samples.numpy() > 0.0:
            raise RuntimeError(
                "A custom loop must call LocalUpdates.end_step() after each step, because ranks "
                "synchronize there. Received: steps without this call. Add it on all ranks."
            )

    # ------------------------------------------------------------------ one synchronization

    def _synchronize(self, has_data: bool) -> int:
        absent = self._run("synchronize" if has_data else "join")
        self._end_contribution()
        return absent

    def _start(self) -> None:
        self._graph("send")()
        self._end_contribution()
        self._is_pending = True
        self._pending_exchange()

    def _end_contribution(self) -> None:
        self._number.assign_add(1)
        self._restart_count()

    def _restart_count(self) -> None:
        self._steps = 0
        self._samples.assign(0.0)

    def _pending_exchange(self) -> Future[ExchangeResult]:
        """Returns the pending exchange; a resumed run starts it again."""
        if self._pending is None:
            graph = self._graph("exchange")
            # Trace the graph in this thread, because traces in several threads can interfere.
            graph.get_concrete_function()
            self._pending = in_background(graph)
        return self._pending

    def _finish(self) -> None:
        """Waits for the pending exchange, if any, and applies its result."""
        if not self._is_pending:
            return
        future = self._pending_exchange()
        self._is_pending, self._pending = False, None
        self._run("finish", future)

    def discard(self) -> None:
        """Discards the pending exchange after it has completed."""
        future, self._pending, self._is_pending = self._pending, None, False
        if future is not None:
            # Raise the error of a failed exchange.
            future.result()

    def _run(self, graph: str, *pending: Future[ExchangeResult]) -> int:
        """Runs a graph that updates weights; returns the number of absent ranks."""
        begin = time.perf_counter()
        applied = self._graph(graph)(*(future.result() for future in pending))
        absent, finite_weights, finite_statistics = (value.numpy() for value in applied)
        self.exposed_s += time.perf_counter() - begin
        self._exchange.absence.note(int(absent))
        if not finite_weights:
            reset_slots(self._optimizer.inner_optimizer)
            _log_recovery("weights")
        if not finite_statistics:
            _log_recovery("statistics of layers")
        return int(absent)

    # ------------------------------------------------------------------ graphs

    @property
    def exchanger(self) -> Exchanger:
        return self._exchange.exchanger(self._variables)

    def _graph(self, name: str) -> Any:
        """Returns a graph by name; a change of scheme or statistics causes new traces."""
        now = self.exchanger, len(self.weights.variables)
        if self._traced_for != now:
            # Use partials: TensorFlow warns of many traces of a method, counted over all objects.
            functions = {
                "synchronize": functools.partial(self._synchronized, has_data=True),
                "join": functools.partial(self._synchronized, has_data=False),
                "send": functools.partial(self._send),
                "exchange": functools.partial(self._exchange_sent),
                "finish": functools.partial(self._apply_late),
            }
            self._graphs = {key: tf.function(f, autograph=False) for key, f in functions.items()}
            self._traced_for = now
        return self._graphs[name]

    def _synchronized(self, has_data: bool) -> list[tf.Tensor]:
        sent = self._contribution()
        return self._applied(sent, self._exchanged(sent, has_data), is_late=False)

    def _send(self) -> None:
        for variable, value in zip(self._sent, tf.nest.flatten(self._contribution()), strict=True):
            variable.assign(value)

    def _exchange_sent(self) -> ExchangeResult:
        return self._exchanged(self._sent_values(), has_data=True)

    def _apply_late(self, found: ExchangeResult) -> list[tf.Tensor]:
        return self._applied(self._sent_values(), found, is_late=True)

    def _sent_values(self) -> Contribution:
        count, finite, *values = [variable.read_value() for variable in self._sent]
        return Contribution(count, finite, values)

    def _contribution(self) -> Contribution:
        values = self.weights.contribution
        samples, finite = self._samples.read_value(), all_finite(values[: self.weights.trained])
        # Count samples and not steps, because a node drops an update if one of its ranks is absent.
        worked = self._share * tf.cast(samples > 0.0, tf.float32)
        count = tf.where(finite, samples if self._outer.weighs_samples else worked, 0.0)
        return Contribution(count, finite, values)

    def _exchanged(self, sent: Contribution, has_data: bool) -> ExchangeResult:
        exchanger, trained = self.exchanger, self.weights.trained
        differences = sent.values[:trained]
        presence = exchanger.presence(differences, sent.count, has_data)
        weight = weight_of(sent.count, presence.total, exchanger.wire.topology.size)
        statistics = self._mean_statistics(exchanger, sent.values[trained:], weight)
        means, states = self._mean_differences(exchanger, differences, weight)
        counts = tf.logical_and(all_finite(means), presence.total > 0.0)
        # Averages of bfloat16 differences are float32.
        means = [tf.cast(m, like.dtype) for m, like in zip(means, differences, strict=True)]
        if not self._outer.weighs_samples:
            # Divide by all replicas, because a replica without samples contributes zeros.
            share = presence.total / self._replicas
            means = [mean * tf.cast(share, mean.dtype) for mean in means]
        return ExchangeResult(presence.absent, counts, [*means, *statistics], states)

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
            # Exchange buckets in sequence, so that a step waits for at most one bucket.
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
        # A rank with zero weight may have NaN or infinite statistics, which the sum must ignore.
        own = tf.math.multiply_no_nan(flat, tf.cast(weight, flat.dtype))
        name, size = f"{exchanger.prefix}.statistics", wire.topology.size
        return unpack(wire.all_reduce(own, wire.topology.world, name, 1.0 / size), statistics)

    def _applied(self, sent: Contribution, found: ExchangeResult, is_late: bool) -> list[tf.Tensor]:
        """Updates all weights; returns `absent`, and whether weights and statistics are finite."""
        weights = self.weights
        before = [tf.identity(copy) for copy in weights.copies] if is_late else []
        are_finite = all_finite([*map(tf.convert_to_tensor, weights.variables[weights.trained :])])
        tf.cond(found.counts, lambda: self._move(found), lambda: None)
        self._follow(sent, found.counts, before)
        return [found.absent, sent.finite, are_finite]

    def _move(self, found: ExchangeResult) -> None:
        states = itertools.chain(*self.exchanger.states.variables)
        for variable, value in zip(states, found.states, strict=True):
            variable.assign(value)
        copies, trained = self.weights.copies, self.weights.trained
        self._outer.move(copies[:trained], found.means[:trained])
        for variable, copy in zip(self._variables, copies, strict=False):
            constraint = getattr(variable, "constraint", None)
            if constraint is not None:
                copy.assign(constraint(tf.convert_to_tensor(copy)))
        for copy, mean in zip(copies[trained:], found.means[trained:], strict=True):
            # Discard averages that are not finite: a rank may have started with such statistics.
            copy.assign(either(all_finite([mean]), mean, tf.convert_to_tensor(copy)))

    def _follow(self, sent: Contribution, counts: tf.Tensor, before: list[tf.Tensor]) -> None:
        """Updates this rank's weights; `before` has the global weights before a late update."""
        weights, pull = self.weights, self._outer.pull(self._replicas)
        # A replica that processed no samples keeps its weights.
        share = tf.where(tf.logical_and(counts, sent.count > 0.0), pull, 0.0)
        pairs = zip(weights.variables, weights.copies, strict=True)
        for index, (variable, copy) in enumerate(pairs):
            own, now = tf.convert_to_tensor(variable), tf.convert_to_tensor(copy)
            is_trained, stays = index < weights.trained, sent.finite
            if is_trained and pull < 1.0:
                moved = own - tf.cast(share, own.dtype) * sent.values[index]
            elif is_trained and before:
                # Preserve the updates that this rank has made during the exchange.
                moved = either(counts, own + (now - before[index]) - sent.values[index], own)
            elif pull < 1.0 or before:
                # Ranks with different weights keep separate statistics.
                moved = own
            else:
                moved = either(counts, now, own)
            if not is_trained:
                # Statistics differ between ranks, even within a node whose ranks share weights.
                stays = tf.logical_and(stays, all_finite([own]))
            variable.assign(either(stays, moved, now))

    # ------------------------------------------------------------------ state

    @property
    def rank_state(self) -> list[tuple[Any, StateDescription]]:
        counters = Counters(self._counters, self._restore)
        sent = self._sent if self._schedule.overlap_steps else []
        variables = [counters, self._samples, *self.weights.copies, *sent]
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
        self.weights.restart(bool(has_begun))


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
    synchronization = reference()
    if synchronization is not None and synchronization._pending is not None:
        # Wait for a limited time, because the other ranks may have exited.
        wait([synchronization._pending], EXIT_PATIENCE_S)


def _log_recovery(what: str) -> None:
    log.warning(
        "tfposeidon: the %s of rank %d are not finite; the rank continues from the global weights.",
        what,
        runtime.rank(),
    )

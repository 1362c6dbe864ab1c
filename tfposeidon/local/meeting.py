"""One round: ranks exchange how far they are from the centre, which follows them, and they it."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfposeidon.communication import runtime
from tfposeidon.communication.wire import numbered_names
from tfposeidon.exchange.exchanger import Exchanger
from tfposeidon.exchange.one_vector import joined, parted
from tfposeidon.exchange.step import Step
from tfposeidon.local.centre import Centre, either, is_finite
from tfposeidon.local.rules import Rule
from tfposeidon.optimizers.wrapping import reset_slots

log = logging.getLogger("tfposeidon")


class Sent(NamedTuple):
    """What this rank contributes to a round.

    Attributes:
      differences: How far it is from the centre, one tensor for each trained variable.
      statistics: Its values of statistics.
      count: What it counts, a float32 scalar: 0 if it has done nothing, or is not finite.
      finite: True if its differences are finite, a bool scalar; the same on the ranks of a replica.
    """

    differences: list[tf.Tensor]
    statistics: list[tf.Tensor]
    count: tf.Tensor
    finite: tf.Tensor


class Found(NamedTuple):
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


class Opened(NamedTuple):
    """The begin of a round, the same on all ranks but for the weight.

    Attributes:
      weight: Factor for what this rank contributes, a float32 scalar.
      total: What all ranks count, a float32 scalar.
      absent: Ranks that are out of data, a float32 scalar.
      statistics: Mean of each statistic.
    """

    weight: tf.Tensor
    total: tf.Tensor
    absent: tf.Tensor
    statistics: list[tf.Tensor]


class Part(NamedTuple):
    """What a round has found of some buckets.

    Attributes:
      finite: True if all means are finite, a bool scalar.
      means: Mean differences, by the index of their variable.
      states: New values of what schemes keep, in the order of the buckets.
    """

    finite: tf.Tensor
    means: dict[int, tf.Tensor]
    states: list[tf.Tensor]


class Meeting:
    """What ranks do in a round, whether the step waits for it or not.

    Args:
      exchange: What makes ranks agree, plans, and counts absent ranks.
      inner: Function that returns the optimizer inside; `fit` may replace it.
      rule: What a round makes of the mean difference; it is built here.
      variables: Variables that the optimizer trains.
      replicas: Number of replicas that train by themselves: ranks, or nodes.
      share: Share of this rank in its replica: 1, or one over the ranks of its node.

    Attributes:
      exchange: What makes ranks agree, plans, and counts absent ranks.
      centre: The centre, beside what this rank trains.
    """

    def __init__(
        self,
        exchange: Step,
        inner: Callable[[], Any],
        rule: Rule,
        variables: Sequence[Any],
        replicas: int,
        share: float,
    ) -> None:
        self.exchange, self._inner, self._rule = exchange, inner, rule
        self._replicas, self._share = replicas, share
        self._variables = list(variables)
        self.centre = Centre(variables)
        rule.build(self.centre.copies)
        self._traced: dict[tuple[Any, ...], Any] = {}
        self._traced_for: tuple[Any, int] | None = None

    @property
    def exchanger(self) -> Exchanger:
        """Exchanger of the differences, by the scheme of now."""
        return self.exchange.exchanger(self._variables)

    def traced(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Returns a function as a graph, made anew for other schemes and statistics.

        Args:
          function: Function that takes part in a round; others have other names.
          *arguments: Its first arguments, which graphs hold.
        """
        now = self.exchanger, len(self.centre.variables)
        if self._traced_for != now:
            self._traced_for, self._traced = now, {}
        key = function.__name__, *arguments
        if key not in self._traced:
            bound = functools.partial(function, *arguments)
            self._traced[key] = tf.function(bound, autograph=False)
        return self._traced[key]

    # ------------------------------------------------------------------ what is exchanged

    def contribution(self, samples: tf.Tensor) -> Sent:
        """Returns what this rank contributes now.

        Args:
          samples: Samples of the updates that it has made since the last round, a float32 scalar.
        """
        differences, statistics = self.centre.differences, self.centre.own_statistics
        finite = _all_finite(differences)
        # Of updates, and not of steps: within a node all drop those that one of them lacks.
        worked = self._share * tf.cast(samples > 0.0, tf.float32)
        counted = samples if self._rule.weighs_samples else worked
        return Sent(differences, statistics, tf.where(finite, counted, 0.0), finite)

    def exchanged(self, sent: Sent, has_batch: bool = True) -> Found:
        """Exchanges what ranks contribute.

        Args:
          sent: What this rank contributes.
          has_batch: False if it is out of data.
        """
        opened = self.opened(sent, has_batch)
        found = self.exchanged_buckets(sent.differences, opened.weight)
        return found_of(opened, found, sent.differences)

    def opened(self, sent: Sent, has_batch: bool = True) -> Opened:
        """Begins a round: counts, and exchanges statistics, which are small.

        Args:
          sent: What this rank contributes.
          has_batch: False if it is out of data.
        """
        exchanger = self.exchanger
        # Each round is in a branch of its own, and has the same names in all of them, as those have
        # in which a rank takes part that is out of data.
        with numbered_names(0):
            presence = exchanger.presence(sent.differences, sent.count, has_batch)
            assert presence.weight is not None
            statistics = self._mean_statistics(exchanger, sent.statistics, presence.weight)
        return Opened(presence.weight, presence.samples, presence.absent, statistics)

    def exchanged_buckets(
        self,
        differences: Sequence[tf.Tensor | None],
        weight: tf.Tensor,
        buckets: Collection[int] | None = None,
    ) -> Part:
        """Exchanges differences, once the round is open.

        Args:
          differences: How far this rank is from the centre, one tensor for each trained variable;
            `None` for those in other buckets.
          weight: Factor for what this rank contributes.
          buckets: Indices of the plan's buckets; all if left out.
        """
        with numbered_names(0):
            found, states = self.exchanger.exchange(differences, weight, buckets=buckets)
        means = {index: mean for index, mean in enumerate(found) if mean is not None}
        return Part(_all_finite(list(means.values())), means, list(itertools.chain(*states)))

    def _mean_statistics(
        self, exchanger: Exchanger, statistics: list[tf.Tensor], weight: tf.Tensor
    ) -> list[tf.Tensor]:
        if not statistics:
            return []
        wire = exchanger.wire
        flat = joined(statistics)
        # What does not count need not be finite.
        flat = tf.where(weight > 0.0, flat * weight, tf.zeros_like(flat))
        mean = wire.all_reduce(
            flat, wire.topology.world, f"{exchanger.prefix}.statistics", 1.0 / wire.topology.size
        )
        return parted(mean, statistics)

    # ------------------------------------------------------------------ what follows

    def settle(self, sent: Sent, found: Found, is_late: bool) -> None:
        """Moves the centre and this rank by what a round has found.

        Args:
          sent: What this rank has contributed.
          found: What has come of it.
          is_late: True if this rank has trained on meanwhile.
        """
        # Here, so that all ranks know of it after the same step.
        self.exchange.absence.record(found.absent)
        before = [tf.identity(copy) for copy in self.centre.copies] if is_late else []
        statistics = _all_finite(self.centre.variables[self.centre.trained :])
        tf.cond(found.counts, lambda: self._move_centre(found), lambda: None)
        self._follow(sent, found.counts, before)
        tf.cond(sent.finite, lambda: None, self._recover)
        tf.cond(statistics, lambda: None, lambda: _say("statistics of layers"))

    def _move_centre(self, found: Found) -> None:
        centre, exchanger = self.centre, self.exchanger
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
            # One that began so on some rank.
            copy.assign(either(is_finite(mean), mean, tf.convert_to_tensor(copy)))

    def _follow(self, sent: Sent, counts: tf.Tensor, before: list[tf.Tensor]) -> None:
        """Moves this rank's weights after the centre.

        Args:
          sent: What this rank has contributed.
          counts: True if the centre has moved, a bool scalar.
          before: The centre before that, for a result that comes late; else empty.
        """
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
                moved = either(counts, late, own)
            elif pull < 1.0 or before:
                # Statistics of ranks that stay apart.
                moved = own
            else:
                moved = either(counts, now, own)
            # Statistics are each rank's own, also in a node whose ranks have the same weights.
            stays = sent.finite if is_trained else tf.logical_and(sent.finite, is_finite(own))
            variable.assign(either(stays, moved, now))

    def _recover(self) -> None:
        """Begins with new slots on a rank whose weights were not finite."""
        reset_slots(self._inner())
        _say("weights")


def found_of(opened: Opened, everything: Part, differences: Sequence[Any]) -> Found:
    """Returns what a round has found.

    Args:
      opened: Its begin.
      everything: What it has found of all buckets.
      differences: Differences that this rank has contributed, whose dtypes means get; or variables
        of the same dtypes.
    """
    means = [mean for _, mean in sorted(everything.means.items())]
    return Found(
        # Means of bfloat16 come in float32, and are rounded once, however late they are taken.
        means=[tf.cast(m, like.dtype) for m, like in zip(means, differences, strict=True)],
        statistics=opened.statistics,
        total=opened.total,
        counts=tf.logical_and(everything.finite, opened.total > 0.0),
        absent=opened.absent,
        states=everything.states,
    )


def _all_finite(values: Sequence[Any]) -> tf.Tensor:
    return tf.reduce_all([True, *map(is_finite, values)])


def _say(what: str) -> None:
    """Logs, in the step, that this rank goes on from the centre's values of something."""

    def say() -> None:
        log.warning(
            "tfposeidon: the %s of rank %d are not finite; it goes on from the centre.",
            what,
            runtime.rank(),
        )

    tf.py_function(say, [], [])

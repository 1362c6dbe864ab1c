"""Timed trials: measure the exchanges of candidate plans alone, before steps use one of them.

Predictions cannot rank plans that are close. A trial runs the collectives of each on artificial
gradients.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfposeidon.autotune.measurement import without_collections
from tfposeidon.communication.wire import Wire, Zeros, exchange_objects
from tfposeidon.exchange.exchanger import Exchanger
from tfposeidon.exchange.plan import Plan
from tfposeidon.gradients.description import Description

ROUNDS, BUDGET_S = 7, 2.0
"""Timed rounds, and seconds after which no round starts; neither includes the first, which
traces."""

_numbers = itertools.count()


class Race:
    """Timed trial: measures the exchange of each plan without computation, on all ranks together.

    `known` has the seconds of timed plans by their digest. A planner times a plan only once, so
    that equal plans have equal times, also in a run that resumes with an earlier run's times.
    """

    def __init__(self, known: dict[str, float] | None = None) -> None:
        self.known: dict[str, float] = dict(known or {})

    def times(self, plans: Sequence[Plan], wire: Wire | None) -> list[float]:
        """Returns the seconds of one exchange of each plan, the same on every rank.

        The time is the median over rounds of the slowest rank. Without `wire`, a rank calls it
        alone and nothing is timed: the result is empty if a plan has no known time.
        """
        new = [plan for plan in plans if plan.digest not in self.known]
        if new and wire is None:
            return []
        if new:
            assert wire is not None
            with tf.init_scope():
                seconds = _timed(new, wire, f"tp.race_{next(_numbers)}")
            self.known.update(zip((plan.digest for plan in new), seconds, strict=True))
        return [self.known[plan.digest] for plan in plans]


@without_collections()
def _timed(plans: Sequence[Plan], wire: Wire, prefix: str) -> list[float]:
    zeros = Zeros()
    runs = [_Run(plan, wire, zeros, f"{prefix}.{index}") for index, plan in enumerate(plans)]
    values = tf.random.stateless_normal([max(run.most_values for run in runs)], [7, 1])
    rounds: list[list[float]] = []
    begin_s = time.perf_counter()
    for turn in range(1 + ROUNDS):
        mine = []
        for index, run in enumerate(runs):
            # Start together, because waiting for the last rank must not be timed.
            exchange_objects(turn, wire, f"{prefix}.{index}.{turn}")
            run_begin_s = time.perf_counter()
            run(values)
            mine.append(time.perf_counter() - run_begin_s)
        took = [time.perf_counter() - begin_s, mine]
        everybody = exchange_objects(took, wire, f"{prefix}.{turn}")
        rounds.append([max(times) for times in zip(*(own for _, own in everybody), strict=True)])
        if turn == 0:
            begin_s = time.perf_counter()
        elif everybody[0][0] > BUDGET_S:
            # Use rank 0's clock, so that all ranks stop at the same round.
            break
    return [statistics.median(times) for times in zip(*rounds[1:], strict=True)]


class _Run:
    """Exchange of a plan, in a graph, with artificial gradients."""

    def __init__(self, plan: Plan, wire: Wire, zeros: Zeros, prefix: str) -> None:
        self._exchanger = Exchanger(plan, wire, zeros)
        self._exchanger.prefix = prefix
        self._descriptions = plan.descriptions
        self._structured, self._reader = plan.structured, plan.reader
        self._function = tf.function(self._traced, autograph=False)

    @property
    def most_values(self) -> int:
        """Number of values of the largest gradient."""
        return max(d.length for d in self._descriptions)

    def __call__(self, values: tf.Tensor) -> None:
        """Exchanges once; gradients are made of `values`, of at least `most_values`."""
        for tensor in self._function(values):
            tensor.numpy()

    def _traced(self, values: tf.Tensor) -> list[tf.Tensor]:
        gradients = [
            self._gradient(member, d, values) for member, d in enumerate(self._descriptions)
        ]
        means, states = self._exchanger.exchange(gradients, None)
        # Fetch a value of each, because TensorFlow prunes unused tensors.
        kept = [*means, *itertools.chain(*states)]
        return [tf.reshape(tensor, [-1])[:1] for tensor in kept if tensor.shape.num_elements()]

    def _gradient(self, member: int, description: Description, values: tf.Tensor) -> Any:
        if self._reader is not None and member in self._structured:
            return self._reader.artificial(description, values)
        vector = tf.cast(values[: description.length], description.dtype)
        return tf.reshape(vector, description.shape)

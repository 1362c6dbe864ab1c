"""Race of plans: what their exchanges take by themselves, timed before steps follow one of them."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfposeidon.communication.wire import Wire, Zeros, exchange_objects
from tfposeidon.exchange.exchanger import Exchanger
from tfposeidon.gradients.description import Description
from tfposeidon.gradients.embedding_rows import Rows
from tfposeidon.gradients.factors import FactorPair
from tfposeidon.planning.measurement import without_collections
from tfposeidon.planning.plan import Plan

ROUNDS, BUDGET_S = 7, 2.0
"""Rounds that are timed, and seconds after which no further one begins; the first, which traces,
counts for neither."""

_numbers = itertools.count()


class Race:
    """Times the exchanges of plans by themselves; all ranks call it together.

    A plan that has been timed is not timed again: the same question gets the same answer, also in a
    run that is resumed with the times of an earlier one.

    Args:
      known: Seconds of plans that have been timed, by the digest of the plan.

    Attributes:
      known: The same, with what has been timed since.
    """

    def __init__(self, known: dict[str, float] | None = None) -> None:
        self.known: dict[str, float] = dict(known or {})

    def times(self, plans: Sequence[Plan], wire: Wire | None) -> list[float]:
        """Returns how long one exchange of each plan takes.

        Args:
          plans: Plans with the rows of factors, the same on every rank.
          wire: Collectives that join the ranks, who all call it together; `None` where a rank asks
            for itself, and nothing may be timed.

        Returns:
          Seconds on the slowest rank, the median of some rounds, the same on every rank; nothing
          if a plan has not been timed and `wire` is `None`.
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
            # All ranks begin together, or the wait for the last one would be timed.
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
            # By rank 0's clock: all stop at the same round.
            break
    return [statistics.median(times) for times in zip(*rounds[1:], strict=True)]


class _Run:
    """Exchange of a plan, in a graph, on gradients that are made up.

    Args:
      plan: Plan of the exchange.
      wire: Collectives that join the ranks.
      zeros: Zeros to share with other exchanges.
      prefix: Prefix of the names of its collectives.
    """

    def __init__(self, plan: Plan, wire: Wire, zeros: Zeros, prefix: str) -> None:
        self._exchanger = Exchanger(plan, wire, zeros)
        self._exchanger.prefix = prefix
        self._descriptions = plan.descriptions
        self._by_factors = {
            member for bucket in plan.buckets if bucket.takes_factors for member in bucket.members
        }
        self._function = tf.function(self._traced, autograph=False)

    @property
    def most_values(self) -> int:
        """Values of the largest tensor."""
        return max(
            max(d.length, (d.factors.left + d.factors.right) * _rows(d) if d.factors else 0)
            for d in self._descriptions
        )

    def __call__(self, values: tf.Tensor) -> None:
        """Exchanges once.

        Args:
          values: Vector that all gradients are parts of, at least `most_values` long.
        """
        for tensor in self._function(values):
            tensor.numpy()

    def _traced(self, values: tf.Tensor) -> list[tf.Tensor]:
        gradients = [
            _factors(d, values) if member in self._by_factors else _dense(d, values)
            for member, d in enumerate(self._descriptions)
        ]
        means, states = self._exchanger.exchange(gradients, None)
        # A value of each: TensorFlow leaves out what is not asked for.
        kept = [*means, *itertools.chain(*states)]
        return [tf.reshape(tensor, [-1])[:1] for tensor in kept if tensor.shape.num_elements()]


def _rows(description: Description) -> int:
    assert description.factors is not None
    return round(description.factors.rows or 0)


def _dense(description: Description, values: tf.Tensor) -> tf.Tensor:
    vector = tf.cast(values[: description.length], description.dtype)
    return tf.reshape(vector, description.shape)


def _factors(description: Description, values: tf.Tensor) -> Any:
    shape, rows = description.factors, _rows(description)
    assert shape is not None
    right = tf.cast(tf.reshape(values[: rows * shape.right], [rows, shape.right]), shape.dtype)
    if shape.indexed:
        indices = tf.cast(tf.abs(values[:rows]) * shape.left / 10.0, tf.int32) % shape.left
        return Rows(indices, right, table=shape.left)
    left = tf.cast(tf.reshape(values[: rows * shape.left], [rows, shape.left]), shape.dtype)
    return FactorPair(left, right)

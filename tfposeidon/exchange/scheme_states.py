"""Stores the state of a plan's schemes, such as residuals, between steps.

Schemes are pure functions: they map gradient and state to the averaged gradient and the new state.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfposeidon.exchange.means import Presence
from tfposeidon.exchange.plan import Bucket, Plan
from tfposeidon.gradients import distinct_paths
from tfposeidon.optimizers.wrapper import leaves
from tfposeidon.schemes.base import State
from tfposeidon.state.placement import Placement, StateDescription


class SchemeStates:
    """Variables with the state of schemes, which differs between ranks.

    `variables` has a list of state variables per bucket, which are initially zero. `had_gradient`
    is `[variables]` float32, 1 for each variable that has had a gradient and whose scheme has
    state. `rate` is the effective learning rate of the last step that changed the state, or 0.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.variables: list[list[tf.Variable]] = [
            [
                _variable(slot.shape, f"bucket_{i}_{slot.name}")
                for slot in bucket.slots(plan.topology)
            ]
            for i, bucket in enumerate(plan.buckets)
        ]
        kept = {member for bucket, own in self._pairs() if own for member in bucket.members}
        self._is_kept = [float(member in kept) for member, _ in enumerate(plan.descriptions)]
        self.had_gradient = _variable([len(self._is_kept)], "had_gradient")
        self.rate = _variable([], "effective_rate")

    @property
    def exist(self) -> bool:
        """True if any scheme has state."""
        return any(self.variables)

    def take_over(self, other: SchemeStates) -> None:
        """Continues with the state of buckets that have the same members and scheme in `other`."""
        self.had_gradient, self.rate = other.had_gradient, other.rate
        kept = {(b.members, b.scheme): variables for b, variables in other._pairs()}
        self.variables = [kept.get((b.members, b.scheme), own) for b, own in self._pairs()]

    def _pairs(self) -> Iterator[tuple[Bucket, list[tf.Variable]]]:
        return zip(self.plan.buckets, self.variables, strict=True)

    def read(self, index: int, rescale: tf.Tensor | None) -> State:
        """Returns the state of a bucket's scheme, with residuals times `rescale`, if given."""
        state = tuple(map(tf.convert_to_tensor, self.variables[index]))
        if not state or rescale is None:
            return state
        # Skip the multiplication by 1, because it takes a pass over memory.
        scheme = self.plan.buckets[index].scheme
        return tf.cond(rescale == 1.0, lambda: state, lambda: scheme.rescaled(state, rescale))

    def expected(self, presence: Presence) -> tf.Tensor:
        """Returns whether each variable has a gradient or residual to apply, `[variables]` bool."""
        if not self.exist:
            return presence.any_gradient
        # A scheme may send the residual of an earlier gradient in this step.
        return tf.logical_or(presence.any_gradient, self.had_gradient > 0.0)

    def rescale(self, rate: tf.Tensor) -> tf.Tensor:
        """Returns the factor that compensates residuals for a change of the effective rate.

        Without this factor, a residual that is computed at one rate and sent at another would be
        multiplied by the ratio of the rates. The factor is 1 if either rate is 0.
        """
        known = tf.logical_and(self.rate > 0.0, rate > 0.0)
        return tf.where(known, tf.math.divide_no_nan(self.rate.read_value(), rate), 1.0)

    def updates(
        self, new: Sequence[State], presence: Presence, rate: tf.Tensor
    ) -> list[tuple[tf.Variable, tf.Tensor]]:
        """Returns pairs of a variable and its new value after a step that is not skipped."""
        found = tf.cast(presence.any_gradient, tf.float32) * tf.constant(self._is_kept)
        pairs = zip(itertools.chain(*self.variables), itertools.chain(*new), strict=True)
        # Never reset `had_gradient`, because any later step may send a residual of the gradient.
        seen = tf.maximum(self.had_gradient, found)
        return [*pairs, (self.rate, rate), (self.had_gradient, seen)]

    def drop(self) -> None:
        """Discards the residuals of earlier exchanges."""
        for bucket, variables in self._pairs():
            # Replace non-finite values, which would remain non-finite when multiplied by 0.
            values = [tf.convert_to_tensor(variable) for variable in variables]
            state = tuple(tf.where(tf.math.is_finite(v), v, 0.0) for v in values)
            dropped = bucket.scheme.rescaled(state, tf.constant(0.0))
            for variable, value in zip(variables, dropped, strict=True):
                variable.assign(value)

    def reset(self) -> None:
        """Sets the state of all schemes to zero, which ends a flush."""
        for variable in itertools.chain(*self.variables):
            variable.assign(tf.zeros_like(variable))

    def flush(self) -> None:
        """Starts a flush, in which later exchanges send whole gradients and all residuals."""
        for bucket, variables in self._pairs():
            state = tuple(map(tf.convert_to_tensor, variables))
            for variable, value in zip(variables, bucket.scheme.flushing(state), strict=True):
                variable.assign(value)

    @property
    def has_flushed(self) -> bool:
        """True if, since `flush`, steps that were not skipped have sent all residuals."""
        return all(
            bucket.scheme.has_flushed(tuple(map(tf.convert_to_tensor, variables)))
            for bucket, variables in self._pairs()
        )

    def describe(self, paths: Sequence[str] | None = None) -> Iterator[StateDescription]:
        """Yields the description of each of `variables`; see `members` for `paths`."""
        topology, of_variables = self.plan.topology, self.members(paths)
        for bucket in self.plan.buckets:
            everybody = [bucket.slots(topology.seen_from(rank)) for rank in range(topology.size)]
            members = tuple(of_variables[member] for member in bucket.members)
            for index, slot in enumerate(bucket.slots(topology)):
                if not slot.shape:
                    yield StateDescription(name=slot.name, members=members, scalar=True)
                    continue
                yield StateDescription(
                    name=slot.name,
                    members=members,
                    placement=Placement.PARTIAL,
                    offset=slot.offset,
                    # The shards of all ranks together cover the bucket this many times.
                    owners=sum(slots[index].shape[0] for slots in everybody) // bucket.length,
                )

    def members(self, paths: Sequence[str] | None = None) -> tuple[tuple[str, int], ...]:
        """Returns path and number of elements of each variable of the plan, in order.

        `paths` replaces the variables' own paths and must not contain duplicates; if it is `None`,
        repeated paths are numbered: `fc/bias`, `fc/bias#1`.
        """
        descriptions = self.plan.descriptions
        lengths = [description.length for description in descriptions]
        return tuple(zip(paths or distinct_paths(descriptions), lengths, strict=True))


def _variable(shape: Sequence[int], name: str) -> tf.Variable:
    with tf.init_scope():
        return tf.Variable(tf.zeros(shape), trainable=False, name=name)


def effective_rate(optimizer: Any) -> tf.Tensor:
    """Returns the change of weights for a gradient of 1: learning rate divided by loss scale."""
    # Use the mean rate of several optimizers: `rescale` is exact if one factor changes all rates.
    found = [tf.cast(leaf.learning_rate, tf.float32) for leaf in leaves(optimizer)]
    rate = tf.add_n(found) / len(found)
    return rate / tf.cast(optimizer.scale_loss(tf.ones([])), tf.float32)

"""Applies averaged gradients, if the participation of all ranks in the step permits it.

The weight of a rank is its share of all samples. Waiting for the total number of samples would
double the time of a small step. Ranks therefore expect as many samples as in the last step, and
check this in an all-reduce, usually in the Horovod cycle of the first bucket; see
`Exchanger.share`. A rank with exhausted input joins exchanges with zeros, because collectives need
all ranks. Either all ranks or none apply an update; otherwise, replicas would diverge.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import tensorflow as tf

from tfposeidon.gradients import all_finite, is_overwritten

Apply = Callable[[list[Any]], None]
"""Applies a list of averaged gradients, one per variable, with `None` for variables to skip."""

Join = Callable[[bool], bool]
"""Joins the next exchange, eagerly or as a graph; returns true once no rank has data."""


class Presence(NamedTuple):
    """Participation of ranks in a step, the same on every rank.

    `total` is the sum of the ranks' counts, `absent` the number of ranks with exhausted input, and
    `gradients` the number of ranks with each gradient, `[variables]`. All are float32.
    """

    total: tf.Tensor
    absent: tf.Tensor
    gradients: tf.Tensor

    @property
    def any_gradient(self) -> tf.Tensor:
        """True for each variable that has a gradient on any rank, `[variables]` bool."""
        return self.gradients > 0.0


def weight_of(count: tf.Tensor, total: tf.Tensor, ranks: int) -> tf.Tensor:
    """Returns the weight of a rank with `count` of `total` samples, a float32 scalar."""
    return tf.math.divide_no_nan(count * float(ranks), total)


class Expectation(NamedTuple):
    """Scalars of a step whose weights assume as many samples on each rank as in the last step.

    `count` is the number of samples of this rank, and `total` the number of samples of all ranks.
    `are_equal` is true if all ranks have equally many samples. `were_all` is true if every rank had
    a batch, and `were_wrong` if, in addition, a rank had another number of samples than expected.
    """

    count: tf.Tensor
    total: tf.Tensor
    are_equal: tf.Tensor
    were_all: tf.Tensor
    were_wrong: tf.Tensor


class Share(NamedTuple):
    """Participation of ranks in a step, and this rank's weight; a weight of `None` means 1.

    The weight is exact if there is no `expectation`.
    """

    presence: Presence
    weight: tf.Tensor | None = None
    expectation: Expectation | None = None


@dataclass(frozen=True)
class Means:
    """Averaged gradients, and the conditions under which they are applied.

    `missing` groups the indices of variables without a gradient on this rank in the traced step.
    Other ranks have a gradient for all variables of a group or for none. `present` is true for each
    variable with a gradient on some rank, and `expected` for each variable with an averaged
    gradient or a residual to apply, `[variables]` bool; both are `None` without an exchange.
    `everybody` is true if all ranks had a batch; `None` if exhausted input is not watched. `moves`
    is false at a learning rate of 0, at which the sent gradients would have no effect. `state` has
    pairs of a scheme's state variable and its new value.
    """

    values: list[Any]
    missing: tuple[list[int], ...] = ()
    present: tf.Tensor | None = None
    expected: tf.Tensor | None = None
    everybody: tf.Tensor | None = None
    moves: Any = True
    state: Sequence[tuple[tf.Variable, tf.Tensor]] = ()

    def times(self, factor: Any, variables: Sequence[Any]) -> Means:
        """Returns the averaged gradients times a factor, except values that overwrite variables."""
        # All values are dense, because only accumulated gradients have a factor.
        values = [
            v if v is None or is_overwritten(variable) else v * tf.cast(factor, v.dtype)
            for v, variable in zip(self.values, variables, strict=True)
        ]
        return replace(self, values=values)

    def update(self, apply: Apply) -> None:
        """Passes the values to `apply`, with `None` for variables without a gradient on any rank.

        If a rank's input is exhausted, all ranks skip the update. The step fails if no rank has any
        gradient, or if other ranks have gradients for only some variables of a group in `missing`.
        """
        run = functools.partial(self._apply, apply, self.values, self.missing)
        if self.everybody is None:
            run()
        else:
            tf.cond(self.everybody, run, lambda: None)

    def _apply(self, apply: Apply, values: list[Any], missing: Sequence[list[int]]) -> None:
        """Applies the values, except in groups of variables without a gradient on any rank."""
        if self.expected is not None and all(value is None for value in values):
            rule = (
                "At least one variable must have a gradient on some rank. Received: none. Compute "
                "the loss from the trainable variables."
            )
            tf.debugging.Assert(False, [rule])
            return
        if not missing:
            apply(values)
            return
        group, *others = missing
        found = tf.gather(self.present, group)
        without = [None if index in group else value for index, value in enumerate(values)]

        # Use a branch per group, not per variable: each branch traces the remaining groups again.
        def with_group() -> None:
            rule = (
                "Variables without a gradient on this rank must either all have one on other "
                "ranks, or all have none. Received: gradients for only some of them. Pass zeros as "
                "their gradients on this rank."
            )
            # If no rank has a gradient, schemes send only residuals, which not all schemes have.
            tf.debugging.Assert(tf.reduce_all(found) | ~tf.reduce_any(found), [rule, found])
            self._apply(apply, values, others)

        tf.cond(
            tf.reduce_any(tf.gather(self.expected, group)),
            with_group,
            lambda: self._apply(apply, without, others),
        )

    def keep_state(self) -> None:
        """Assigns the new state if all ranks had a batch, `moves` is true and values are finite."""
        if not self.state:
            return
        everybody = True if self.everybody is None else self.everybody
        # With loss scaling, the optimizer skips steps with non-finite gradients, so the sent
        # gradients would be lost. A residual that is NaN would also stay NaN.
        counts = tf.logical_and(tf.logical_and(everybody, self.moves), all_finite(self.values))

        def assign() -> None:
            for variable, value in self.state:
                variable.assign(value)

        tf.cond(counts, assign, lambda: None)


class JoinHook(NamedTuple):
    """One kind of exchange that a rank with exhausted input joins.

    `is_ordered` is true if its collectives are eager in eager steps, where Horovod matches them by
    order.
    """

    join: Join
    is_ordered: bool = True


def join_until_all_have_ended(hooks: Sequence[JoinHook], eagerly: bool) -> bool:
    """Joins exchanges until all ranks' input is exhausted; returns whether other ranks had data."""
    # The number and order of exchanges in the other ranks' steps are unknown here, so join all
    # concurrently, except for exchanges that Horovod matches by order.
    ordered = [hook for hook in hooks if eagerly and hook.is_ordered]
    groups = [[hook] for hook in hooks if hook not in ordered] + ([ordered] if ordered else [])

    def join(group: list[JoinHook]) -> bool:
        others_continued = False
        # Use a list and not a generator, because each turn must join all exchanges of the group.
        while not all([hook.join(eagerly) for hook in group]):  # noqa: C419
            others_continued = True
        return others_continued

    with ThreadPoolExecutor(len(groups)) as threads:
        # Use a list, because `map` raises a thread's error only when its result is read.
        return any(list(threads.map(join, groups)))

"""Means of a step, and the conditions under which they are applied.

The conditions must be equal on all ranks, or replicas would diverge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from tfposeidon.gradients.description import all_finite, is_overwritten

Apply = Callable[[list[Any]], None]
"""Applies a list of means, one per variable, with `None` for variables to skip."""


@dataclass(frozen=True)
class Means:
    """Mean gradients over all ranks, and whether they count.

    `missing` has groups of indices of variables without a gradient on this rank in the traced step;
    other ranks have a gradient for all of a group or for none. `present` is true for each variable
    with a gradient on some rank, and `expected` for each with a mean to apply, `[variables]` bool;
    `None` on one rank. `everybody` is true if all ranks had a batch; `None` if that is not watched.
    `moves` is false at a learning rate of 0, at which the sent gradients would have no effect.
    `state` has pairs of a state variable of schemes and its new value.
    """

    values: list[Any]
    missing: tuple[list[int], ...] = ()
    present: tf.Tensor | None = None
    expected: tf.Tensor | None = None
    everybody: tf.Tensor | None = None
    moves: Any = True
    state: tuple[tuple[tf.Variable, tf.Tensor], ...] = ()

    def times(self, factor: Any, variables: Sequence[Any]) -> Means:
        """Returns the means times a factor, except for values that overwrite their variables."""
        pairs = zip(self.values, variables, strict=True)
        return replace(
            self,
            values=[v if v is None or is_overwritten(w) else _times(v, factor) for v, w in pairs],
        )

    def update(self, apply: Apply) -> None:
        """Passes the means to `apply`; if a rank's input is exhausted, all ranks skip the update.

        `apply` receives `None` for variables that have a gradient on no rank. The step fails with
        `InvalidArgumentError` if no rank has any gradient, or if others have gradients for some but
        not all variables of a group in `missing`.
        """
        if self.everybody is None:
            self._apply_expected(apply)
        else:
            tf.cond(self.everybody, lambda: self._apply_expected(apply), lambda: None)

    def _apply_expected(self, apply: Apply) -> None:
        if self.expected is None:
            apply(self.values)
        else:
            _apply_expected(self.values, self.missing, self.present, self.expected, apply)

    def keep_state(self) -> None:
        """Assigns the new state if all ranks took part, weights move, and all means are finite."""
        if not self.state:
            return
        counts = (
            self.moves if self.everybody is None else tf.logical_and(self.everybody, self.moves)
        )
        # With loss scaling, the optimizer skips non-finite steps, so sent gradients would be lost.
        # Also, a NaN residual would stay NaN.
        finite = all_finite(self.values)

        def assign() -> None:
            for variable, value in self.state:
                variable.assign(value)

        tf.cond(tf.logical_and(counts, finite), assign, lambda: None)


def _times(value: Any, factor: Any) -> Any:
    if isinstance(value, tf.IndexedSlices):
        values = value.values * tf.cast(factor, value.dtype)
        return tf.IndexedSlices(values, value.indices, value.dense_shape)
    return value * tf.cast(factor, value.dtype)


def _apply_expected(
    values: list[Any],
    missing: Sequence[list[int]],
    present: tf.Tensor,
    expected: tf.Tensor,
    apply: Apply,
) -> None:
    """Applies means of variables that have a gradient on some rank; see `Means`."""
    if not any(value is not None for value in values):
        tf.debugging.Assert(
            False, ["At least one variable must have a gradient on some rank. Received: none."]
        )
        return
    if not missing:
        apply(values)
        return
    group, *others = missing
    found = tf.gather(present, group)
    without = [None if index in group else value for index, value in enumerate(values)]

    # Use a branch per group, not per variable: each branch traces the rest again.
    def with_group() -> None:
        rule = (
            "The variables without a gradient on this rank must all have one on other ranks, or "
            "none of them. Received: some have one. Pass zeros as the gradients of all of them."
        )
        # If no rank has a gradient, only residuals arrive, which not all schemes keep.
        tf.debugging.Assert(tf.reduce_all(found) | ~tf.reduce_any(found), [rule, found])
        _apply_expected(values, others, present, expected, apply)

    tf.cond(
        tf.reduce_any(tf.gather(expected, group)),
        with_group,
        lambda: _apply_expected(without, others, present, expected, apply),
    )

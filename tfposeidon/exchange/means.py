"""Means of a step, and the conditions under which they are applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from tfposeidon.gradients.description import is_overwritten

Apply = Callable[[list[Any]], None]
"""Applies a list of means, one per variable, with `None` for variables that are left out."""


@dataclass(frozen=True)
class Means:
    """Mean gradients over all ranks, and whether they count.

    Attributes:
      values: Mean of each variable: a tensor, `IndexedSlices` on one rank, or `None`.
      missing: Groups of indices of variables without a gradient on this rank in the step that is
        traced. Other ranks may have one for all of a group or for none.
      expected: True for each variable that has a mean to apply, `[variables]` bool; `None` on one
        rank.
      everybody: True if all ranks had a batch, a bool scalar; `None` where that is not watched.
      moves: True if the update moves the weights, a bool scalar. At a learning rate of 0 what was
        sent would be lost.
      state: Pairs of a variable of the schemes' state and its new value.
    """

    values: list[Any]
    missing: tuple[list[int], ...] = ()
    expected: tf.Tensor | None = None
    everybody: tf.Tensor | None = None
    moves: Any = True
    state: tuple[tuple[tf.Variable, tf.Tensor], ...] = ()

    def times(self, factor: Any, variables: Sequence[Any]) -> Means:
        """Returns the same with values multiplied, but for those that overwrite their variables.

        Args:
          factor: Factor for all values.
          variables: Variables of the values, in their order.
        """
        pairs = zip(self.values, variables, strict=True)
        return replace(
            self,
            values=[v if v is None or is_overwritten(w) else _times(v, factor) for v, w in pairs],
        )

    def update(self, apply: Apply) -> None:
        """Gives the means to `apply`, unless a rank is out of data: then all ranks drop the update.

        Args:
          apply: Function of a list of means, with `None` for variables that have a gradient on no
            rank.

        Raises:
          InvalidArgumentError: When the step runs, if no rank has any gradient, or if other ranks
            have gradients for some of a group of `missing` variables and not for others.
        """
        if self.everybody is None:
            self._apply_expected(apply)
        else:
            tf.cond(self.everybody, lambda: self._apply_expected(apply), lambda: None)

    def _apply_expected(self, apply: Apply) -> None:
        if self.expected is None:
            apply(self.values)
        else:
            _apply_expected(self.values, self.missing, self.expected, apply)

    def keep_state(self) -> None:
        """Assigns the schemes' new state, if the step counts.

        It counts if everybody took part, if it moves the weights, and if all means are finite.
        """
        if not self.state:
            return
        counts = (
            self.moves if self.everybody is None else tf.logical_and(self.everybody, self.moves)
        )
        # Under a loss scale the optimizer skips a step that is not finite: what was sent in it
        # would be lost. And a residual that is NaN would stay NaN.
        finite = tf.reduce_all(
            [tf.reduce_all(tf.math.is_finite(m)) for m in self.values if m is not None]
        )

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
    values: list[Any], missing: Sequence[list[int]], expected: tf.Tensor, apply: Apply
) -> None:
    """Applies means of variables that have a gradient on some rank; see `Means`."""
    if not any(value is not None for value in values):
        tf.debugging.Assert(
            False, ["There must be a gradient on some rank. Received: none for any variable."]
        )
        return
    if not missing:
        apply(values)
        return
    group, *others = missing
    found = tf.gather(expected, group)
    without = [None if index in group else value for index, value in enumerate(values)]

    # A branch for each group, not for each variable: each branch traces the rest once more.
    def with_group() -> None:
        rule = (
            "Of the variables without a gradient on this rank, all or none must have one on "
            "others. Received: some have. Give zeros as the gradients of all of them."
        )
        tf.debugging.Assert(tf.reduce_all(found), [rule, found])
        _apply_expected(values, others, expected, apply)

    tf.cond(
        tf.reduce_any(found), with_group, lambda: _apply_expected(without, others, expected, apply)
    )

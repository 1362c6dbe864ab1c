"""Gradient accumulation: sums gradients over several calls, and exchanges them once.

Think of it as Keras's `gradient_accumulation_steps`, with a weight per call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfposeidon.gradients.description import is_overwritten
from tfposeidon.state.placement import Placement
from tfposeidon.state.rank_state import StateDescription


@dataclass(frozen=True)
class Call:
    """One call of an optimizer that accumulates gradients.

    `weight` is the scalar weight of its gradients on this rank, or `None` if all ranks have equal
    weights. `is_due` is true if the call makes an update, and `scale` is its loss scale. `counter`
    is a variable that changes if the call counts; `None` if every call counts.
    """

    weight: Any
    is_due: tf.Tensor
    scale: Any = 1.0
    counter: Any = None


class Accumulation:
    """Weighted sums of gradients, and the sum of the weights.

    The sums differ between ranks. Each update resets them. Their variables belong to the
    optimizer's state.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        self._accumulators = [_Accumulator(optimizer, variable) for variable in variables]
        self._weight = optimizer.add_variable((), dtype="float32", name="accumulated_weight")
        # Equals the number of calls per update, except for calls before the optimizer was wrapped.
        self._calls = optimizer.add_variable((), dtype="int", name="accumulated_calls")

    def rank_state(self, size: int) -> list[tuple[Any, StateDescription]]:
        """Returns all variables of the sums, each with its description."""
        sums = [
            (accumulator.sum, _partial(f"accumulated_{i}", size))
            for i, accumulator in enumerate(self._accumulators)
        ]
        weight = self._weight, _partial("accumulated_weight", size)
        return [*sums, weight, (self._calls, StateDescription(name="accumulated_calls"))]

    def add(
        self,
        indices: Sequence[int],
        gradients: Sequence[Any],
        call: Call,
        update: Callable[[list[Any], Any, Any], None],
        wait: Callable[[], None],
    ) -> None:
        """Adds gradients; a due call passes means, total weight and number of calls to `update`."""
        weight = tf.cast(1.0 if call.weight is None else call.weight, tf.float32)
        accumulators = [self._accumulators[index] for index in indices]
        pairs = zip(accumulators, gradients, strict=True)
        # The loss scale may change between calls, so undo it for each of them.
        values = [None if g is None else one.plus(g, weight / call.scale) for one, g in pairs]
        total, calls = self._weight + weight, self._calls + 1

        def step() -> None:
            pairs = zip(accumulators, values, strict=True)
            scaled = total / call.scale
            means = [None if value is None else one.mean(value, scaled) for one, value in pairs]
            update(means, None if call.weight is None else total, calls)

        before = None if call.counter is None else tf.identity(call.counter)
        # The condition is the same on all ranks, because the branches contain collectives.
        tf.cond(call.is_due, step, wait)

        # Assign last, from plain tensors: a bucket must not wait for another bucket's accumulator.
        def keep() -> None:
            for accumulator, value in zip(accumulators, values, strict=True):
                if value is not None:
                    accumulator.keep(value, call.is_due)
                else:
                    # As in Keras, a variable without a gradient in the last call is not updated,
                    # and its sum is lost.
                    tf.cond(call.is_due, accumulator.reset, lambda: None)
            for variable, value in ((self._weight, total), (self._calls, calls)):
                variable.assign(tf.where(call.is_due, tf.zeros_like(value), value))

        if before is None:
            keep()
        else:
            tf.cond(tf.not_equal(tf.identity(call.counter), before), keep, lambda: None)

    def reset(self) -> None:
        """Resets the sums to zero."""
        for variable in (self._weight, self._calls):
            _clear(variable)
        for accumulator in self._accumulators:
            accumulator.reset()


class _Accumulator:
    """Accumulated gradient of one variable.

    Values that overwrite the variable are not summed: like Keras, it retains the largest.
    """

    def __init__(self, optimizer: Any, variable: Any) -> None:
        self.sum = optimizer.add_variable_from_reference(variable, name="accumulator")
        self._is_overwritten = is_overwritten(variable)

    def plus(self, gradient: Any, weight: tf.Tensor) -> tf.Tensor:
        dense = tf.cast(tf.convert_to_tensor(gradient), self.sum.dtype)
        if self._is_overwritten:
            return tf.maximum(tf.convert_to_tensor(self.sum), dense)
        # Ignore gradients of empty batches: their mean is NaN.
        return self.sum + tf.where(
            weight > 0.0, dense * tf.cast(weight, dense.dtype), tf.zeros_like(dense)
        )

    def mean(self, value: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
        if self._is_overwritten:
            return value
        return tf.math.divide_no_nan(value, tf.cast(total, value.dtype))

    def keep(self, value: tf.Tensor, due: tf.Tensor) -> None:
        self.sum.assign(tf.where(due, tf.zeros_like(value), value))

    def reset(self) -> None:
        _clear(self.sum)


def _partial(name: str, owners: int) -> StateDescription:
    return StateDescription(name=name, placement=Placement.PARTIAL, owners=owners)


def _clear(variable: Any) -> None:
    variable.assign(tf.zeros_like(variable))

"""Gradient accumulation: sums gradients over several calls, and exchanges them once.

Think of it as Keras's `gradient_accumulation_steps`, with a weight per call. Sufficient factors are
accumulated by stacking their rows, because a sum of products is the product of the stacked factors.
They are summed as a dense matrix if stacking would need more rows than any matrix of that size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from tfposeidon.gradients.description import is_overwritten
from tfposeidon.gradients.embedding_rows import Rows, as_product
from tfposeidon.gradients.factors import FactorPair
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

    def __init__(self, optimizer: Any, variables: Sequence[Any], steps: int) -> None:
        self._accumulators = [
            _Accumulator(optimizer, variable, f"accumulated_{i}", steps)
            for i, variable in enumerate(variables)
        ]
        self._weight = optimizer.add_variable((), dtype="float32", name="accumulated_weight")
        # Equals the number of calls per update, except for calls before the optimizer was wrapped.
        self._calls = optimizer.add_variable((), dtype="int", name="accumulated_calls")

    def rank_state(self, rank: int, size: int) -> list[tuple[Any, StateDescription]]:
        """Returns all variables of the sums, each with its description."""
        sums = [
            pair
            for accumulator in self._accumulators
            for pair in accumulator.rank_state(rank, size)
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
    """Accumulated gradient of one variable: a sum of matrices, and stacked rows of factors.

    Values that overwrite the variable are not summed: like Keras, it retains the largest. Mostly
    either the matrix or the rows are empty. If calls had different numbers of rows and both are in
    use, the mean combines them in whichever form the last call has.
    """

    def __init__(self, optimizer: Any, variable: Any, name: str, steps: int) -> None:
        self.name = name
        self.steps = steps
        self.matrix = optimizer.add_variable_from_reference(variable, name="accumulator")
        self.rows = _FactorAccumulator(self.matrix) if len(variable.shape) > 1 else None
        self._is_overwritten = is_overwritten(variable)

    def rank_state(self, rank: int, size: int) -> list[tuple[Any, StateDescription]]:
        rows = [] if self.rows is None else self.rows.rank_state(self.name, rank, size)
        return [(self.matrix, _partial(self.name, size)), *rows]

    def plus(self, gradient: Any, weight: tf.Tensor) -> Any:
        if isinstance(gradient, FactorPair):
            return self._plus_factors(gradient, weight)
        return self._plus_matrix(tf.convert_to_tensor(gradient), weight)

    def _plus_factors(self, factors: FactorPair, weight: tf.Tensor) -> _AccumulatedFactors:
        assert self.rows is not None
        rows = tf.shape(factors.right)[0]
        # If every call had this many rows, their sum would exceed the number of rows of the unit
        # matrix, so accumulate the matrix instead. In 16 bits, that takes two products; see
        # `_with_matrix`.
        products = 2 if factors.right.dtype.size == 2 else 1
        too_many = rows * self.steps > factors.enough_rows * products
        matrix = tf.cond(
            too_many,
            lambda: self._plus_matrix(self._whole(factors), weight),
            lambda: tf.convert_to_tensor(self.matrix),
        )
        kept = tf.where(too_many, 0, rows)
        few = replace(factors, left=factors.left[:kept], right=factors.right[:kept])
        return self.rows.plus(few, tf.where(too_many, 0.0, weight), matrix, too_many)

    def _whole(self, factors: FactorPair) -> tf.Tensor:
        product = tf.reshape(tf.cast(factors.own_product, self.matrix.dtype), self.matrix.shape)
        return product if factors.local is None else product + tf.cast(factors.local, product.dtype)

    def _plus_matrix(self, gradient: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        dense = tf.cast(gradient, self.matrix.dtype)
        if self._is_overwritten:
            return tf.maximum(tf.convert_to_tensor(self.matrix), dense)
        # Ignore gradients of empty batches: their mean is NaN.
        return self.matrix + tf.where(
            weight > 0.0, dense * tf.cast(weight, dense.dtype), tf.zeros_like(dense)
        )

    def mean(self, value: Any, total: tf.Tensor) -> Any:
        if isinstance(value, _AccumulatedFactors):
            return value.mean(total)
        if self._is_overwritten:
            return value
        if self.rows is not None:
            value = self.rows.added_to(value)
        return tf.math.divide_no_nan(value, tf.cast(total, value.dtype))

    def keep(self, value: Any, due: tf.Tensor) -> None:
        if isinstance(value, _AccumulatedFactors):
            assert self.rows is not None
            self.rows.keep(value, due)
            tf.cond(
                tf.logical_or(due, value.is_matrix),
                lambda: self._assign(value.matrix, due),
                lambda: None,
            )
            return
        self._assign(value, due)
        if self.rows is not None:
            tf.cond(due, self.rows.clear, lambda: None)

    def _assign(self, matrix: tf.Tensor, due: tf.Tensor) -> None:
        self.matrix.assign(tf.where(due, tf.zeros_like(matrix), matrix))

    def reset(self) -> None:
        _clear(self.matrix)
        if self.rows is not None:
            self.rows.clear()


class _FactorAccumulator:
    """Variables for the stacked factors of several calls, each row's weight, and the local term.

    Widths and dtypes are known only when a step is traced, but the variables must exist before. All
    are therefore empty at first, and floats have at least 32 bits.
    """

    def __init__(self, matrix: Any) -> None:
        self.shape, self.dtype = tuple(matrix.shape), matrix.dtype
        wide = "float64" if matrix.dtype == "float64" else "float32"
        with tf.init_scope():
            self.left = _growing([0, 0], wide, "left")
            self.right = _growing([0, 0], wide, "right")
            self.indices = _growing([0], "int32", "indices")
            self.weights = _growing([0], "float32", "weights")
            self.local = _growing([0], wide, "local")
            self.weight = tf.Variable(0.0, trainable=False, name="weight")

    def rank_state(self, name: str, rank: int, size: int) -> list[tuple[Any, StateDescription]]:
        parts = {
            "left": self.left,
            "right": self.right,
            "indices": self.indices,
            "weights": self.weights,
        }
        rows = [
            (variable, _partial(f"{name}_{part}", size, offset=rank, concatenated=True))
            for part, variable in parts.items()
        ]
        local = self.local, StateDescription(name=f"{name}_local")
        return [*rows, local, (self.weight, _partial(f"{name}_weight", size))]

    def plus(
        self, factors: FactorPair, weight: tf.Tensor, matrix: tf.Tensor, is_matrix: tf.Tensor
    ) -> _AccumulatedFactors:
        rows = tf.shape(factors.right)[0]
        # Indices need a variable of their own: float32 cannot represent all 32-bit integers.
        if isinstance(factors, Rows):
            left = tf.concat([self.indices, factors.left], 0)
        else:
            left = _below(self.left, factors.left)
        joined = replace(factors, left=left, right=_below(self.right, factors.right))
        weights = tf.concat([self.weights, tf.fill([rows], weight)], 0)
        return _AccumulatedFactors(joined, weights, self.weight + weight, matrix, is_matrix)

    def keep(self, value: _AccumulatedFactors, due: tf.Tensor) -> None:
        factors = value.factors
        rows = tf.where(due, 0, tf.size(value.weights))
        left = self.indices if isinstance(factors, Rows) else self.left
        for variable, tensor in (
            (left, factors.left),
            (self.right, factors.right),
            (self.weights, value.weights),
        ):
            variable.assign(tf.cast(tensor[:rows], variable.dtype))
        self.weight.assign(tf.where(due, 0.0, value.weight))
        if factors.local is not None:
            local = tf.reshape(tf.cast(factors.local, self.local.dtype), [-1])
            self.local.assign(local[: tf.where(due, 0, tf.size(local))])

    def added_to(self, matrix: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the rows' product and a matrix, in the variable's shape."""
        return tf.cond(tf.size(self.weights) > 0, lambda: matrix + self._product(), lambda: matrix)

    def _product(self) -> tf.Tensor:
        right = self.right * tf.cast(self.weights, self.right.dtype)[:, tf.newaxis]
        product = tf.cond(
            tf.size(self.indices) > 0,
            lambda: tf.math.unsorted_segment_sum(
                right, tf.convert_to_tensor(self.indices), self.shape[0]
            ),
            lambda: tf.linalg.matmul(self.left, right, transpose_a=True),
        )
        total = tf.reshape(product, [-1])
        # Do not use a tf.cond on whether there is a local term: in TensorFlow 2.21, such a tf.cond
        # after the one above took the wrong branch.
        local = tf.concat([self.local, tf.zeros_like(total)], 0)[: tf.size(total)]
        return tf.cast(
            tf.reshape(total + local * tf.cast(self.weight, local.dtype), self.shape), self.dtype
        )

    def clear(self) -> None:
        for variable in (self.left, self.right, self.indices, self.weights, self.local):
            variable.assign(variable[:0])
        self.weight.assign(0.0)


class _AccumulatedFactors:
    """Factors of all calls so far, as tensors of the traced step.

    `factors` has all rows without weights. Its local term is the same in all calls, because
    variables change only with updates. `weights` is `[K]` float32; `weight` is the total weight of
    these calls; `matrix` is the sum of all other calls, and `is_matrix` is true if the current call
    is one of those.
    """

    def __init__(
        self,
        factors: FactorPair,
        weights: tf.Tensor,
        weight: tf.Tensor,
        matrix: tf.Tensor,
        is_matrix: tf.Tensor,
    ) -> None:
        self.factors, self.weights, self.weight = factors, weights, weight
        self.matrix, self.is_matrix = matrix, is_matrix

    def mean(self, total: tf.Tensor) -> FactorPair:
        """Returns the mean over all calls, whose weights sum to `total`."""
        right = self.factors.right
        wide = tf.float64 if right.dtype == tf.float64 else tf.float32
        weights = tf.math.divide_no_nan(tf.cast(self.weights, wide), tf.cast(total, wide))
        mean = self.factors.weighted(weights)
        left, right, weights = tf.cond(
            # A matrix of zeros needs no rows. It is not recorded whether any call was added to it.
            tf.reduce_any(tf.not_equal(self.matrix, 0)),
            lambda: self._with_matrix(mean, weights, total),
            lambda: (mean.left, mean.right, weights),
        )
        # Receivers multiply a 16-bit product by its weights.
        weight = weights if right.dtype.size == 2 else None
        left, right = (
            tf.ensure_shape(t, [None, *s.shape[1:]])
            for t, s in ((left, mean.left), (right, mean.right))
        )
        return replace(mean, left=left, right=right, weight=weight)

    def _with_matrix(
        self, mean: FactorPair, weights: tf.Tensor, total: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns factors and weights, with the matrix appended as more rows.

        The rows are the matrix's product with the unit matrix. 16-bit rows need two such products,
        of the rounded matrix and of the rounding error. One alone would bias the mean.
        """
        wide = tf.cast(self.matrix, weights.dtype)
        if mean.local is not None:
            # The local term is added to the whole mean afterwards, so subtract the matrix's share
            # of it.
            wide -= tf.cast(mean.local, wide.dtype) * tf.cast(total - self.weight, wide.dtype)
        rest = tf.reshape(tf.math.divide_no_nan(wide, tf.cast(total, wide.dtype)), mean.widths)
        terms = [mean]
        for _ in range(2 if mean.right.dtype.size == 2 else 1):
            rounded = tf.cast(rest, mean.right.dtype)
            terms.append(as_product(rounded, mean.shape))
            rest -= tf.cast(rounded, rest.dtype)
        left, right = (
            tf.concat(parts, 0) for parts in zip(*((t.left, t.right) for t in terms), strict=True)
        )
        added = tf.shape(right)[0] - tf.size(weights)
        return left, right, tf.concat([weights, tf.ones([added], weights.dtype)], 0)


def _partial(name: str, owners: int, **what: Any) -> StateDescription:
    return StateDescription(name=name, placement=Placement.PARTIAL, owners=owners, **what)


def _growing(shape: list[int], dtype: str, name: str) -> tf.Variable:
    # The shape is dynamic: rows grow with each call, and their width is known only in a trace.
    return tf.Variable(
        tf.zeros(shape, dtype), shape=[None] * len(shape), trainable=False, name=name
    )


def _below(above: tf.Variable, tensor: tf.Tensor) -> tf.Tensor:
    # Reshape, because the empty variable of the first call has another width.
    held = tf.reshape(above, [-1, tensor.shape[1]])
    return tf.concat([tf.cast(held, tensor.dtype), tensor], 0)


def _clear(variable: Any) -> None:
    variable.assign(tf.zeros_like(variable))

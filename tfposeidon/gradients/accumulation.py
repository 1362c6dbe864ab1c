"""Gradients added up over several calls, so that one exchange serves them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from tfposeidon.gradients.embedding_rows import Rows, as_product
from tfposeidon.gradients.factors import Factors
from tfposeidon.state.rank_state import StateDescription


class Accumulation:
    """Sums of gradients, each times the number of samples behind it, and what they sum to.

    They differ from rank to rank. Every n-th call is due for an update, and starts anew. A sum of products is the
    product of what stands on top of one another: factors are kept as they are, unless they would be more rows than any
    matrix of that size needs.

    Args:
      optimizer: Makes the variables, as its state.
      variables: What the gradients are for.
      steps: n.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any], steps: int) -> None:
        self.steps = steps
        self._sums = [
            _Sum(optimizer, variable, f"accumulated_{i}", steps)
            for i, variable in enumerate(variables)
        ]
        self._weight = optimizer.add_variable((), dtype="float32", name="accumulated_weight")
        self._calls = optimizer.add_variable((), dtype="int", name="accumulated_calls")

    def rank_state(self, rank: int, size: int) -> list[tuple[Any, StateDescription]]:
        """All variables, and what each of them is."""
        sums = [pair for one in self._sums for pair in one.rank_state(rank, size)]
        weight = self._weight, StateDescription(name="accumulated_weight", owners=size)
        return [*sums, weight, (self._calls, StateDescription(name="accumulated_calls"))]

    def add(
        self,
        places: Sequence[int],
        gradients: Sequence[Any],
        count: Any,
        update: Callable[[list[Any], Any], None],
    ) -> None:
        """Adds gradients; if this call is due, gives their mean to `update`.

        Args:
          places: Of the gradients' variables among those of the constructor.
          gradients: Tensors, `IndexedSlices`, `Factors` or `None`.
          count: Samples behind them, or `None` for equal weights.
          update: Called with the means, of the same kinds, and, unless `count` is `None`, the number of samples behind
            them.
        """
        weight = tf.cast(1.0 if count is None else count, tf.float32)
        given = [(self._sums[place], g) for place, g in zip(places, gradients, strict=True)]
        values = [None if g is None else one.plus(g, weight) for one, g in given]
        total, calls = self._weight + weight, self._calls + 1
        due = calls >= self.steps

        def step() -> None:
            pairs = zip(given, values, strict=True)
            means = [None if value is None else one.mean(value, total) for (one, _), value in pairs]
            update(means, None if count is None else total)

        tf.cond(due, step, lambda: None)
        # Assigned last, from plain tensors: a bucket must not wait for another's accumulator.
        for (one, _), value in zip(given, values, strict=True):
            if value is not None:
                one.keep(value, due)
            else:
                # As in Keras: what has no gradient in the last call is not updated, and what it had is gone.
                tf.cond(due, one.reset, lambda: None)
        for variable, value in ((self._weight, total), (self._calls, calls)):
            variable.assign(tf.where(due, tf.zeros_like(value), value))

    def reset(self) -> None:
        """Drops what was added since the last update."""
        for variable in (self._weight, self._calls):
            _clear(variable)
        for one in self._sums:
            one.reset()


class _Sum:
    """Of one variable's gradients: those that came as matrices in one, those that came as factors on one stack.

    Mostly one of them is empty. If not, as calls had different numbers of rows, each can stand for the other.
    """

    def __init__(self, optimizer: Any, variable: Any, name: str, steps: int) -> None:
        self.name = name
        self.steps = steps
        self.matrix = optimizer.add_variable_from_reference(variable, name="accumulator")
        self.stack = _Stack(self.matrix) if len(variable.shape) > 1 else None

    def rank_state(self, rank: int, size: int) -> list[tuple[Any, StateDescription]]:
        stacked = [] if self.stack is None else self.stack.rank_state(self.name, rank, size)
        return [(self.matrix, StateDescription(name=self.name, owners=size)), *stacked]

    def plus(self, gradient: Any, weight: tf.Tensor) -> Any:
        if isinstance(gradient, Factors):
            return self._plus_factors(gradient, weight)
        return self._plus_matrix(tf.convert_to_tensor(gradient), weight)

    def _plus_factors(self, factors: Factors, weight: tf.Tensor) -> _Stacked:
        assert self.stack is not None
        rows = tf.shape(factors.right)[0]
        # With as many in every step, the matrix would be fewer: it is kept instead.
        too_many = rows * self.steps > factors.enough_rows * (
            2 if factors.right.dtype.size == 2 else 1
        )
        matrix = tf.cond(
            too_many,
            lambda: self._plus_matrix(self._whole(factors), weight),
            lambda: tf.convert_to_tensor(self.matrix),
        )
        kept = tf.where(too_many, 0, rows)
        few = replace(factors, left=factors.left[:kept], right=factors.right[:kept])
        return self.stack.plus(few, tf.where(too_many, 0.0, weight), matrix, too_many)

    def _whole(self, factors: Factors) -> tf.Tensor:
        product = tf.reshape(tf.cast(factors.own_product, self.matrix.dtype), self.matrix.shape)
        return product if factors.local is None else product + tf.cast(factors.local, product.dtype)

    def _plus_matrix(self, gradient: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        dense = tf.cast(gradient, self.matrix.dtype)
        # No samples, no say: a mean over an empty batch is not a number.
        return self.matrix + tf.where(
            weight > 0.0, dense * tf.cast(weight, dense.dtype), tf.zeros_like(dense)
        )

    def mean(self, value: Any, total: tf.Tensor) -> Any:
        if isinstance(value, _Stacked):
            return value.mean(total)
        if self.stack is not None:
            value = self.stack.added_to(value)
        return tf.math.divide_no_nan(value, tf.cast(total, value.dtype))

    def keep(self, value: Any, due: tf.Tensor) -> None:
        if isinstance(value, _Stacked):
            assert self.stack is not None
            self.stack.keep(value, due)
            tf.cond(
                tf.logical_or(due, value.is_matrix),
                lambda: self._assign(value.matrix, due),
                lambda: None,
            )
            return
        self._assign(value, due)
        if self.stack is not None:
            tf.cond(due, self.stack.clear, lambda: None)

    def _assign(self, matrix: tf.Tensor, due: tf.Tensor) -> None:
        self.matrix.assign(tf.where(due, tf.zeros_like(matrix), matrix))

    def reset(self) -> None:
        _clear(self.matrix)
        if self.stack is not None:
            self.stack.clear()


class _Stack:
    """Factors of several calls on top of one another, what each row counts, and the local term.

    Widths and types are known when a step is traced, but this is state before that: all parts begin empty, and floats
    have at least 32 bits.

    Args:
      matrix: What the factors are a part of.
    """

    def __init__(self, matrix: Any) -> None:
        self.shape, self.dtype = tuple(matrix.shape), matrix.dtype
        wide = "float64" if matrix.dtype == "float64" else "float32"
        with tf.init_scope():
            self.left, self.right = (_growing([0, 0], wide, part) for part in ("left", "right"))
            self.indices, self.weights = (
                _growing([0], "int32", "indices"),
                _growing([0], "float32", "weights"),
            )
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
            (
                variable,
                StateDescription(
                    name=f"{name}_{part}", offset=rank, owners=size, concatenated=True
                ),
            )
            for part, variable in parts.items()
        ]
        local = self.local, StateDescription(name=f"{name}_local")
        return [*rows, local, (self.weight, StateDescription(name=f"{name}_weight", owners=size))]

    def plus(
        self, factors: Factors, weight: tf.Tensor, matrix: tf.Tensor, is_matrix: tf.Tensor
    ) -> _Stacked:
        rows = tf.shape(factors.right)[0]
        if isinstance(factors, Rows):
            left = tf.concat([self.indices, factors.left], 0)
        else:
            left = _below(self.left, factors.left)
        joined = replace(factors, left=left, right=_below(self.right, factors.right))
        weights = tf.concat([self.weights, tf.fill([rows], weight)], 0)
        return _Stacked(joined, weights, self.weight + weight, matrix, is_matrix)

    def keep(self, value: _Stacked, due: tf.Tensor) -> None:
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
        """What it stands for and a matrix, in the variable's shape; the matrix itself if it is empty."""
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
        # Without a condition, of which TensorFlow 2.21 took the wrong branch behind the one above.
        local = tf.concat([self.local, tf.zeros_like(total)], 0)[: tf.size(total)]
        return tf.cast(
            tf.reshape(total + local * tf.cast(self.weight, local.dtype), self.shape), self.dtype
        )

    def clear(self) -> None:
        for variable in (self.left, self.right, self.indices, self.weights, self.local):
            variable.assign(variable[:0])
        self.weight.assign(0.0)


class _Stacked:
    """Factors of all calls so far.

    Attributes:
      factors: All rows, without weights. The local term is the same in all calls: variables change with updates only.
      weights: Of each row, `[K]` float32.
      weight: Of all these calls, scalar float32.
      matrix: What the other calls came to, in the variable's shape.
      is_matrix: Whether this call is one of these.
    """

    def __init__(
        self,
        factors: Factors,
        weights: tf.Tensor,
        weight: tf.Tensor,
        matrix: tf.Tensor,
        is_matrix: tf.Tensor,
    ) -> None:
        self.factors, self.weights, self.weight = factors, weights, weight
        self.matrix, self.is_matrix = matrix, is_matrix

    def mean(self, total: tf.Tensor) -> Factors:
        """Of all calls."""
        right = self.factors.right
        wide = tf.float64 if right.dtype == tf.float64 else tf.float32
        weights = tf.math.divide_no_nan(tf.cast(self.weights, wide), tf.cast(total, wide))
        mean = self.factors.weighted(weights)
        left, right, weights = tf.cond(
            tf.reduce_any(tf.not_equal(self.matrix, 0)),
            lambda: self._with_matrix(mean, weights, total),
            lambda: (mean.left, mean.right, weights),
        )
        # A 16-bit product is multiplied by its weights where it arrives.
        weight = weights if right.dtype.size == 2 else None
        left, right = (
            tf.ensure_shape(t, [None, *s.shape[1:]])
            for t, s in ((left, mean.left), (right, mean.right))
        )
        return replace(mean, left=left, right=right, weight=weight)

    def _with_matrix(
        self, mean: Factors, weights: tf.Tensor, total: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The matrix as a product with the unit matrix, of a high and a low part where rows have 16 bits."""
        wide = tf.cast(self.matrix, weights.dtype)
        if mean.local is not None:
            # Which is added to the whole mean afterwards.
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
        more = tf.shape(right)[0] - tf.size(weights)
        return left, right, tf.concat([weights, tf.ones([more], weights.dtype)], 0)


def _growing(shape: list[int], dtype: str, name: str) -> tf.Variable:
    return tf.Variable(
        tf.zeros(shape, dtype), shape=[None] * len(shape), trainable=False, name=name
    )


def _below(above: tf.Variable, tensor: tf.Tensor) -> tf.Tensor:
    held = tf.reshape(above, [-1, tensor.shape[1]])
    return tf.concat([tf.cast(held, tensor.dtype), tensor], 0)


def _clear(variable: Any) -> None:
    variable.assign(tf.zeros_like(variable))

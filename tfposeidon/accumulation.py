"""Gradients added up over several calls, so that one exchange serves them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from tfposeidon.embedding_rows import Rows
from tfposeidon.rank_state import Piece
from tfposeidon.sufficient_factors import Factors


class Accumulation:
    """Sums of gradients, each times the number of samples behind it, and what they sum to.

    They differ from rank to rank. Every n-th call is due for an update, and starts anew. A sum of products is the
    product of what stands on top of one another: factors are kept as they are.

    Args:
      optimizer: Makes the variables, as its state.
      variables: What the gradients are for.
      steps: n.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any], steps: int) -> None:
        self.steps = steps
        self._matrices = [
            _Matrix(optimizer.add_variable_from_reference(v, name="accumulator"), f"accumulated_{i}")
            for i, v in enumerate(variables)
        ]
        self._stacks: list[_Stack] = []
        self._weight = optimizer.add_variable((), dtype="float32", name="accumulated_weight")
        self._calls = optimizer.add_variable((), dtype="int", name="accumulated_calls")

    def take_factors(self) -> None:
        """Makes room for factors, which begins empty."""
        if not self._stacks:
            self._stacks = [_Stack(m.variable.dtype, m.name) for m in self._matrices]

    def rank_state(self, rank: int, size: int) -> list[tuple[Any, Piece]]:
        """All variables, and what each of them is."""
        sums = [(m.variable, Piece(name=m.name, holders=size)) for m in self._matrices]
        stacked = [pair for stack in self._stacks for pair in stack.rank_state(rank, size)]
        weight = self._weight, Piece(name="accumulated_weight", holders=size)
        return [*sums, *stacked, weight, (self._calls, Piece(name="accumulated_calls"))]

    def hold_matrices(self, places: Sequence[int]) -> list[bool]:
        """Which of these variables have more than factors since the last update; eager."""
        return [bool(tf.reduce_any(tf.not_equal(self._matrices[place].variable, 0)).numpy()) for place in places]

    def add(
        self, places: Sequence[int], gradients: Sequence[Any], count: Any, update: Callable[[list[Any], Any], None]
    ) -> None:
        """Adds gradients; if this call is due, gives their mean to `update`.

        Args:
          places: Of the gradients' variables among those of the constructor.
          gradients: Tensors, `IndexedSlices`, `Factors` or `None`.
          count: Samples behind them, or `None` for equal weights.
          update: Called with the means and, unless `count` is `None`, the number of samples behind them.
        """
        weight = tf.cast(1.0 if count is None else count, tf.float32)
        held = [self._holder(place, gradient) for place, gradient in zip(places, gradients, strict=True)]
        sums = [None if g is None else holder.plus(g, weight) for holder, g in zip(held, gradients, strict=True)]
        total, calls = self._weight + weight, self._calls + 1
        due = calls >= self.steps

        def step() -> None:
            means = [None if s is None else holder.mean(s, total) for holder, s in zip(held, sums, strict=True)]
            update(means, None if count is None else total)

        tf.cond(due, step, lambda: None)
        # Assigned last, from plain tensors: a bucket must not wait for another's accumulator.
        for holder, value in zip(held, sums, strict=True):
            if value is not None:
                holder.keep(value, due)
        for variable, value in ((self._weight, total), (self._calls, calls)):
            variable.assign(tf.where(due, tf.zeros_like(value), value))

    def _holder(self, place: int, gradient: Any) -> _Matrix | _Stack:
        if isinstance(gradient, Factors):
            return self._stacks[place]
        matrix = self._matrices[place]
        if self._stacks:
            # What was stacked before the plan changed.
            with tf.init_scope():
                self._stacks[place].move_to(matrix, self._weight)
        return matrix

    def reset(self) -> None:
        """Drops what was added since the last update."""
        for variable in (*(m.variable for m in self._matrices), self._weight, self._calls):
            variable.assign(tf.zeros_like(variable))
        for stack in self._stacks:
            stack.clear()


class _Matrix:
    """A sum of gradients as one matrix."""

    def __init__(self, variable: Any, name: str) -> None:
        self.variable, self.name = variable, name

    def plus(self, gradient: Any, weight: tf.Tensor) -> tf.Tensor:
        total = self.variable
        dense = tf.cast(tf.convert_to_tensor(gradient), total.dtype)
        # No samples, no say: a mean over an empty batch is not a number.
        return total + tf.where(weight > 0.0, dense * tf.cast(weight, dense.dtype), tf.zeros_like(dense))

    def mean(self, value: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
        return tf.math.divide_no_nan(value, tf.cast(total, value.dtype))

    def keep(self, value: tf.Tensor, due: tf.Tensor) -> None:
        self.variable.assign(tf.where(due, tf.zeros_like(value), value))


class _Stack:
    """Factors of several calls, on top of one another, with what each row counts, and the local term.

    Their widths are not known before a step is traced, and they are state before that.
    """

    def __init__(self, dtype: str, name: str) -> None:
        self.name = name
        # Wide enough for factors of any type; indices have a tensor of their own.
        wide = "float64" if dtype == "float64" else "float32"
        with tf.init_scope():
            self.left, self.right = (_growing([0, 0], wide, part) for part in ("left", "right"))
            self.indices, self.weights = _growing([0], "int32", "indices"), _growing([0], "float32", "weights")
            self.local = _growing([0], wide, "local")

    def rank_state(self, rank: int, size: int) -> list[tuple[Any, Piece]]:
        parts = {"left": self.left, "right": self.right, "indices": self.indices, "weights": self.weights}
        rows = [
            (variable, Piece(name=f"{self.name}_{part}", offset=rank, holders=size, joined=True))
            for part, variable in parts.items()
        ]
        return [*rows, (self.local, Piece(name=f"{self.name}_local"))]

    def plus(self, factors: Factors, weight: tf.Tensor) -> tuple[Factors, tf.Tensor]:
        rows = tf.shape(factors.right)[0]
        if isinstance(factors, Rows):
            left = tf.concat([self.indices, factors.left], 0)
        else:
            left = _below(self.left, factors.left)
        joined = replace(factors, left=left, right=_below(self.right, factors.right))
        return joined, tf.concat([self.weights, tf.fill([rows], weight)], 0)

    def mean(self, value: tuple[Factors, tf.Tensor], total: tf.Tensor) -> Factors:
        factors, weights = value
        # The local term is the same in all calls: variables change with updates only.
        return factors.weighted(tf.math.divide_no_nan(weights, total))

    def keep(self, value: tuple[Factors, tf.Tensor], due: tf.Tensor) -> None:
        factors, weights = value
        rows = tf.where(due, 0, tf.size(weights))
        left = self.indices if isinstance(factors, Rows) else self.left
        for variable, tensor in ((left, factors.left), (self.right, factors.right), (self.weights, weights)):
            variable.assign(tf.cast(tensor[:rows], variable.dtype))
        if factors.local is not None:
            local = tf.reshape(tf.cast(factors.local, self.local.dtype), [-1])
            self.local.assign(local[: tf.where(due, 0, tf.size(local))])

    def move_to(self, matrix: _Matrix, weight: Any) -> None:
        """Adds what it stands for to `matrix`, and begins anew.

        Args:
          weight: All that was added since the last update.
        """
        if not tf.size(self.weights):
            return
        left, indices, right = (v.numpy() for v in (self.left, self.indices, self.right))
        factors = Rows(indices, right, table=matrix.variable.shape[0]) if indices.size else Factors(left, right)
        factors = replace(factors, left=tf.constant(factors.left), right=tf.constant(factors.right))
        weighted = factors.weighted(self.weights)
        for part in (weighted.product(weighted.packed), self.local * tf.cast(weight, self.local.dtype)):
            if tf.size(part):
                more = tf.reshape(tf.cast(part, matrix.variable.dtype), matrix.variable.shape)
                matrix.variable.assign(matrix.variable + more)
        self.clear()

    def clear(self) -> None:
        for variable in (self.left, self.right, self.indices, self.weights, self.local):
            variable.assign(variable[:0])


def _growing(shape: list[int], dtype: str, name: str) -> tf.Variable:
    return tf.Variable(tf.zeros(shape, dtype), shape=[None] * len(shape), trainable=False, name=name)


def _below(above: tf.Variable, tensor: tf.Tensor) -> tf.Tensor:
    held = tf.reshape(above, [-1, tensor.shape[1]])
    return tf.concat([tf.cast(held, tensor.dtype), tensor], 0)

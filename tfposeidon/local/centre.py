"""The centre: weights that are equal on all ranks, beside those that each rank trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


class Centre:
    """Copies of variables: of the centre, while the variables hold what this rank trains.

    Where the centre is shown, it is the other way round: the variables hold the centre, and the
    copies what this rank goes on from. Before the first step there is nothing but the centre, in
    the variables.

    Args:
      variables: Keras or TensorFlow variables that the optimizer trains.

    Attributes:
      variables: Variables that the optimizer trains, then statistics that travel along.
      copies: A Keras variable for each of `variables`.
      trained: Number of variables that the optimizer trains.
      has_begun: Bool variable: True once a step has told the two apart.
      is_shown: Bool variable: True while the variables hold the centre.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self.variables: list[Any] = []
        self.copies: list[keras.Variable] = []
        # On the CPU: Python and branches read them in each step.
        with tf.init_scope(), tf.device("/CPU:0"):
            self.has_begun = tf.Variable(False, trainable=False, name="has_begun")
            self.is_shown = tf.Variable(False, trainable=False, name="is_shown")
        self._add(variables)
        self.trained = len(self.variables)

    def _add(self, variables: Sequence[Any]) -> None:
        with tf.init_scope():
            for variable in variables:
                path = getattr(variable, "path", None) or variable.name
                copy = keras.Variable(
                    tf.convert_to_tensor(variable),
                    dtype=keras.backend.standardize_dtype(variable.dtype),
                    name="centre_of_" + path.replace("/", "_").replace(":", "_"),
                )
                self.variables.append(variable)
                self.copies.append(copy)

    def carry(self, statistics: Sequence[Any]) -> None:
        """Adds statistics, which no gradient moves, such as moving averages of layers.

        Args:
          statistics: Floating-point variables; those that it has already are left out.
        """
        known = {id(variable) for variable in self.variables}
        self._add([variable for variable in statistics if id(variable) not in known])

    def begin(self) -> None:
        """Begins a step: from here on the variables hold what this rank trains."""
        is_apart = tf.logical_and(self.has_begun, tf.logical_not(self.is_shown))
        tf.cond(is_apart, lambda: None, self._part)

    def _part(self) -> None:
        # One branch for both: each branch takes as long to trace as it has variables.
        has_begun = self.has_begun.read_value()
        for index, (variable, copy) in enumerate(zip(self.variables, self.copies, strict=True)):
            now, kept = tf.convert_to_tensor(variable), tf.convert_to_tensor(copy)
            # Statistics have moved in this step already: `hide` has kept them before the first one.
            is_kept = index >= self.trained
            copy.assign(either(has_begun, now, kept) if is_kept else now)
            variable.assign(either(has_begun, kept, now))
        self.has_begun.assign(True)
        self.is_shown.assign(False)

    def _swap(self) -> None:
        for variable, copy in zip(self.variables, self.copies, strict=True):
            own, other = tf.convert_to_tensor(variable), tf.convert_to_tensor(copy)
            variable.assign(other)
            copy.assign(own)
        self.is_shown.assign(tf.logical_not(self.is_shown))

    def show(self) -> bool:
        """Puts the centre into the variables.

        Returns:
          True if it was not there yet.
        """
        was_shown = bool(self.is_shown.numpy())
        if not was_shown:
            if self.has_begun.numpy():
                self._swap()
            else:
                self.is_shown.assign(True)
        return not was_shown

    def hide(self) -> bool:
        """Puts what this rank trains into the variables again, before a step.

        Returns:
          True if the centre was shown.
        """
        was_shown, has_begun = bool(self.is_shown.numpy()), bool(self.has_begun.numpy())
        if was_shown and has_begun:
            self._swap()
        elif not has_begun:
            self.is_shown.assign(False)
            self._keep_statistics()
        return was_shown

    def forget(self) -> None:
        """Makes this rank go on from what the variables hold, which becomes the centre."""
        self.has_begun.assign(False)
        self._keep_statistics()

    def _keep_statistics(self) -> None:
        for variable, copy in self._statistics:
            copy.assign(variable)

    @property
    def equal_variables(self) -> list[Any]:
        """Variables of `copies` or `variables` that hold the centre of trained variables."""
        is_apart = self.has_begun.numpy() and not self.is_shown.numpy()
        return list(self.copies if is_apart else self.variables)[: self.trained]

    @property
    def differences(self) -> list[tf.Tensor]:
        """How far trained variables are from the centre, one tensor for each."""
        pairs = zip(self.variables[: self.trained], self.copies, strict=False)
        return [
            tf.convert_to_tensor(variable) - tf.convert_to_tensor(copy) for variable, copy in pairs
        ]

    @property
    def own_statistics(self) -> list[tf.Tensor]:
        """This rank's values of the statistics; of those that are not finite, the centre's."""
        return [
            either(is_finite(variable), tf.convert_to_tensor(variable), tf.convert_to_tensor(copy))
            for variable, copy in self._statistics
        ]

    @property
    def _statistics(self) -> list[tuple[Any, Any]]:
        pairs = zip(self.variables, self.copies, strict=True)
        return list(pairs)[self.trained :]


def is_finite(values: Any) -> tf.Tensor:
    """Returns whether all values of a tensor or variable are finite, a bool scalar.

    Args:
      values: Floating-point tensor or variable.
    """
    return tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(values)))


def either(condition: tf.Tensor, yes: tf.Tensor, no: tf.Tensor) -> tf.Tensor:
    """Returns one of two tensors, without a pass over memory.

    `tf.where` would write a third one, and branches take long to trace.

    Args:
      condition: What decides, a bool scalar.
      yes: Tensor of any shape, returned if it is true.
      no: Tensor of the same shape and dtype.
    """
    return tf.raw_ops.Select(condition=condition, x=yes, y=no)

"""Global weights: equal on all ranks, and kept beside the weights that each rank trains.

Think of two sets of values for the same variables. One of them is in the variables, the other one
in copies, and `show` and `hide` swap the two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfposeidon.exchange import replicas


class GlobalWeights:
    """Copies of variables, which hold the global weights while a rank trains its own.

    While the global weights are shown, the copies hold the weights that this rank goes on from.
    Before the first step the variables hold the global weights, and the copies do not count.

    Attributes:
      variables: Variables that the optimizer trains, then averaged state of layers.
      copies: A Keras variable for each of `variables`.
      trained: Number of variables that the optimizer trains.
      has_begun: True once a step has told the two apart.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self.variables: list[Any] = []
        self.copies: list[keras.Variable] = []
        self.has_begun = self._may_be_shown = False
        self._shown: list[tf.Tensor] = []
        with tf.init_scope(), tf.device("/CPU:0"):
            self._is_shown = tf.Variable(False, trainable=False, name="is_shown")
        self._add(variables)
        self.trained = len(self.variables)

    def _add(self, variables: Sequence[Any]) -> None:
        with tf.init_scope():
            for variable in variables:
                path = getattr(variable, "path", None) or variable.name
                copy = keras.Variable(
                    tf.convert_to_tensor(variable),
                    dtype=keras.backend.standardize_dtype(variable.dtype),
                    name="global_" + path.replace("/", "_").replace(":", "_"),
                )
                self.variables.append(variable)
                self.copies.append(copy)
        # A partial, as TensorFlow counts the traces of methods over all their objects, and warns.
        swap = functools.partial(self._swap_values)
        self._swap: Callable[[], None] = tf.function(swap, autograph=False)

    def carry(self, statistics: Sequence[Any]) -> None:
        """Adds averaged state of layers; variables that it has already are left out."""
        known = {id(variable) for variable in self.variables}
        if new := [variable for variable in statistics if id(variable) not in known]:
            self._add(new)

    def begin(self) -> None:
        """Makes the variables hold this rank's own weights, before a step."""
        if not self.has_begun:
            for copy, variable in zip(self.copies, self.variables, strict=True):
                copy.assign(tf.convert_to_tensor(variable))
            self.has_begun = True
        self.hide()

    def show(self) -> bool:
        """Makes the variables hold the global weights; returns True if they did not."""
        if self.is_shown or not self.has_begun:
            return False
        self._may_be_shown = True
        self._swap()
        self.note_assigned()
        return True

    def hide(self) -> None:
        """Makes the variables hold this rank's own weights again, if `show` was called."""
        if self.is_shown:
            self._shown = []
            self._swap()
            self._may_be_shown = False

    @property
    def is_shown(self) -> bool:
        """True while the variables hold the global weights, and the copies this rank's own."""
        # The variable is not read in each step: mostly it is known to be False.
        return self._may_be_shown and bool(self._is_shown.numpy())

    @property
    def is_apart(self) -> bool:
        """True if the variables hold this rank's own weights, and the copies the global ones."""
        return self.has_begun and not self.is_shown

    @property
    def was_assigned(self) -> bool:
        """True if other weights were assigned since they are shown."""
        if not self.is_shown:
            return False
        now = self._values()
        if all(_lie_together(*pair) for pair in zip(self._shown, now, strict=True)):
            return False
        # Elsewhere, or on a GPU, whose memory has no address here.
        one, other = (replicas.checksum(each, on_device=True) for each in (self._shown, now))
        return one != other

    def restore(self, has_begun: bool) -> None:
        """Goes on from a checkpoint, which was saved while the global weights were shown."""
        self.has_begun = self._may_be_shown = has_begun
        self._is_shown.assign(has_begun)
        self.note_assigned()

    def note_assigned(self) -> None:
        """Takes the values that are shown for those that were, whoever has assigned them."""
        # No copies: TensorFlow writes into memory of its own where somebody else holds the tensor.
        self._shown = self._values()

    def restart(self) -> None:
        """Takes the values of the variables for the global weights and for this rank's own."""
        self.has_begun = self._may_be_shown = False
        self._is_shown.assign(False)
        self._shown = []

    def check_hidden(self) -> Any:
        """Returns an op that fails if the global weights are shown when the step runs."""
        rule = (
            "A step trains this rank's own weights. Received: one while the global weights are in "
            "the variables, as after fit. Call LocalUpdates.restart_from_weights() on all ranks "
            "before a loop that goes on from them."
        )
        with tf.device("/CPU:0"):
            # The op itself: `tf.debugging.Assert` puts a branch around it into each step.
            is_hidden = tf.logical_not(self._is_shown.read_value())
            return tf.raw_ops.Assert(condition=is_hidden, data=[rule])

    def checksum(self) -> str:
        """Returns a checksum of the values of the trained variables."""
        return replicas.checksum(self._values(), on_device=True)

    def _values(self) -> list[tf.Tensor]:
        return [tf.convert_to_tensor(variable) for variable in self.variables[: self.trained]]

    def _swap_values(self) -> None:
        for variable, copy in zip(self.variables, self.copies, strict=True):
            own, other = tf.convert_to_tensor(variable), tf.convert_to_tensor(copy)
            variable.assign(other)
            copy.assign(own)
        # In the same graph: an interruption finds both done, or none.
        self._is_shown.assign(tf.logical_not(self._is_shown))

    @property
    def equal_variables(self) -> list[Any]:
        """Variables that hold the global values of the trained weights."""
        return list(self.copies if self.is_apart else self.variables)[: self.trained]

    @property
    def differences(self) -> list[tf.Tensor]:
        """This rank's trained weights minus the global ones."""
        pairs = zip(self.variables[: self.trained], self.copies, strict=False)
        return [
            tf.convert_to_tensor(variable) - tf.convert_to_tensor(copy) for variable, copy in pairs
        ]

    @property
    def own_statistics(self) -> list[tf.Tensor]:
        """This rank's averaged state of layers; the global values where its own are not finite."""
        pairs = zip(self.variables[self.trained :], self.copies[self.trained :], strict=True)
        return [
            either(is_finite(variable), tf.convert_to_tensor(variable), tf.convert_to_tensor(copy))
            for variable, copy in pairs
        ]


def _lie_together(then: tf.Tensor, now: tf.Tensor) -> bool:
    """Returns whether two tensors of the host lie in the same memory."""
    is_on_host = "CPU" in then.device and "CPU" in now.device
    return is_on_host and bool(np.asarray(then).ctypes.data == np.asarray(now).ctypes.data)


def is_finite(values: Any) -> tf.Tensor:
    """Returns whether all values of a tensor or variable are finite, a bool scalar."""
    return tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(values)))


def either(condition: tf.Tensor, yes: tf.Tensor, no: tf.Tensor) -> tf.Tensor:
    """Returns one of two tensors, without the pass over memory of `tf.where`."""
    return tf.raw_ops.Select(condition=condition, x=yes, y=no)

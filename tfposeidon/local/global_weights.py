"""Global weights: equal on all ranks, and stored in addition to each rank's local weights.

Think of two sets of values for the same variables. One set is in the variables, the other one in
copies, and `show` and `hide` swap the two.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfposeidon.checks import require_equal
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.exchange import replicas


class GlobalWeights:
    """Copies of variables, which hold the global weights while a rank trains its local weights.

    While the global weights are shown, the copies hold this rank's local weights. Before the first
    step, the variables hold the global weights, and the copies are not valid. `variables` are the
    trained variables, then averaged state of layers, and `trained` counts the former.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self.variables: list[Any] = []
        self.copies: list[keras.Variable] = []
        self.has_begun = self._may_be_shown = self._has_checked_start = False
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
        # A partial: TensorFlow counts traces of a method over all objects, and would warn.
        swap = functools.partial(self._swap_values)
        self._swap: Callable[[], None] = tf.function(swap, autograph=False)

    def add_statistics(self, statistics: Sequence[Any]) -> None:
        """Adds averaged state of layers; skips known variables."""
        known = {id(variable) for variable in self.variables}
        if new := [variable for variable in statistics if id(variable) not in known]:
            self._add(new)

    def begin(self) -> None:
        """Assigns this rank's local weights to the variables before a step."""
        if not self.has_begun:
            for copy, variable in zip(self.copies, self.variables, strict=True):
                copy.assign(tf.convert_to_tensor(variable))
            self.has_begun = True
        self.hide()

    def show(self) -> bool:
        """Assigns the global weights to the variables; returns True if they did not hold them."""
        if self.is_shown or not self.has_begun:
            return False
        self._may_be_shown = True
        self._swap()
        self.note_assigned()
        return True

    def hide(self) -> None:
        """Assigns this rank's local weights again, if `show` was called."""
        if self.is_shown:
            self._shown = []
            self._swap()
            self._may_be_shown = False

    @contextlib.contextmanager
    def shown(self, assign: bool) -> Iterator[None]:
        """Shows the global weights within this context; with `assign`, they may be assigned."""
        was_hidden = self.show()
        try:
            yield
            if assign:
                self.note_assigned()
            elif was_hidden and self.was_assigned:
                raise RuntimeError(
                    "Weights must not be assigned within global_weights(), because they would be "
                    "lost. Received: other weights at the end of global_weights(). Assign them "
                    "outside, and call LocalUpdates.restart_from_weights() afterwards, on all "
                    "ranks."
                )
        finally:
            if was_hidden:
                self.hide()

    @property
    def is_shown(self) -> bool:
        """True while the variables hold the global weights, and the copies the local weights."""
        # The Python flag, which is mostly False, avoids reading the variable in each step.
        return self._may_be_shown and bool(self._is_shown.numpy())

    @property
    def is_apart(self) -> bool:
        """True if the variables hold the local weights, and the copies the global weights."""
        return self.has_begun and not self.is_shown

    def check_may_be_saved(self) -> None:
        """Refuses to save local weights."""
        if self.is_apart:
            raise RuntimeError(
                "A model must be saved with its global weights. Received: a model whose "
                "variables hold the weights of this rank. Save it within `with "
                "optimizer.global_weights():`."
            )

    @property
    def was_assigned(self) -> bool:
        """True if other weights were assigned since the global weights are shown."""
        if not self.is_shown:
            return False
        now = self._values()
        if all(_share_memory(*pair) for pair in zip(self._shown, now, strict=True)):
            return False
        # Values were moved in host memory, or are on a GPU, where addresses are not available.
        one, other = (replicas.checksum(each, on_device=True) for each in (self._shown, now))
        return one != other

    def restore(self, has_begun: bool) -> None:
        """Continues from a checkpoint, which was saved while the global weights were shown."""
        self.has_begun = self._may_be_shown = has_begun
        self._is_shown.assign(has_begun)
        self.note_assigned()

    def note_assigned(self) -> None:
        """Accepts the current values as the shown global weights, including assigned values."""
        # References suffice: TensorFlow does not reuse a buffer that has another reference.
        self._shown = self._values()

    def restart(self) -> None:
        """Uses the values of the variables as both global and local weights."""
        self.has_begun = self._may_be_shown = False
        self._is_shown.assign(False)
        self._shown = []

    def check_hidden(self) -> Any:
        """Returns an op that fails if the global weights are shown when the step runs."""
        rule = (
            "A step must train this rank's own weights. Received: a step while the variables "
            "hold the global weights, as after fit. Call LocalUpdates.restart_from_weights() on "
            "all ranks before a loop that continues from them."
        )
        with tf.device("/CPU:0"):
            # Use the raw op, because `tf.debugging.Assert` adds a branch to each step.
            is_hidden = tf.logical_not(self._is_shown.read_value())
            return tf.raw_ops.Assert(condition=is_hidden, data=[rule])

    def check_start(self) -> None:
        """Checks during the first trace that all ranks start with the same weights."""
        if not self._has_checked_start:
            equal = self.copies if self.is_apart else self.variables
            with tf.init_scope():
                check_equal(equal[: self.trained])
            self._has_checked_start = True

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
        # In the same graph, so that an interruption preserves all or none of the changes.
        self._is_shown.assign(tf.logical_not(self._is_shown))

    @property
    def differences(self) -> list[tf.Tensor]:
        """This rank's trained weights minus the global weights."""
        pairs = zip(self._values(), self.copies, strict=False)
        return [value - tf.convert_to_tensor(copy) for value, copy in pairs]

    @property
    def own_statistics(self) -> list[tf.Tensor]:
        """This rank's averaged state of layers; global values for variables that are not finite."""
        pairs = zip(self.variables[self.trained :], self.copies[self.trained :], strict=True)
        return [
            either(is_finite(variable), tf.convert_to_tensor(variable), tf.convert_to_tensor(copy))
            for variable, copy in pairs
        ]


def check_equal(variables: Sequence[Any]) -> None:
    """Raises on all ranks if these variables differ between them."""
    require_equal(
        exchange_objects(replicas.checksum(variables), runtime.wire(), "tp.start"),
        "All ranks must begin with the same weights",
        "Pass keras_callbacks.BroadcastVariables() to fit, or call "
        "tfposeidon.broadcast_variables(model.variables) before the first step.",
    )


def _share_memory(one: tf.Tensor, other: tf.Tensor) -> bool:
    is_on_host = "CPU" in one.device and "CPU" in other.device
    return is_on_host and bool(np.asarray(one).ctypes.data == np.asarray(other).ctypes.data)


def is_finite(values: Any) -> tf.Tensor:
    """Returns whether all values of a tensor or variable are finite, a bool scalar."""
    return tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(values)))


def either(condition: tf.Tensor, yes: tf.Tensor, no: tf.Tensor) -> tf.Tensor:
    """Returns one of two tensors, without the pass over memory of `tf.where`."""
    return tf.raw_ops.Select(condition=condition, x=yes, y=no)

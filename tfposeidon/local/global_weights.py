"""Stores the global weights, equal on all ranks, in addition to each rank's local weights.

Think of two sets of values for the same variables. One set is in the variables, and the other set
is in copies. `show` and `hide` swap the two sets.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfposeidon.checks import at_first_item, require_equal
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.exchange import replicas
from tfposeidon.gradients import all_finite


class GlobalWeights:
    """Copies of variables, which hold the global weights while a rank trains its local weights.

    While the global weights are shown, the copies hold this rank's local weights. Before the first
    step, the variables hold the global weights, and the copies are not valid. The first
    `trained` of `variables` are trained; the others are averaged state of layers.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self.variables: list[Any] = []
        self.copies: list[keras.Variable] = []
        self.has_begun = self._may_be_shown = False
        self._shown: list[tf.Tensor] = []
        with tf.init_scope(), tf.device("/CPU:0"):
            self._is_shown = tf.Variable(False, trainable=False, name="is_shown")
        self.add(variables)
        self.trained = len(self.variables)

    def add(self, variables: Sequence[Any]) -> None:
        """Adds variables, such as averaged state of layers, unless they were added before."""
        known = {id(variable) for variable in self.variables}
        with tf.init_scope():
            for variable in (one for one in variables if id(one) not in known):
                path = getattr(variable, "path", None) or variable.name
                copy = keras.Variable(
                    tf.convert_to_tensor(variable),
                    dtype=keras.backend.standardize_dtype(variable.dtype),
                    name="global_" + path.replace("/", "_").replace(":", "_"),
                )
                self.variables.append(variable)
                self.copies.append(copy)
        if len(self.variables) > len(known):
            # Use a partial: TensorFlow warns of many traces of a method, counted over all objects.
            swap = functools.partial(self._swap_values)
            self._swap: Callable[[], None] = tf.function(swap, autograph=False)

    def begin(self) -> None:
        if not self.has_begun:
            for copy, variable in zip(self.copies, self.variables, strict=True):
                copy.assign(tf.convert_to_tensor(variable))
            self.has_begun = True
        self.hide()

    def show(self) -> bool:
        """Assigns the global weights to the variables; returns whether the variables changed."""
        if self.is_shown or not self.has_begun:
            return False
        self._may_be_shown = True
        self._swap()
        self.note_assigned()
        return True

    def hide(self) -> None:
        if self.is_shown:
            self._shown = []
            self._swap()
            self._may_be_shown = False

    @contextlib.contextmanager
    def shown(self, assign: bool) -> Iterator[None]:
        """Shows the global weights in the context; with `assign`, users may assign new weights."""
        was_hidden = self.show()
        try:
            yield
            if assign:
                self.note_assigned()
            elif was_hidden and self.was_assigned:
                raise RuntimeError(
                    "Weights must not be assigned within global_weights(), because they would be "
                    "lost. Received: assigned weights with assign=False. Pass assign=True, or "
                    "assign the weights outside of the context and then call "
                    "LocalUpdates.restart_from_weights(), on all ranks."
                )
        finally:
            if was_hidden:
                self.hide()

    @property
    def is_shown(self) -> bool:
        """True while the variables hold the global weights, and the copies the local weights."""
        # Check the Python flag first, because reading the variable would delay each step.
        return self._may_be_shown and bool(self._is_shown.numpy())

    @property
    def is_apart(self) -> bool:
        """True if the variables hold the local weights, and the copies the global weights."""
        return self.has_begun and not self.is_shown

    @property
    def was_assigned(self) -> bool:
        if not self.is_shown:
            return False
        now = self._values()
        if all(_share_memory(*pair) for pair in zip(self._shown, now, strict=True)):
            return False
        # The values may be equal copies in host memory, or on a GPU, so compare their checksums.
        one, other = (replicas.checksum(each) for each in (self._shown, now))
        return one != other

    def restart(self, has_begun: bool) -> None:
        """Declares the variables' current values to be the global weights.

        With `has_begun`, the copies hold this rank's local weights. Otherwise, all ranks continue
        from the global weights.
        """
        self.has_begun = self._may_be_shown = has_begun
        self._is_shown.assign(has_begun)
        self._shown = self._values() if has_begun else []

    def note_assigned(self) -> None:
        """Accepts the current values as the shown global weights, including assigned values."""
        # Store references instead of copies: TensorFlow never reuses a buffer with two references.
        self._shown = self._values()

    def check_hidden(self) -> Any:
        """Returns an op that fails if the global weights are shown when the step runs."""
        rule = (
            "A step must train this rank's local weights. Received: a step while the variables "
            "hold the global weights, as after fit. Call LocalUpdates.restart_from_weights() on "
            "all ranks before a loop that continues from the global weights."
        )
        with tf.device("/CPU:0"):
            # Use the raw op, because `tf.debugging.Assert` adds a branch to each step.
            is_hidden = tf.logical_not(self._is_shown.read_value())
            return tf.raw_ops.Assert(condition=is_hidden, data=[rule])

    def check_equal(self) -> None:
        with tf.init_scope():
            check_equal((self.copies if self.is_apart else self.variables)[: self.trained])

    def _values(self) -> list[tf.Tensor]:
        return [tf.convert_to_tensor(variable) for variable in self.variables[: self.trained]]

    def _swap_values(self) -> None:
        for variable, copy in zip(self.variables, self.copies, strict=True):
            own, other = tf.convert_to_tensor(variable), tf.convert_to_tensor(copy)
            variable.assign(other)
            copy.assign(own)
        # Change the flag in the same graph, so that an interruption preserves all changes or none.
        self._is_shown.assign(tf.logical_not(self._is_shown))

    @property
    def contribution(self) -> list[tf.Tensor]:
        """Local minus global weights of trained variables, followed by layer state to average.

        If this rank's layer state is not finite, the global state is contributed instead.
        """
        pairs = zip(self.variables, self.copies, strict=True)
        values = [tuple(map(tf.convert_to_tensor, pair)) for pair in pairs]
        statistics = [either(all_finite([own]), own, now) for own, now in values[self.trained :]]
        return [*(own - now for own, now in values[: self.trained]), *statistics]


def check_equal(variables: Sequence[Any]) -> None:
    require_equal(
        exchange_objects(replicas.checksums(variables), runtime.wire(), "tp.start"),
        "All ranks must begin with the same weights",
        "Pass keras_callbacks.BroadcastVariables() to fit, or call "
        "tfposeidon.broadcast_variables(model.variables) before the first step.",
        at_first_item("variable"),
    )


def _share_memory(one: tf.Tensor, other: tf.Tensor) -> bool:
    is_on_host = "CPU" in one.device and "CPU" in other.device
    return is_on_host and bool(np.asarray(one).ctypes.data == np.asarray(other).ctypes.data)


def either(condition: tf.Tensor, yes: tf.Tensor, no: tf.Tensor) -> tf.Tensor:
    """Returns `yes` or `no`, without the additional pass over memory of `tf.where`."""
    return tf.raw_ops.Select(condition=condition, x=yes, y=no)

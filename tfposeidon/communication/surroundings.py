"""Refusal of environments without collectives: other backends, `tf.distribute`, XLA."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfposeidon import native

_OF_FUNCTIONS = 50
"""Priority of the variable creators of `tf.function`; those of users' scopes have another."""


def check_surroundings() -> None:
    """Refuses Keras backends other than TensorFlow, and the scope of a `tf.distribute` strategy."""
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            "tfposeidon requires Keras's TensorFlow backend. Received: backend "
            f"{keras.backend.backend()!r}. Set KERAS_BACKEND=tensorflow."
        )
    if tf.distribute.has_strategy():
        raise ValueError(
            "DistributedOptimizer replaces tf.distribute and must not run in the scope of a "
            f"strategy. Received: the scope of {type(tf.distribute.get_strategy()).__name__}. "
            "Leave the strategy's scope, and start one process per GPU with horovodrun."
        )


def check_graph() -> None:
    """Refuses, while a step is traced, an environment in which collectives cannot run."""
    check_surroundings()
    if native.in_xla():
        raise ValueError(
            "XLA cannot compile collectives. Received: a step within "
            "tf.function(jit_compile=True). Leave jit_compile out; fit disables XLA for its "
            "steps."
        )


@contextlib.contextmanager
def made_before_the_trace() -> Iterator[None]:
    """Creates variables as if before the current trace, so that they cause no retracing."""
    # `tf.init_scope` is not sufficient: `tf.function` still registers these variables, and retraces
    # without creating any. Private, because there is no public alternative.
    graph = tf.compat.v1.get_default_graph()
    before = graph._variable_creator_stack
    graph._variable_creator_stack = [one for one in before if one[0] != _OF_FUNCTIONS]
    try:
        with tf.init_scope():
            yield
    finally:
        graph._variable_creator_stack = before

"""Refusal of surroundings without collectives: other backends, `tf.distribute`, XLA."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfposeidon import native

_OF_FUNCTIONS = 50
"""Priority of what notes variables for `tf.function`; what users' own scopes make has another."""


def check_surroundings() -> None:
    """Refuses other backends than TensorFlow's, and `tf.distribute`.

    Raises:
      ValueError: Under another backend of Keras, or within the scope of a strategy.
    """
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            "tfposeidon works with Keras's TensorFlow backend. Received: backend "
            f"{keras.backend.backend()!r}. Set KERAS_BACKEND=tensorflow."
        )
    if tf.distribute.has_strategy():
        raise ValueError(
            "DistributedOptimizer replaces tf.distribute. Received: use under "
            f"{type(tf.distribute.get_strategy()).__name__}. Leave the strategy's scope, and start "
            "one process per GPU with horovodrun."
        )


def check_graph() -> None:
    """Refuses, while a step is traced, surroundings in which collectives cannot run.

    Raises:
      ValueError: As `check_surroundings`, or if XLA compiles the step.
    """
    check_surroundings()
    if native.in_xla():
        raise ValueError(
            "Collectives cannot be compiled by XLA. Received: a step within "
            "tf.function(jit_compile=True). Leave jit_compile out; fit keeps XLA off for its steps."
        )


@contextlib.contextmanager
def made_before_the_trace() -> Iterator[None]:
    """Makes variables as if before the step that is traced: it is not traced once more for them.

    `tf.init_scope` alone does not: `tf.function` sees these variables, too, and traces anew without
    making any.
    """
    graph = tf.compat.v1.get_default_graph()
    # Private: there is no public way.
    before = graph._variable_creator_stack
    graph._variable_creator_stack = [one for one in before if one[0] != _OF_FUNCTIONS]
    try:
        with tf.init_scope():
            yield
    finally:
        graph._variable_creator_stack = before

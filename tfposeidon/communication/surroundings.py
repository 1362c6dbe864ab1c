"""Refusal of surroundings without collectives: other backends, `tf.distribute`, XLA."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfposeidon import native


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
            "Collectives cannot be compiled by XLA. Received: a train step with jit_compile=True. "
            "Leave jit_compile out of model.compile (or pass False): tfposeidon keeps XLA off for "
            "that step."
        )

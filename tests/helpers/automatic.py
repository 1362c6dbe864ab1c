"""Network profiles, models and callbacks for tests of `auto`."""

import contextlib
import dataclasses
import time
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfposeidon as tp
from tests.helpers import models
from tests.helpers.training import BATCH
from tfposeidon.autotune import choose_plan, comparison, search
from tfposeidon.autotune.simulation import simulate, stage_times
from tfposeidon.communication import runtime

WIDTH, LAYERS = 400, 4
"""Size and number of kernels of 640 kB; a bucket of the default size holds several of them."""


@contextlib.contextmanager
def links(found):
    """Sets the network profile of the job; with "measure", the next step measures it."""
    before = runtime.network_profile()
    measures = found == "measure"
    runtime.set_network_profile(None if measures else found, measures=measures)
    try:
        yield
    finally:
        runtime.set_network_profile(before)


@contextlib.contextmanager
def planning(**constants):
    """Sets constants of `choose_plan`, `comparison` and `search` within a `with` block.

    Without time for trials (`LONGEST_TRIAL_S=0.0`), predictions alone decide.

    Args:
      **constants: Values of the constants, by name.
    """
    with contextlib.ExitStack() as stack:
        for name, value in constants.items():
            modules = (choose_plan, comparison, search)
            module = next(one for one in modules if hasattr(one, name))
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def exchange_seconds(scheme, length, itemsize, structures, topology, links):
    """Predicts the seconds of a single exchange, until its end on the last rank."""
    times = stage_times(scheme, length, itemsize, tuple(structures), topology, links)
    return simulate([times], [0.0], 0.0, links.collective_s)


def given(wire, rate, **options):
    """Returns a profile with this rate between nodes, or within the node if there is only one."""
    per_node = max(len(node) for node in wire.topology.nodes)
    return tp.NetworkProfile.of(rate, ranks_per_node=per_node, **options)


def ideal(wire, bytes_per_s):
    """Returns a profile in which only the transfer of bytes takes time."""
    known = given(wire, "1gbit")
    link = tp.Link(latency_s=0.0, bytes_per_s=bytes_per_s)
    return dataclasses.replace(
        known, collective_s=0.0, node=known.node and link, across=known.across and link
    )


@keras.saving.register_keras_serializable()
class SlowBackward(keras.layers.Layer):
    """Identity whose backward pass sleeps, regardless of the load on the machine.

    Args:
      seconds: Seconds that the backward pass sleeps.
    """

    def __init__(self, seconds, **options):
        super().__init__(**options)
        self.seconds = seconds

    def call(self, inputs):
        def sleep(gradient):
            time.sleep(self.seconds)
            return gradient

        @tf.custom_gradient
        def identity(x):
            return tf.identity(x), lambda g: tf.ensure_shape(
                tf.numpy_function(sleep, [g], g.dtype), g.shape
            )

        return identity(inputs)

    def get_config(self):
        return {**super().get_config(), "seconds": self.seconds}


def wide(steps=30, backward_s=0.0):
    """Returns a model whose exchange and computation take similar times, and its data."""
    layers = [keras.layers.Dense(WIDTH, activation="tanh") for _ in range(LAYERS)]
    if backward_s:
        layers = [one for layer in layers for one in (layer, SlowBackward(backward_s))]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(10)])
    rng = np.random.default_rng(3)
    x = rng.normal(size=(BATCH * steps, WIDTH)).astype("float32")
    return model, (x, rng.integers(0, 10, BATCH * steps))


def copied(model):
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    return clone


def small():
    return models.mlp(), models.mlp.data(BATCH * 10)


class Watching(keras.callbacks.Callback):
    """Callback with a batch hook, so that ranks check for exhausted input in each step."""

    def on_train_batch_end(self, batch, logs=None):
        self.batch = batch


def large():
    """Returns the small model with a kernel that is large enough for a sparse scheme."""
    return keras.Sequential(
        [keras.Input((20,)), keras.layers.Dense(300), keras.layers.Dense(models.CLASSES)]
    )


def parallel_layers():
    """Returns a model whose gradients do not depend on its weights."""
    inputs = keras.Input((WIDTH,))
    outputs = [keras.layers.Dense(64, use_bias=False)(inputs) for _ in range(4)]
    return keras.Model(inputs, keras.layers.Add()(outputs))

"""Trains in one process and on ranks, and compares the results."""

import keras
import numpy as np
import tensorflow as tf

import tfposeidon as tp
from tests.helpers import models
from tests.helpers.over_ranks import on_one_rank

STEPS = 10
BATCH = 12
SERVED = tp.schemes.ParameterServer()
"""Selects a `ShardedOptimizer` in `distributed`."""


def distributed(inner, scheme="auto", **options):
    """Returns a `DistributedOptimizer`, or for `SERVED` a `ShardedOptimizer`."""
    kind = tp.ShardedOptimizer if scheme is SERVED else tp.DistributedOptimizer
    return kind(inner, scheme, **options)


def train_alone(model, data, optimizer, **fit):
    """Trains plain Keras on whole batches, and returns the weights as the reference."""
    model.compile(optimizer=dense_rows(optimizer), loss=models.LOSS)
    # Build the optimizer first: TensorFlow would trace a step that creates variables twice.
    model.optimizer.build(model.trainable_variables)

    def fitted():
        options = {"batch_size": BATCH, "epochs": 1, "shuffle": False, "verbose": 0, **fit}
        model.fit(*data, **options)
        return model.get_weights()

    return on_one_rank(fitted)


def dense_rows(optimizer):
    """Makes gradients dense, since Keras's optimizers update rows of repeated tokens repeatedly."""
    apply, dense = (
        optimizer.apply,
        lambda g: tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g,
    )
    optimizer.apply = lambda grads, trainable_variables=None: apply(
        [dense(g) for g in grads], trainable_variables
    )
    return optimizer


def train_together(model, data, optimizer, wire, compile=None, **fit):
    """Trains on this rank's share of each batch, and returns the weights."""
    model.compile(optimizer=optimizer, loss=models.LOSS, **(compile or {}))
    share = models.share(data, BATCH, wire.topology)
    options = {
        "batch_size": BATCH // wire.topology.size,
        "epochs": 1,
        "shuffle": False,
        "verbose": 0,
        **fit,
    }
    model.fit(*share, **options)
    return model.get_weights()


def check_equal(weights, reference):
    largest = max(np.abs(w).max() for w in reference)
    for weight, expected in zip(weights, reference, strict=True):
        np.testing.assert_allclose(weight, expected, rtol=0, atol=1e-5 * largest)


def check_close(weights, reference, start, share):
    """Checks each variable's error, relative to the change of the reference, against `share`."""
    for weight, expected, before in zip(weights, reference, start, strict=True):
        moved = np.linalg.norm(expected - before)
        assert moved > 0, "training must change the reference"
        assert (off := np.linalg.norm(weight - expected) / moved) <= share, (
            f"error of {off:.2g} relative to the change by training"
        )


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def adam():
    return keras.optimizers.Adam(1e-3, epsilon=1e-3)

"""Training on one process and on ranks, and the comparison of both."""

import keras
import numpy as np
import tensorflow as tf

import tfposeidon as tp
from tests.helpers import models
from tests.helpers.over_ranks import on_one_rank

STEPS = 10
BATCH = 12
SERVED = tp.schemes.ParameterServer()
"""Stands for a `ShardedOptimizer`, see `distributed`."""


def distributed(inner, scheme="auto", **options):
    """Returns a `DistributedOptimizer`, or for `SERVED` a `ShardedOptimizer`."""
    kind = tp.ShardedOptimizer if scheme is SERVED else tp.DistributedOptimizer
    return kind(inner, scheme, **options)


def train_alone(model, data, optimizer, **fit):
    """The weights of the reference: plain Keras, whole batches."""
    model.compile(optimizer=dense_rows(optimizer), loss=models.LOSS)
    # Before the first step, which TensorFlow would trace twice if it made variables.
    model.optimizer.build(model.trainable_variables)

    def fitted():
        options = {"batch_size": BATCH, "epochs": 1, "shuffle": False, "verbose": 0, **fit}
        model.fit(*data, **options)
        return model.get_weights()

    return on_one_rank(fitted)


def dense_rows(optimizer):
    """Keras's optimizers update a row once per repetition of a token: the reference must not."""
    apply, dense = (
        optimizer.apply,
        lambda g: tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g,
    )
    optimizer.apply = lambda grads, trainable_variables=None: apply(
        [dense(g) for g in grads], trainable_variables
    )
    return optimizer


def train_together(model, data, optimizer, wire, compile=None, **fit):
    """Each rank gets its share of each batch."""
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
    """Checks that each variable is within this share of the reference's own move."""
    for weight, expected, before in zip(weights, reference, start, strict=True):
        moved = np.linalg.norm(expected - before)
        assert moved > 0, "nothing was learnt, so nothing was compared"
        assert (off := np.linalg.norm(weight - expected) / moved) <= share, (
            f"{off:.2g} of what training moved"
        )


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def adam():
    return keras.optimizers.Adam(1e-3, epsilon=1e-3)

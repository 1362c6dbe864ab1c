"""Tests variables that their gradients overwrite, such as scales and histories of float8."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfposeidon as tp
from tests import contract
from tests.helpers import models
from tests.helpers.models import same_on_all_ranks
from tests.helpers.training import BATCH, SERVED, distributed, sgd, train_alone, train_together

pytestmark = pytest.mark.ranks("2")

STEPS = 4


def _values(step, rank):
    return np.random.default_rng([step, rank]).uniform(0, 9, 8).astype("float32")


def _largest(steps, wire):
    return np.max([_values(step, rank) for step in steps for rank in wire.topology.world.ranks], 0)


def _check(optimizer, wire, steps_of_update=1):
    """Asserts that values are the maximum over ranks, whose weights differ."""
    weight = keras.Variable(np.ones((4, 3)), name="weight")
    history = keras.Variable(np.zeros(8), name="history")
    history.overwrite_with_gradient = True
    rank = wire.topology.rank

    @tf.function
    def step(values):
        gradients = [tf.ones([4, 3]), values]
        optimizer.apply(gradients, [weight, history], sample_count=1.0 + rank)

    for first in range(0, STEPS, steps_of_update):
        before = history.numpy()
        steps = range(first, first + steps_of_update)
        for number in steps:
            np.testing.assert_array_equal(history.numpy(), before)
            step(tf.constant(_values(number, rank)))
        np.testing.assert_array_equal(history.numpy(), _largest(steps, wire), str(optimizer.policy))


def test_every_scheme_takes_the_maximum_over_ranks(wire):
    for scheme in (*contract.OF_EACH_CLASS, SERVED, "hybcomm"):
        _check(distributed(keras.optimizers.SGD(0.1), scheme), wire)


def test_accumulation_takes_the_maximum_over_calls(wire):
    for scheme in ("allreduce", SERVED):
        inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        _check(distributed(inner, scheme), wire, 2)


def test_the_global_weights_hold_the_maximum_over_ranks(wire):
    weight = keras.Variable(np.ones((4, 3)), name="weight")
    history = keras.Variable(np.zeros(8), name="history")
    history.overwrite_with_gradient = True
    optimizer = tp.LocalUpdates(keras.optimizers.SGD(0.1), sync_every=2)
    for step in range(STEPS):
        values = tf.constant(_values(step, wire.topology.rank))
        optimizer.apply([tf.ones([4, 3]), values], [weight, history])
        optimizer.end_step()
    with optimizer.global_weights():
        np.testing.assert_allclose(history.numpy(), _largest([STEPS - 1], wire), rtol=1e-6)


def test_float8_histories_are_the_maximum_over_ranks(wire):
    """The history of a layer covers the inputs of all ranks, and equals that of one process."""

    def build():
        model = models.mlp()
        for layer in model.layers:
            layer.quantize("float8")
        return model

    data, start = models.mlp.data(3 * BATCH), build()
    seen = next(i for i, w in enumerate(start.weights) if w.name == "inputs_amax_history")
    reference = train_alone(models.copy(build, start), data, sgd())
    optimizer = tp.DistributedOptimizer(sgd(), scheme=tp.schemes.TopK(min_elements=0))
    weights = train_together(models.copy(build, start), data, optimizer, wire)
    same_on_all_ranks(weights, wire)
    assert weights[seen].max() > 0
    np.testing.assert_array_equal(weights[seen], reference[seen])

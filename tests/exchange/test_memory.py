"""The memory of a rank does not grow, and contains at most one extra copy of the gradients."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfposeidon as tp
from benchmarks.workers.memory import resident_bytes
from tests.helpers import models
from tests.helpers.checks import reset_peak
from tests.helpers.training import sgd

pytestmark = pytest.mark.ranks("2")

SGD = keras.optimizers.SGD


def test_memory_does_not_grow(wire):
    # A leak of one copy of the gradients per step would add 400 MB.
    model = keras.Sequential(
        [keras.Input((20,)), keras.layers.Dense(25_000), keras.layers.Dense(models.CLASSES)]
    )
    model.compile(optimizer=tp.DistributedOptimizer(sgd()), loss=models.LOSS)
    data = tf.data.Dataset.from_tensor_slices(models.mlp.data(8)).batch(8).repeat()
    model.fit(data, steps_per_epoch=60, verbose=0)
    before = resident_bytes()
    model.fit(data, steps_per_epoch=160, verbose=0)
    assert resident_bytes() - before < 20e6


def test_an_exchange_needs_one_extra_copy_of_the_gradients(wire):
    length = 16 * 2**20  # 64 MB
    plain = _peak_of_a_step(SGD(0.1), length)
    for scheme in ("allreduce", "alltoall", tp.schemes.AllToAll(wire_dtype="float16"), "torus2d"):
        ours = _peak_of_a_step(tp.DistributedOptimizer(SGD(0.1), scheme=scheme), length)
        extra = (ours - plain) / (4 * length)
        # Gloo's own buffers are small; allow half a copy for the allocator.
        assert extra < 1.5, f"{scheme}: {extra:.2f} copies of the gradients"


def _peak_of_a_step(optimizer, length):
    weight = keras.Variable(np.zeros(length, "float32"), name="weight")

    @tf.function
    def step(x):
        optimizer.apply([weight * x + x], [weight])

    step(tf.constant(1.0))
    reset_peak()
    before = resident_bytes()
    step(tf.constant(1.0))
    return resident_bytes(peak=True) - before

"""Ranks that lack only the last batch of an epoch take part in its step without samples."""

import functools
import os
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_callbacks
import tfposeidon as tp
from tests.helpers import models
from tests.helpers.callbacks import shared_folder
from tests.helpers.over_ranks import exchange_objects
from tests.helpers.training import BATCH, SERVED, check_equal, distributed, sgd, train_alone
from tests.helpers.uneven import check_together, compiled_for_lengths

pytestmark = pytest.mark.ranks("3")


def _unregularized():
    layers = keras.layers.Dense(24, activation="relu"), keras.layers.Dense(models.CLASSES)
    return keras.Sequential([keras.Input((20,)), *layers])


@pytest.mark.parametrize(
    ("build", "scheme", "options"),
    [
        (models.mlp, "allreduce", {"run_eagerly": True}),
        (models.mlp, SERVED, {}),
        (_unregularized, "auto", {}),
        (_unregularized, "hybcomm", {}),
    ],
)
def test_shares_with_a_last_batch_on_some_ranks_equal_one_process(wire, build, scheme, options):
    data = models.mlp.data(2 * BATCH + 1)  # Shares of 9, 8 and 8 samples.
    start = build()
    fit = {"epochs": 2, "shuffle": False, "verbose": 0}
    reference = train_alone(models.copy(build, start), data, sgd(), **fit)
    model, optimizer = models.copy(build, start), distributed(sgd(), scheme=scheme)
    model.compile(optimizer=optimizer, loss=models.LOSS, **options)
    mine = tp.shard(data)
    model.fit(*mine, batch_size=4, validation_data=mine, **fit)
    check_equal(model.get_weights(), reference)
    check_together(model, optimizer, wire, 6)


def test_callbacks_count_a_last_step_without_samples(wire):
    """Rates and replicas are equal, and resumed runs equal the uninterrupted run."""
    folder = shared_folder(wire)
    scaled = functools.partial(keras.optimizers.LossScaleOptimizer, initial_scale=8.0)

    def trained(name):
        keras.utils.set_random_seed(1)
        model, optimizer = compiled_for_lengths("topk", around=scaled)
        model.fit(
            *tp.shard(models.mlp.data(2 * BATCH + 1)),
            batch_size=4,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=[
                keras_callbacks.LearningRateWarmup(0.3, warmup_epochs=2),
                keras_callbacks.ReplicaCheck(every_n_steps=1),
                keras_callbacks.Checkpoint(f"{folder}/{name}", every_n_steps=1, keep=9),
            ],
        )
        check_together(model, optimizer, wire, 6)
        return model.get_weights()

    uninterrupted = trained("all")
    for name in sorted(os.listdir(f"{folder}/all")):
        exchange_objects(None, wire, "listed")
        if wire.topology.rank == 0:
            os.makedirs(f"{folder}/from {name}")
            os.rename(f"{folder}/all/{name}", f"{folder}/from {name}/{name}")
        exchange_objects(None, wire, "moved")
        for one, other in zip(trained(f"from {name}"), uninterrupted, strict=True):
            np.testing.assert_array_equal(one, other)
    exchange_objects(None, wire, "compared")
    if wire.topology.rank == 0:
        shutil.rmtree(folder)


class _Counts(keras.layers.Layer):
    def build(self, shape):
        self.calls = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.calls.assign_add(1)
        return x


class _Centers(keras.layers.Layer):
    def call(self, x, training=False):
        return x - tp.all_reduce(tf.reduce_mean(x, 0)) if training else x


class _OwnHead(keras.layers.Layer):
    """Layer of which each rank trains different weights."""

    def build(self, shape):
        self.heads = [self.add_weight(shape=shape[1:], name=str(r)) for r in range(tp.size())]

    def call(self, x):
        return x * self.heads[tp.rank()]


def _contrastive(y, x):
    return tf.reduce_mean(tf.square(x - tp.all_reduce(tf.reduce_mean(x))), -1)


@pytest.mark.parametrize(
    ("layer", "loss", "sample_count"),
    [
        (_Counts, models.LOSS, None),
        (_Centers, models.LOSS, None),
        (_OwnHead, models.LOSS, None),
        (lambda: keras.layers.Lambda(lambda x: 2.0 * x), models.LOSS, None),
        (lambda: keras.layers.SpectralNormalization(keras.layers.Dense(16)), models.LOSS, None),
        (lambda: keras.layers.Dense(16), _contrastive, None),
        (lambda: keras.layers.Dense(16), models.LOSS, tp.sample_counts.equal),
    ],
)
def test_epochs_end_together_if_a_step_may_need_a_batch(wire, layer, loss, sample_count):
    model = keras.Sequential([layer(), keras.layers.Dense(models.CLASSES)])
    optimizer = tp.DistributedOptimizer(sgd(), sample_count=sample_count)
    model.compile(optimizer=optimizer, loss=loss)
    mine = tp.shard(models.mlp.data(2 * BATCH + 1))
    model.fit(*mine, batch_size=4, epochs=2, shuffle=False, verbose=0)
    check_together(model, optimizer, wire, 4)

"""Provides rules and models for sufficient factors."""

import keras
import numpy as np

from tests.helpers import models

KERNELS = [("kernel", "factors"), (".*", "allreduce")]


def large_table():
    """Returns a model with an embedding, of which a batch uses few rows, some of them twice."""
    tokens, table = keras.Input((4,), dtype="int32"), keras.layers.Embedding(500, 8)
    return keras.Model(
        tokens, keras.layers.Dense(models.CLASSES)(keras.layers.Flatten()(table(tokens)))
    )


def token_batches(count):
    return np.random.default_rng(0).integers(0, 40, (count, 4)), models.mlp.data(count)[1]


large_table.data = token_batches

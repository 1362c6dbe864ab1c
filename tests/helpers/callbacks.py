"""Provides folders that ranks share, and compiled models."""

import tempfile

import keras

from tests.helpers import models
from tests.helpers.over_ranks import exchange_objects
from tests.helpers.training import distributed, sgd

SGD = keras.optimizers.SGD


def noisy():
    """Returns a model with a seed generator and moving statistics."""
    return keras.Sequential(
        [
            keras.Input((20,)),
            keras.layers.Dense(16),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(models.CLASSES),
        ]
    )


def compiled(build=models.mlp, optimizer=None, scheme="auto", **options):
    model = build()
    model.compile(optimizer=distributed(optimizer or sgd(), scheme), loss=models.LOSS, **options)
    return model


def shared_folder(wire):
    """Creates a folder on rank 0, which removes it later, and returns its path on all ranks."""
    name = tempfile.mkdtemp() if wire.topology.rank == 0 else ""
    return exchange_objects(name, wire, "folder")[0]

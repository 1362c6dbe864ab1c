"""Provides a reproducible run of `fit` that resumes from its checkpoints."""

import keras
import numpy as np

import keras_callbacks
import tfposeidon as tp
from tests.helpers import models
from tests.helpers.training import adam


def fit_with_checkpoint(optimizer, folder, epochs, samples=24, rank=0, ranks=1, **options):
    """Trains on this rank's share of batches of eight samples, and returns the model.

    Args:
      optimizer: Function that creates the `DistributedOptimizer`.
      folder: Folder of checkpoints, from which the run resumes.
      epochs: Total number of epochs.
      samples: Samples per epoch, a multiple of eight.
      rank: Index of the share of each batch.
      ranks: Number of shares.
      **options: Further arguments of `Checkpoint`.
    """
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    model = models.mlp()
    model.compile(optimizer=optimizer(), loss=models.LOSS)
    x, y = models.mlp.data(samples)
    rows = np.arange(samples).reshape(-1, ranks, 8 // ranks)[:, rank].reshape(-1)
    model.fit(
        x[rows],
        y[rows],
        batch_size=8 // ranks,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[keras_callbacks.Checkpoint(folder, **options)],
    )
    return model


def sharded_adam():
    """Returns an optimizer whose state is sharded."""
    return tp.ShardedOptimizer(adam())

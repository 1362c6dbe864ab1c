"""Trains in phases with growing images, for the tests of `ProgressiveResize`."""

import keras
import numpy as np
import tensorflow as tf

import tfposeidon as tp

TRACED = []
"""Has an item for each trace of a train step."""


class Model(keras.Sequential):
    """Model for images of any size that counts the traces of its train step."""

    def train_step(self, data):
        """Counts a trace, and trains on a batch."""
        TRACED.append(1)
        return super().train_step(data)


def compiled(scheme="alltoall", **options):
    """Returns a small model for images of any size; all calls return equal weights."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    layers = keras.layers
    model = Model(
        [
            keras.Input((None, None, 1)),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(),
            layers.GlobalAveragePooling2D(),
            layers.Dropout(0.2, seed=4),
            layers.Dense(3),
        ]
    )
    sgd = keras.optimizers.SGD(0.0, **{"momentum": 0.9, "weight_decay": 0.0} | options)
    model.compile(optimizer=tp.DistributedOptimizer(sgd, scheme=scheme), loss="mse")
    return model


def data_of(phase, batches=3):
    """Returns this rank's batches for one epoch of a phase."""
    rng = np.random.default_rng([phase.size, tp.rank()])
    shape = (batches * phase.batch, phase.size, phase.size, 1)
    arrays = rng.normal(size=shape).astype("float32"), np.ones((shape[0], 3), "float32")
    return tf.data.Dataset.from_tensor_slices(arrays).batch(phase.batch)


def train(model, resize, checkpoint=None, before=(), after=lambda phase: None):
    """Trains all remaining phases, and returns the learning rate at the end of each epoch."""
    rates = []
    for phase in resize.remaining(checkpoint.epoch_to_resume() if checkpoint else 0):
        history = model.fit(
            data_of(phase),
            initial_epoch=phase.first_epoch,
            epochs=phase.end_epoch,
            shuffle=False,
            verbose=0,
            callbacks=[*before, resize, *filter(None, [checkpoint])],
        ).history
        rates += history.get("learning_rate", [])
        after(phase)
    return rates

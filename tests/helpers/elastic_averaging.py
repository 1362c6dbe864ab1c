"""Trains a small model on workers and a server, and returns their state."""

import keras

import tfposeidon as tp
from tests.helpers import models
from tfposeidon.optimizers.wrapper import innermost

ALPHA, SERVER_ALPHA = 0.3, 0.2
BATCH = 4


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.5)


def is_server():
    return tp.rank() not in tp.workers().ranks


def elastic_share(data):
    """Returns the samples of this worker; the server receives some samples for their shapes."""
    workers = tp.workers()
    first = 0 if is_server() else workers.index(tp.rank())
    return tuple(part[first :: workers.size] for part in data)


def step_count(count, epochs=1):
    """Returns the number of steps that each worker takes for a number of samples."""
    assert count % (BATCH * tp.workers().size) == 0
    return epochs * count // tp.workers().size // BATCH


def elastic_fitted(data, optimizer=None, build=models.mlp, **fit):
    # Use the same names as the resumed run.
    keras.utils.clear_session(free_memory=False)
    model = build()
    optimizer = optimizer or tp.ElasticAveraging(sgd(), sync_every=3, alpha=ALPHA)
    model.compile(optimizer, models.LOSS, metrics=["accuracy"])
    options = {"batch_size": BATCH, "verbose": 0, "validation_data": data, **fit}
    return model, model.fit(*elastic_share(data), **options).history


def elastic_state(model):
    # The state of loss scales is omitted, because each worker has its own.
    return [*model.get_weights(), *(v.numpy() for v in innermost(model.optimizer).variables)]


class Peak(keras.layers.Layer):
    """Custom layer that records the largest inputs so far."""

    def build(self, shape):
        self.peak = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, inputs):
        self.peak.assign(keras.ops.maximum(self.peak, keras.ops.max(inputs, axis=0)))
        return inputs


def with_state():
    frozen = keras.layers.Dense(8, trainable=False)
    layers = [
        Peak(),
        frozen,
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.2, seed=1),
        keras.layers.Dense(models.CLASSES),
    ]
    return keras.Sequential([keras.Input((20,)), *layers])

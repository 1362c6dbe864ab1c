"""Workers and a server that train a small model, and their state."""

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
    """This worker's part of the data; the server's is not used, but tells shapes."""
    workers = tp.workers()
    first = 0 if is_server() else workers.index(tp.rank())
    return tuple(part[first :: workers.size] for part in data)


def step_count(count, epochs=1):
    """Steps that each worker takes with its share of so many samples."""
    assert count % (BATCH * tp.workers().size) == 0
    return epochs * count // tp.workers().size // BATCH


def elastic_fitted(data, optimizer=None, build=models.mlp, **fit):
    # The same names as in the run that is resumed.
    keras.utils.clear_session(free_memory=False)
    model = build()
    optimizer = optimizer or tp.ElasticAveraging(sgd(), sync_every=3, alpha=ALPHA)
    model.compile(optimizer, models.LOSS, metrics=["accuracy"])
    options = {"batch_size": BATCH, "verbose": 0, "validation_data": data, **fit}
    return model, model.fit(*elastic_share(data), **options).history


def elastic_state(model):
    # Without a loss scale, which each worker finds by itself.
    return [*model.get_weights(), *(v.numpy() for v in innermost(model.optimizer).variables)]


class Peak(keras.layers.Layer):
    """Keeps the largest input so far, as a layer of one's own may."""

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

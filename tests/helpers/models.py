"""Small models with their data, and helpers that tests share."""

import hashlib

import keras
import numpy as np
import tensorflow as tf

from tests.helpers.over_ranks import exchange_objects

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
CLASSES = 5


def _model(shape, *layers, **options):
    return keras.Sequential([keras.Input(shape, **options), *layers])


def _labels(count):
    return np.random.default_rng(1).integers(0, CLASSES, count)


def floats(count, *shape):
    return np.random.default_rng(0).normal(size=(count, *shape)).astype("float32"), _labels(count)


def _tokens(count):
    # The vocabulary is small, so that tokens repeat within samples and across ranks.
    return np.random.default_rng(0).integers(0, 11, (count, 8)), _labels(count)


def mlp():
    layer = keras.layers.Dense
    return _model((20,), layer(24, activation="relu", kernel_regularizer="l2"), layer(CLASSES))


def cnn(last=None):
    """Returns a small CNN, whose last layer may have another dtype."""
    layers = keras.layers
    conv = layers.Conv2D(8, 3, activation="relu")
    dense = layers.Dense(CLASSES, dtype=last)
    return _model((10, 10, 2), conv, layers.MaxPooling2D(), layers.Flatten(), dense)


def normalized():
    """Returns a model with augmentation, depthwise convolutions and moving statistics."""
    layers = keras.layers
    separable = layers.SeparableConv2D(4, 3, use_bias=False)
    pool = layers.GlobalAveragePooling2D()
    return _model(
        (10, 10, 2),
        *(layers.RandomFlip(), separable, layers.BatchNormalization(), layers.ReLU(), pool),
        layers.Dense(CLASSES),
    )


def attention():
    tokens = keras.Input((8,), dtype="int32")
    embedded = keras.layers.Embedding(11, 16)(tokens)
    attended = keras.layers.MultiHeadAttention(2, 8)(embedded, embedded)
    pooled = keras.layers.GlobalAveragePooling1D()(
        keras.layers.LayerNormalization()(embedded + attended)
    )
    return keras.Model(tokens, keras.layers.Dense(CLASSES)(pooled))


def embedding():
    return _model(
        (8,),
        keras.layers.Embedding(11, 16),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(CLASSES),
        dtype="int32",
    )


mlp.data = lambda count: floats(count, 20)
cnn.data = lambda count: floats(count, 10, 10, 2)
normalized.data = cnn.data
attention.data = _tokens
embedding.data = _tokens


def copy(build, model):
    """Returns a new model with the same weights, and with the same names on every rank."""
    new = build()
    new.set_weights(model.get_weights())
    return new


def share(data, batch, topology):
    """Returns this rank's part of every global batch, in order."""
    local = batch // topology.size
    picked = [np.arange(batch * i, batch * (i + 1)) for i in range(len(data[0]) // batch)]
    mine = np.concatenate([p[topology.rank * local : (topology.rank + 1) * local] for p in picked])
    return tuple(part[mine] for part in data)


def of_any_length(x, y, batch):
    """Returns batches of texts whose length is not static in the graph."""
    lengths = np.full(len(x), x.shape[1])
    data = tf.data.Dataset.from_tensor_slices((x, y, lengths)).batch(batch)
    return data.map(lambda tokens, labels, length: (tokens[:, : length[0]], labels))


def digest(arrays):
    return hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)).hexdigest()


def same_on_all_ranks(arrays, wire):
    """Asserts that all ranks hold the same bits."""
    digests = exchange_objects(digest(arrays), wire, "models/digest")
    assert len(set(digests)) == 1, f"ranks differ: {digests}"


class Batches(keras.utils.PyDataset):
    """Batches of two arrays; `options` are those of `PyDataset`."""

    def __init__(self, x, y, batch, **options):
        super().__init__(**options)
        self._arrays, self._batch = (x, y), batch

    def __len__(self):
        return len(self._arrays[0]) // self._batch

    def __getitem__(self, index):
        part = slice(index * self._batch, (index + 1) * self._batch)
        return tuple(array[part] for array in self._arrays)


def rank_variables(optimizer):
    """Returns the variables of an optimizer that differ between ranks."""
    return [variable for variable, _ in optimizer.rank_state]

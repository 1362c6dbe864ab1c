"""Rank 0 sends the state of preprocessing layers outside of variables, and ranks compare it."""

import os
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_callbacks
import tfposeidon as tp
from tests.helpers.callbacks import shared_folder
from tests.helpers.checks import LogLines, Raises
from tests.helpers.over_ranks import exchange_objects
from tfposeidon.state.placement import Placement
from tfposeidon.training import entries

pytestmark = pytest.mark.ranks("2")

WORDS = np.array(["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen"])
L = keras.layers


@keras.saving.register_keras_serializable("tests")
class Scale(L.Layer):
    """Layer that saves its factor in a file."""

    def __init__(self, **options):
        super().__init__(**options)
        self.factor = 1.0

    def call(self, inputs):
        return inputs * self.factor

    def save_assets(self, folder):
        with open(os.path.join(folder, "factor.txt"), "w") as stream:
            stream.write(str(self.factor))

    def load_assets(self, folder):
        with open(os.path.join(folder, "factor.txt")) as stream:
            self.factor = float(stream.read())


class Table(L.Layer):
    """Layer with a table that it can neither save nor load."""

    def __init__(self, value):
        super().__init__()
        pairs = tf.lookup.KeyValueTensorInitializer(tf.constant(["a"]), tf.constant([value]))
        self.table = tf.lookup.StaticHashTable(pairs, -1.0)

    def call(self, inputs):
        return inputs * self.table.lookup(tf.constant("a"))


def _model(rank):
    """Returns a model whose layers are adapted to this rank's data."""
    random = np.random.default_rng(rank)
    numbers, words = (
        keras.Input((3,), name="numbers"),
        keras.Input((), dtype="string", name="words"),
    )
    wholes = keras.Input((1,), dtype="int64", name="wholes")
    normalised, binned = L.Normalization(), L.Discretization(num_bins=4, output_mode="one_hot")
    mine = np.roll(WORDS, rank)[: 6 + rank]
    tokens = L.StringLookup(output_mode="one_hot", max_tokens=9, pad_to_max_tokens=True)
    text = L.TextVectorization(output_mode="tf_idf", max_tokens=9, pad_to_max_tokens=True)
    integers, scale = L.IntegerLookup(), Scale()
    normalised.adapt(random.normal(rank, 1 + rank, (64, 3)))
    binned.adapt(random.normal(rank, 1, 64))
    tokens.adapt(mine)
    text.adapt([" ".join(mine[:3]), " ".join(mine[2:]), mine[0]])
    integers.adapt(np.arange(5) + rank)
    scale.factor = 1.0 + rank
    features = [
        normalised(scale(numbers)),
        binned(numbers[:, :1]),
        tokens(words),
        text(words),
        L.Flatten()(L.Embedding(8, 2)(integers(wholes))),
    ]
    outputs = L.Dense(1)(L.Concatenate()([L.Flatten()(feature) for feature in features]))
    model = keras.Model([numbers, words, wholes], outputs)
    model.compile(optimizer=tp.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
    return model


def _data():
    random = np.random.default_rng(5)
    inputs = random.normal(size=(8, 3)).astype("float32"), WORDS, np.arange(8)[:, None]
    tensors = dict(zip(("numbers", "words", "wholes"), map(tf.constant, inputs), strict=True))
    return tf.data.Dataset.from_tensor_slices((tensors, tf.zeros([8, 1]))).batch(4)


def _predictions(model):
    return model.predict(_data(), verbose=0).ravel().tolist()


def test_broadcast_sends_the_state_of_layers(wire):
    model = _model(wire.topology.rank)
    tables, weights = entries.read_layers(model, *Placement), model.get_weights()
    assert (
        len(set(map(str, exchange_objects(_predictions(model), wire, "before"))))
        == wire.topology.size
    )
    begun = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: begun.append(model.get_weights())
    )
    model.fit(_data(), verbose=0, callbacks=[keras_callbacks.BroadcastVariables(1), note])
    everybody = exchange_objects(_predictions(model), wire, "after")
    assert everybody[0] == everybody[1]
    if wire.topology.rank == 1:
        for name, value in entries.read_layers(model, *Placement).items():
            np.testing.assert_array_equal(value, tables[name])
        for one, other in zip(begun[0], weights, strict=True):
            np.testing.assert_array_equal(one, other)
    vocabularies = [
        layer.get_vocabulary() for layer in model.layers if hasattr(layer, "get_vocabulary")
    ]
    texts = exchange_objects(
        [[str(token) for token in words] for words in vocabularies], wire, "vocabularies"
    )
    assert len(texts[0]) == 3
    assert texts[0] == texts[1]
    model.fit(_data(), verbose=0, callbacks=[keras_callbacks.ReplicaCheck(every_n_steps=1)])


def test_functions_traced_before_a_broadcast_use_the_sent_state(wire):
    """The statistics are derived from variables that the broadcast sends."""
    normalised = L.Normalization()
    normalised.adapt(
        np.random.default_rng(wire.topology.rank).normal(wire.topology.rank, 1, (64, 3))
    )
    model = keras.Sequential([keras.Input((3,)), normalised, L.Dense(1)])
    model.compile(optimizer=tp.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
    x = np.ones((4, 3), "float32")
    before = exchange_objects(model.predict(x, verbose=0).tolist(), wire, "before")
    model.fit(x, np.ones(4), verbose=0, callbacks=[keras_callbacks.BroadcastVariables()])
    after = exchange_objects(model.predict(x, verbose=0).tolist(), wire, "after")
    assert before[0] != before[1]
    assert after[0] == after[1]


def test_replica_check_compares_the_state_of_layers(wire):
    class Spoil(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            # The change follows the comparison at the start of `fit`.
            if (wire.topology.rank, batch) == (1, 0):
                layer = next(
                    layer for layer in self.model.layers if isinstance(layer, L.Normalization)
                )
                layer.mean = layer.mean + 1.0

    def fit(action):
        model = _model(0)
        callbacks = [Spoil(), keras_callbacks.ReplicaCheck(every_n_steps=1, action=action)]
        model.optimizer.learning_rate = 0.0
        model.fit(_data(), verbose=0, callbacks=callbacks)
        return model

    with Raises(RuntimeError, r"After 1 steps: .*'\d+.normalization.*mean', .* on rank\(s\) \[1\]"):
        fit("stop")
    with LogLines() as lines:
        model = fit("repair")
    everybody = exchange_objects(_predictions(model), wire, "repaired")
    assert everybody[0] == everybody[1]
    assert len([line for line in lines if "All ranks receive the values of rank 0" in line]) == (
        wire.topology.rank == 0
    )


def test_state_that_cannot_be_sent_is_refused(wire):
    for value, fits in ((1.0, True), (1.0 + wire.topology.rank, False)):
        model = keras.Sequential([keras.Input((2,)), Table(value), L.Dense(1)])
        model.compile(optimizer=tp.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
        fit = lambda model=model: model.fit(  # noqa: E731
            np.ones((4, 2)), np.ones(4), verbose=0, callbacks=[keras_callbacks.BroadcastVariables()]
        )
        if fits:
            fit()
        else:
            with Raises(
                ValueError,
                "Lookup tables of layers must be equal on all ranks.*Received: layer 'table",
            ):
                fit()


def test_checkpoints_hold_the_state_of_layers(wire):
    """A resumed job predicts like the saved model, even if its layers adapted to other data."""
    folder = shared_folder(wire)
    model = _model(wire.topology.rank)
    callbacks = [keras_callbacks.BroadcastVariables(), keras_callbacks.Checkpoint(folder)]
    model.fit(_data(), verbose=0, callbacks=callbacks)
    keras.utils.clear_session(free_memory=False)
    other = _model(7 + wire.topology.rank)
    other.fit(_data(), verbose=0, callbacks=[keras_callbacks.Checkpoint(folder)])
    assert _predictions(other) == _predictions(model)
    exchange_objects(None, wire, "done")
    if wire.topology.rank == 0:
        shutil.rmtree(folder)

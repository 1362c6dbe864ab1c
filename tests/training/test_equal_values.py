"""Ranks compare values that must be equal at the start, between epochs, and at the end."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_callbacks
import tfposeidon as tp
from tests.helpers import models
from tests.helpers.callbacks import noisy
from tests.helpers.checks import LogLines, Raises
from tests.helpers.models import same_on_all_ranks
from tests.helpers.over_ranks import exchange_objects
from tfposeidon.exchange import replicas
from tfposeidon.state.placement import seeds_of_layers

pytestmark = pytest.mark.ranks("2")

DATA = models.mlp.data(8)
PARTED = "All ranks must hold the same weights.*on rank.s. .1. from rank 0"


class AtEpoch(keras.callbacks.Callback):
    """Callback that changes the model on rank 1, in one hook of the second epoch or of training."""

    def __init__(self, hook, do):
        super().__init__()
        self.epochs = []
        setattr(self, hook, lambda *arguments, **logs: self._do(hook, do, *arguments))

    def _do(self, hook, do, epoch=None, logs=None):
        self.epochs.append(epoch)
        if tp.rank() == 1 and (epoch == 1 or hook.startswith("on_train_")):
            do(self.model)


def _move(variable):
    variable.assign(variable + 1)


CHANGES = {
    "a weight": lambda model: _move(model.trainable_variables[0]),
    "optimizer state": lambda model: _move(model.optimizer.variables[-1]),
    "a frozen weight": lambda model: _move(model.get_layer("frozen").kernel),
    "a restored weight": lambda model: model.set_weights([w + 1 for w in model.get_weights()]),
}


def _model():
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    frozen = keras.layers.Dense(4, name="frozen")
    frozen.trainable = False
    layers = [frozen, keras.layers.Dense(models.CLASSES)]
    model = keras.Sequential([keras.Input((20,)), *layers])
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(tp.DistributedOptimizer(sgd), models.LOSS)
    return model


@pytest.mark.parametrize(
    ("change", "hook"),
    [
        ("optimizer state", "on_epoch_begin"),
        ("a weight", "on_train_batch_end"),
        ("a frozen weight", "on_epoch_end"),
        ("a restored weight", "on_train_end"),
    ],
)
def test_a_change_on_one_rank_ends_training_on_all_ranks(wire, change, hook):
    """No further step runs once a comparison has found the difference."""
    model, steps = _model(), []
    count = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: steps.append(1))
    with Raises(RuntimeError, PARTED):
        model.fit(
            *DATA,
            batch_size=4,
            epochs=3,
            verbose=0,
            callbacks=[AtEpoch(hook, CHANGES[change]), count],
        )
    taken = {"on_train_batch_end": 1, "on_epoch_begin": 2, "on_epoch_end": 4, "on_train_end": 6}
    assert len(steps) == taken[hook]


@pytest.mark.parametrize("lacks_gpu", [False, True])
def test_weights_changed_between_fits_are_detected(wire, monkeypatch, lacks_gpu):
    """If only some ranks have a GPU, equal values may have different checksums."""
    if lacks_gpu and wire.topology.rank == 1:
        monkeypatch.setattr(replicas, "checksum", lambda *arguments, **options: "another")
    model = _model()
    model.fit(*DATA, batch_size=4, verbose=0)
    if wire.topology.rank == 1:
        CHANGES["a weight"](model)
    with Raises(RuntimeError, PARTED):
        model.fit(*DATA, batch_size=4, verbose=0)


@pytest.mark.parametrize(
    "make", [tp.DistributedOptimizer, tp.LocalUpdates], ids=["distributed", "local"]
)
def test_different_initial_weights_are_replaced_by_those_of_rank_0(wire, make):
    """This includes statistics and optimizer state, but not seeds.

    A second `fit` raises an error.
    """
    runs = []
    for own in (True, False):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(wire.topology.rank if own else 0)
        model = noisy()
        model.compile(make(keras.optimizers.SGD(0.1, momentum=0.9)), models.LOSS)
        with LogLines() as lines:
            model.fit(*DATA, batch_size=4, shuffle=False, verbose=0)
        said = [line for line in lines if "All ranks start with the values of rank 0" in line]
        assert len(said) == (own and wire.topology.rank == 0)
        same_on_all_ranks([v.numpy() for v in model.trainable_variables], wire)
        seeds = [v.numpy().tolist() for v in seeds_of_layers(model)]
        assert len({str(one) for one in exchange_objects(seeds, wire, "seeds")}) == 2
        runs.append([v.numpy() for v in (*model.trainable_variables, *seeds_of_layers(model))])
    for a, b in zip(*runs, strict=True):
        np.testing.assert_array_equal(a, b)
    model.set_weights([w + wire.topology.rank for w in model.get_weights()])
    with Raises(RuntimeError, "All ranks must (hold|begin with) the same.*BroadcastVariables"):
        model.fit(*DATA, batch_size=4, shuffle=False, verbose=0)


def test_different_vocabularies_are_replaced_by_that_of_rank_0(wire):
    keras.utils.set_random_seed(3)
    lookup = keras.layers.StringLookup(vocabulary=["a", "b", "cd"[wire.topology.rank]])
    words = keras.Input((1,), dtype="string")
    dense = keras.layers.Dense(1)(keras.layers.Embedding(8, 4)(lookup(words))[:, 0])
    model = keras.Model(words, dense)
    model.compile(tp.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    with LogLines() as lines:
        model.fit(tf.constant([["a"], ["b"]]), tf.zeros((2, 1)), verbose=0)
    assert wire.topology.rank or any("vocabulary" in line for line in lines), lines
    assert lookup.get_vocabulary() == ["[UNK]", "a", "b", "c"]


class ByHand(keras.Sequential):
    """Model that averages gradients itself, so that its replicas stay equal."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply([tp.all_reduce(g) for g in gradients], self.trainable_variables)
        return {"loss": loss}


WITHOUT_OURS = {
    "broadcast": lambda: [keras_callbacks.BroadcastVariables(), keras_callbacks.MetricAverage()],
    "metrics": lambda: [keras_callbacks.MetricAverage()],
    "check": lambda: [keras_callbacks.AverageBatchNorm(), keras_callbacks.ReplicaCheck()],
}


def _fit_without_ours(wire, kind, callbacks):
    keras.utils.set_random_seed(3)
    model = kind([keras.Input((20,)), keras.layers.Dense(models.CLASSES)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), models.LOSS, jit_compile=False)
    x, y = models.mlp.data(16)
    mine, steps = slice(wire.topology.rank, None, 2), []
    count = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: steps.append(1))
    try:
        model.fit(x[mine], y[mine], batch_size=4, verbose=0, callbacks=[*callbacks, count])
    finally:
        assert len(steps) == (2 if kind is ByHand else 1)
    return model


@pytest.mark.parametrize("callbacks", WITHOUT_OURS)
def test_an_unwrapped_optimizer_is_refused(wire, callbacks):
    """Callbacks that communicate compare replicas after the first step."""
    with Raises(RuntimeError, f"{PARTED}.*so nothing of this model is exchanged. Use compile"):
        _fit_without_ours(wire, keras.Sequential, WITHOUT_OURS[callbacks]())


def test_gradients_may_be_averaged_in_the_train_step(wire):
    model = _fit_without_ours(wire, ByHand, WITHOUT_OURS["broadcast"]())
    same_on_all_ranks(model.get_weights(), wire)


def test_metrics_of_only_one_rank_are_sent_to_all(wire):
    """Ranks with different logs could stop at different epochs."""
    model = _model()
    options = {"validation_data": DATA} if wire.topology.rank == 0 else {}
    history = model.fit(
        *DATA,
        batch_size=4,
        epochs=2,
        verbose=0,
        callbacks=[keras_callbacks.MetricAverage()],
        **options,
    ).history
    found = exchange_objects(history, wire, "history")
    assert found[0] == found[1]
    assert "val_loss" in found[1]
    same_on_all_ranks(model.get_weights(), wire)

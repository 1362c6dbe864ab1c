"""Variables are identified across ranks and runs, however Keras numbers their layers."""

import os
import shutil

import keras
import numpy as np
import pytest

import keras_callbacks
import tfposeidon as tp
from tests.helpers import models
from tests.helpers.automatic import given, links, small
from tests.helpers.callbacks import shared_folder
from tests.helpers.checks import Raises
from tests.helpers.models import rank_variables, same_on_all_ranks
from tests.helpers.over_ranks import exchange_objects
from tests.helpers.training import train_together

pytestmark = pytest.mark.ranks("2")

SPARSE = tp.schemes.TopK(density=0.1, min_elements=0)


def _data(wire):
    x, y = models.mlp.data(24)
    mine = slice(wire.topology.rank, None, wire.topology.size)
    return x[mine], y[mine]


def _compiled(model, scheme):
    model.compile(
        tp.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), scheme), models.LOSS
    )
    return model


@pytest.mark.parametrize("scheme", ["auto", "hybcomm", "ps", SPARSE], ids=str)
def test_a_rank_may_have_created_another_layer_before(wire, scheme):
    keras.utils.clear_session()
    if wire.topology.rank == 1:
        keras.layers.Dense(1)
    keras.utils.set_random_seed(3)
    model = _compiled(models.mlp(), scheme)
    callbacks = [
        keras_callbacks.BroadcastVariables(),
        keras_callbacks.AverageBatchNorm(),
        keras_callbacks.ReplicaCheck(1),
    ]
    model.fit(*_data(wire), batch_size=4, epochs=2, verbose=0, callbacks=callbacks)
    paths = exchange_objects(model.layers[0].kernel.path, wire, "paths")
    assert paths[0] != paths[1]
    same_on_all_ranks(model.get_weights(), wire)


def test_auto_uses_the_times_of_a_rank_with_an_additional_earlier_layer(wire):
    keras.utils.clear_session()
    if wire.topology.rank == 1:
        keras.layers.Dense(1)
    keras.utils.set_random_seed(3)
    model, data = small()
    optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with links(given(wire, "1gbit")):
        train_together(model, data, optimizer, wire)
    same_on_all_ranks(model.get_weights(), wire)
    assert optimizer.plan.forecasts[0].knows_computation


@pytest.mark.parametrize("kind", ["loaded", "cloned"])
def test_ranks_may_load_or_clone_a_model_that_others_build(wire, kind):
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    model, folder = models.mlp(), shared_folder(wire)
    if wire.topology.rank == 1 and kind == "loaded":
        path = os.path.join(folder, "model.keras")
        model.save(path)
        model = keras.saving.load_model(path)
    elif wire.topology.rank == 1:
        weights, model = model.get_weights(), keras.models.clone_model(model)
        model.set_weights(weights)
    _compiled(model, "hybcomm").fit(*_data(wire), batch_size=4, verbose=0)
    same_on_all_ranks(model.get_weights(), wire)
    exchange_objects(None, wire, "done")
    if wire.topology.rank == 0:
        shutil.rmtree(folder)


@pytest.mark.parametrize("scheme", ["auto", SPARSE], ids=str)
def test_a_checkpoint_resumes_with_a_rebuilt_model(wire, scheme):
    """The resumed run ends with the bits of an uninterrupted run, also in the state of schemes."""
    folder = shared_folder(wire)

    def go(name, epochs, others=0):
        keras.utils.clear_session()
        for _ in range(others):
            models.mlp()
        keras.utils.set_random_seed(3)
        model = _compiled(models.mlp(), scheme)
        checkpoint = keras_callbacks.Checkpoint(os.path.join(folder, name))
        options = {"batch_size": 4, "shuffle": False, "verbose": 0, "callbacks": [checkpoint]}
        model.fit(*_data(wire), epochs=epochs, **options)
        optimizer = model.optimizer
        return [
            v.numpy() for v in (*model.weights, *optimizer.variables, *rank_variables(optimizer))
        ]

    whole = go("whole", 2)
    go("parts", 1)
    for a, b in zip(go("parts", 2, others=2), whole, strict=True):
        np.testing.assert_array_equal(a, b)
    exchange_objects(None, wire, "done")
    if wire.topology.rank == 0:
        shutil.rmtree(folder)


def test_another_order_of_layers_is_refused(wire):
    names = ["one", "two"] if wire.topology.rank == 0 else ["two", "one"]
    layers = [keras.layers.Dense(20, name=name) for name in names]
    model = keras.Sequential([keras.Input((20,)), *layers])
    with Raises(RuntimeError, "same variables.*one/kernel.*two/kernel"):
        _compiled(model, "allreduce").fit(*_data(wire), verbose=0)

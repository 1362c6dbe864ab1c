"""Tests models whose own `compile` and `train_step` hide their optimizers from Keras."""

import os
import shutil

import keras
import numpy as np
import pytest

import keras_callbacks
import tfposeidon as tp
from tests.helpers import models
from tests.helpers.callbacks import shared_folder
from tests.helpers.checks import Raises
from tests.helpers.models import rank_variables, same_on_all_ranks
from tests.helpers.over_ranks import exchange_objects, on_one_rank
from tests.helpers.several_optimizers import ADAM, Gan, gan_batches, gan_data, gan_state, make_gan
from tfposeidon.training.session import optimizers_of

pytestmark = pytest.mark.ranks("2")


def test_all_optimizers_are_found(wire):
    model = make_gan(True)
    assert optimizers_of(model) == [model.d_optimizer, model.optimizers["generator"]]
    assert optimizers_of(make_gan(False)) == []


def test_unequal_batches_equal_one_process(wire):
    mine = slice(0, 3) if wire.topology.rank == 0 else slice(3, 8)
    noise, real = gan_data(8)

    def alone():
        whole = make_gan(False)
        whole.fit(noise, real, batch_size=8, epochs=4, shuffle=False, verbose=0)
        return [v.numpy() for v in whole.variables]

    reference = on_one_rank(alone)
    for scheme in ("allreduce", "alltoall"):
        model = make_gan(True, scheme=scheme)
        model.fit(noise[mine], real[mine], batch_size=5, epochs=4, shuffle=False, verbose=0)
        for ours, theirs in zip(model.variables, reference, strict=True):
            np.testing.assert_allclose(
                ours.numpy(), theirs, rtol=2e-4, atol=2e-6, err_msg=ours.path
            )
        same_on_all_ranks(gan_state(model), wire)


def test_ranks_with_fewer_batches_stay_equal(wire):
    """A step calls one optimizer twice, and the other once."""
    model = make_gan(True, d_steps=2)
    model.fit(gan_batches([4] * (3 + wire.topology.rank)), epochs=2, verbose=0)
    assert int(model.d_optimizer.iterations) == 6 * model.d_steps
    same_on_all_ranks(gan_state(model), wire)


def _job(folder, epochs, every_n_steps=None, model=None):
    """Trains a new or the given model, and returns the model and its state."""
    if model is None:
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(11 + tp.rank())
        model = Gan()
        inner = [ADAM(0.01, gradient_accumulation_steps=2) for _ in range(2)]
        model.compile(*map(tp.DistributedOptimizer, inner))
    noise, real = gan_data(12)
    mine = slice(tp.rank(), None, tp.size())
    callbacks = [
        keras_callbacks.BroadcastVariables(),
        keras_callbacks.Checkpoint(folder, every_n_steps, keep=100),
    ]
    model.fit(
        noise[mine],
        real[mine],
        batch_size=2,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    rank_state = [v.numpy() for o in optimizers_of(model) for v in rank_variables(o)]
    return model, [*gan_state(model), *rank_state]


def test_runs_resume_with_two_optimizers(wire):
    folder = shared_folder(wire)
    _, whole = _job(os.path.join(folder, "whole"), 2, every_n_steps=1)
    names = sorted(os.listdir(os.path.join(folder, "whole")))
    assert len(names) == 8
    model = None
    for name in (names[0], names[5]):
        target = os.path.join(folder, f"from-{name}")
        if wire.topology.rank == 0:
            shutil.copytree(os.path.join(folder, "whole", name), os.path.join(target, name))
        exchange_objects(None, wire, "copied")
        # The second snapshot is resumed by the model that resumed the first.
        model, resumed = _job(target, 2, model=model)
        for a, b in zip(resumed, whole, strict=True):
            np.testing.assert_array_equal(a, b, f"resumed from {name}")
    exchange_objects(None, wire, "done")
    if wire.topology.rank == 0:
        shutil.rmtree(folder)


def test_broadcast_sends_the_state_of_all_optimizers(wire):
    model = make_gan(True)
    for optimizer, part in zip(
        optimizers_of(model), (model.discriminator, model.generator), strict=True
    ):
        optimizer.build(part.trainable_variables)
        for variable in optimizer.variables[2:]:
            variable.assign(variable + wire.topology.rank)
    noise, real = gan_data(4)
    model.fit(
        noise,
        real,
        batch_size=2,
        shuffle=False,
        verbose=0,
        callbacks=[keras_callbacks.BroadcastVariables()],
    )
    same_on_all_ranks(gan_state(model), wire)


def test_callbacks_apply_to_all_optimizers(wire):
    model = make_gan(True, scheme="alltoall")
    phases = [keras_callbacks.Phase(epochs=1, size=8, batch=4)]
    for callback in (
        keras_callbacks.LearningRateSchedule(0.1, 1.0),
        # This callback has no argument `optimizer`, so the message must name callbacks that have
        # one.
        keras_callbacks.ProgressiveResize(phases, learning_rate=0.1),
    ):
        with Raises(ValueError, "of which 2 communicate.*Use one LearningRateSchedule or"):
            model.fit(*gan_data(4), verbose=0, callbacks=[callback])
    g_optimizer = model.optimizers["generator"]
    schedule = keras_callbacks.LearningRateSchedule(
        0.5, lambda epoch: 1 / (epoch + 1), optimizer=g_optimizer
    )
    schemes = keras_callbacks.SchemeSchedule({0: "alltoall", 1: "torus2d"})
    history = model.fit(
        *gan_data(8),
        batch_size=4,
        epochs=2,
        verbose=0,
        callbacks=[schedule, schemes, keras_callbacks.Throughput()],
    ).history
    assert float(model.d_optimizer.learning_rate) == np.float32(0.01)
    assert float(g_optimizer.learning_rate) == 0.25
    plans = [optimizer.plan for optimizer in optimizers_of(model)]
    assert {bucket.scheme.name for plan in plans for bucket in plan.buckets} == {"torus2d"}
    assert (
        history["megabytes_sent"][-1] * 1e6
        == exchange_objects(sum(p.cost.bytes for p in plans), wire, "b")[0]
    )


class _StopAtStep2(keras.callbacks.Callback):
    def __init__(self, ranks):
        super().__init__()
        self.ranks = ranks

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and tp.rank() in self.ranks:
            self.model.stop_training = True


def test_a_stop_within_an_epoch_stops_all_ranks(wire):
    """If only one rank stops, the others discard their next step."""
    for ranks, eagerly in (((0, 1), False), ((1,), False), ((1,), True)):
        model = models.mlp()
        optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.05))
        model.compile(optimizer=optimizer, loss=models.LOSS, run_eagerly=eagerly)
        history = model.fit(
            *models.mlp.data(16), batch_size=4, epochs=3, verbose=0, callbacks=[_StopAtStep2(ranks)]
        )
        assert len(history.epoch) == 1
        assert int(model.optimizer.iterations) == 2
        same_on_all_ranks(model.get_weights(), wire)


def test_a_nan_on_one_rank_terminates_all_ranks(wire):
    x, y = models.mlp.data(16)
    if wire.topology.rank == 1:
        x[4:8] = np.nan
    # Omit the ReLU, because oneDNN would fuse it into the product, and turn NaN into 0.
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(models.CLASSES)])
    model.compile(optimizer=tp.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss=models.LOSS)
    stop = keras.callbacks.TerminateOnNaN()
    history = model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=[stop])
    assert len(history.epoch) == 1
    assert int(model.optimizer.iterations) == 2

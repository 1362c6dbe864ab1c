"""Models with a compile and a train step of their own, whose optimizers Keras does not know."""

import os
import shutil
import tempfile

import keras
import numpy as np
import tensorflow as tf

import keras_callbacks
import tfposeidon as tp
from tests.on_ranks import models
from tests.on_ranks.checks import Raises
from tests.on_ranks.models import same_on_all_ranks
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.training.session import optimizers_of

ADAM = keras.optimizers.Adam


class Gan(keras.Model):
    """The GAN of keras.io, with the noise in the data, so that all see the same."""

    def __init__(self, d_steps=1):
        super().__init__()
        self.d_steps = d_steps
        layer = keras.layers.Dense
        self.generator = keras.Sequential(
            [keras.Input((3,)), layer(8, activation="relu"), layer(4)]
        )
        self.discriminator = keras.Sequential(
            [keras.Input((4,)), layer(8, activation="relu"), layer(1)]
        )
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer = d_optimizer
        self.optimizers = {"generator": [g_optimizer]}

    def train_step(self, data):
        noise, real = data
        for _ in range(self.d_steps):
            with tf.GradientTape() as tape:
                fakes, reals = self.discriminator(self.generator(noise)), self.discriminator(real)
                d_loss = self.loss_fn(tf.ones_like(fakes), fakes) + self.loss_fn(
                    tf.zeros_like(reals), reals
                )
            weights = self.discriminator.trainable_weights
            self.d_optimizer.apply_gradients(
                zip(tape.gradient(d_loss, weights), weights, strict=True)
            )
        with tf.GradientTape() as tape:
            fakes = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(tf.zeros_like(fakes), fakes)
        weights = self.generator.trainable_weights
        self.optimizers["generator"][0].apply_gradients(
            zip(tape.gradient(g_loss, weights), weights, strict=True)
        )
        return {"d_loss": d_loss, "g_loss": g_loss}


def _data(count):
    random = np.random.default_rng(3)
    return random.normal(size=(count, 3)).astype("float32"), random.normal(2, 1, (count, 4)).astype(
        "float32"
    )


def _batches(pieces):
    """A dataset of unknown length whose batches are of these sizes, in the order of the data."""
    noise, real = _data(sum(pieces))
    ends = np.cumsum(pieces)

    def batches():
        for end, size in zip(ends, pieces, strict=True):
            yield noise[end - size : end], real[end - size : end]

    shapes = tf.TensorSpec([None, 3]), tf.TensorSpec([None, 4])
    return tf.data.Dataset.from_generator(batches, output_signature=shapes)


def _gan(wrap, d_steps=1, scheme="allreduce"):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(11)
    model = Gan(d_steps)
    optimizers = ADAM(0.01), ADAM(0.02)
    model.compile(*(tp.DistributedOptimizer(o, scheme) for o in optimizers) if wrap else optimizers)
    return model


def _state(model):
    return [
        v.numpy()
        for v in (*model.variables, *(v for o in optimizers_of(model) for v in o.variables))
    ]


def case_all_optimizers_are_found(wire):
    model = _gan(True)
    assert optimizers_of(model) == [model.d_optimizer, model.optimizers["generator"][0]]
    assert optimizers_of(_gan(False)) == []


def case_unequal_batches_equal_one_process(wire):
    mine = slice(0, 3) if wire.topology.rank == 0 else slice(3, 8)
    noise, real = _data(8)
    for scheme in ("allreduce", "asa"):
        model, whole = _gan(True, scheme=scheme), _gan(False)
        model.fit(noise[mine], real[mine], batch_size=5, epochs=4, shuffle=False, verbose=0)
        whole.fit(noise, real, batch_size=8, epochs=4, shuffle=False, verbose=0)
        for ours, theirs in zip(model.variables, whole.variables, strict=True):
            np.testing.assert_allclose(
                ours.numpy(), theirs.numpy(), rtol=2e-4, atol=2e-6, err_msg=ours.path
            )
        same_on_all_ranks(_state(model), wire)


def case_ranks_with_fewer_batches(wire):
    """However often a step exchanges by which optimizer."""
    for d_steps in (1, 3):
        model = _gan(True, d_steps)
        model.fit(_batches([4] * (3 + wire.topology.rank)), epochs=2, verbose=0)
        assert int(model.d_optimizer.iterations) == 6 * d_steps
        same_on_all_ranks(_state(model), wire)


def _job(
    folder, epochs, every_n_steps=None, optimizer=lambda: ADAM(0.01, gradient_accumulation_steps=2)
):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(11 + tp.rank())
    model = Gan()
    model.compile(*(tp.DistributedOptimizer(optimizer()) for _ in range(2)))
    noise, real = _data(12)
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
    rank_state = [v.numpy() for o in optimizers_of(model) for v in o.rank_variables]
    return [*_state(model), *rank_state]


def case_resume_at_every_step(wire):
    folder = exchange_objects(
        tempfile.mkdtemp() if wire.topology.rank == 0 else "", wire, "folder"
    )[0]
    whole = _job(os.path.join(folder, "whole"), 2, every_n_steps=1)
    names = sorted(os.listdir(os.path.join(folder, "whole")))
    assert len(names) == 8
    for name in (names[0], names[3], names[5]):
        target = os.path.join(folder, f"from-{name}")
        if wire.topology.rank == 0:
            shutil.copytree(os.path.join(folder, "whole", name), os.path.join(target, name))
        exchange_objects(None, wire, "copied")
        for a, b in zip(_job(target, 2), whole, strict=True):
            np.testing.assert_array_equal(a, b, f"resumed from {name}")
    exchange_objects(None, wire, "done")
    if wire.topology.rank == 0:
        shutil.rmtree(folder)


def case_broadcast_gives_the_state_of_all_optimizers(wire):
    model = _gan(True)
    for optimizer, part in zip(
        optimizers_of(model), (model.discriminator, model.generator), strict=True
    ):
        optimizer.build(part.trainable_variables)
        for variable in optimizer.variables[2:]:
            variable.assign(variable + wire.topology.rank)
    noise, real = _data(4)
    model.fit(
        noise,
        real,
        batch_size=2,
        shuffle=False,
        verbose=0,
        callbacks=[keras_callbacks.BroadcastVariables()],
    )
    same_on_all_ranks(_state(model), wire)


def case_callbacks_take_all_optimizers(wire):
    model = _gan(True, scheme="asa")
    with Raises(ValueError, "whose rate it sets. Received: a model with 2 DistributedOptimizer"):
        model.fit(*_data(4), verbose=0, callbacks=[keras_callbacks.LearningRateSchedule(0.1, 1.0)])
    g_optimizer = model.optimizers["generator"][0]
    schedule = keras_callbacks.LearningRateSchedule(
        0.5, lambda epoch: 1 / (epoch + 1), optimizer=g_optimizer
    )
    schemes = keras_callbacks.SchemeSchedule({0: "asa", 1: "2dtar"})
    history = model.fit(
        *_data(8),
        batch_size=4,
        epochs=2,
        verbose=0,
        callbacks=[schedule, schemes, keras_callbacks.Throughput()],
    ).history
    assert float(model.d_optimizer.learning_rate) == np.float32(0.01)
    assert float(g_optimizer.learning_rate) == 0.25
    plans = [optimizer.plan for optimizer in optimizers_of(model)]
    assert {bucket.scheme.name for plan in plans for bucket in plan.buckets} == {"2dtar"}
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


def case_stop_in_the_middle_of_an_epoch(wire):
    """Training stops on all ranks at once, or on one, which drops the others' next step."""
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


def case_terminate_on_nan(wire):
    x, y = models.mlp.data(16)
    if wire.topology.rank == 1:
        x[4:8] = np.nan
    # Without a ReLU: oneDNN fuses it into the product, and it then turns NaN into 0.
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(models.CLASSES)])
    model.compile(optimizer=tp.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss=models.LOSS)
    stop = keras.callbacks.TerminateOnNaN()
    history = model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=[stop])
    assert len(history.epoch) == 1
    assert int(model.optimizer.iterations) == 2

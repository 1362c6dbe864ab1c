"""Tests callbacks on two ranks."""

import os
import re
import shutil
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_callbacks
import tfposeidon as tp
from tests.helpers import models
from tests.helpers.callbacks import SGD, compiled, noisy, shared_folder
from tests.helpers.checks import LogLines, Raises
from tests.helpers.models import same_on_all_ranks
from tests.helpers.over_ranks import exchange_objects
from tests.helpers.training import sgd

pytestmark = pytest.mark.ranks("2", core=True)


def test_broadcast_equalizes_all_variables_except_seeds(wire):
    keras.utils.set_random_seed(wire.topology.rank)
    model = compiled(noisy)
    x, y = models.mlp.data(8)
    model.optimizer.build(model.trainable_variables)
    model.optimizer.variables[2].assign(model.optimizer.variables[2] + wire.topology.rank)
    model.fit(
        x,
        y,
        batch_size=4,
        shuffle=False,
        verbose=0,
        callbacks=[keras_callbacks.BroadcastVariables()],
    )
    everything = [v.numpy() for v in [*model.trainable_variables, *model.optimizer.variables]]
    same_on_all_ranks(everything, wire)
    # Seeds differ, so that ranks draw different noise.
    seeds = [v.numpy().tolist() for v in model.variables if "seed" in v.path]
    assert seeds
    assert len({str(one) for one in exchange_objects(seeds, wire, "seeds")}) == 2


class Unbuilt(keras.Model):
    """Model whose shapes are unknown until it receives data."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(8)
        self.top = keras.layers.Dense(models.CLASSES)

    def call(self, inputs):
        return self.top(self.hidden(inputs))


def test_broadcast_builds_an_unbuilt_model(wire):
    x, y = models.mlp.data(8)
    for data in (
        {"x": x, "y": y, "batch_size": 4},
        {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(4)},
    ):
        keras.utils.set_random_seed(wire.topology.rank)
        model = compiled(Unbuilt)
        model.fit(
            **data, shuffle=False, verbose=0, callbacks=[keras_callbacks.BroadcastVariables()]
        )
        same_on_all_ranks(model.get_weights(), wire)
        assert int(model.optimizer.iterations) == 2


def test_data_of_unknown_shape_require_a_built_model(wire):
    batch = models.mlp.data(4)
    data = tf.data.Dataset.from_generator(lambda: iter([batch] * 2), ("float32", "int64"))
    with Raises(RuntimeError, "Call the model on one batch, or model.build"):
        compiled(Unbuilt).fit(data, verbose=0, callbacks=[keras_callbacks.BroadcastVariables()])


def test_broadcast_names_the_first_difference(wire):
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(4 + wire.topology.rank)])
    model.compile(optimizer=tp.DistributedOptimizer(sgd()), loss="mse")
    with Raises(RuntimeError, r"first difference at variable 0: .*\(20, 4\).*\(20, 5\)"):
        model.fit(*models.mlp.data(8), verbose=0, callbacks=[keras_callbacks.BroadcastVariables()])


def test_metrics_are_averaged_over_the_samples_of_all_ranks(wire):
    keras.utils.set_random_seed(0)
    model = compiled(metrics=["accuracy"])
    sizes = (12, 4)
    x, y = models.mlp.data(16)
    mine = slice(0, 12) if wire.topology.rank == 0 else slice(12, 16)
    history = model.fit(
        x[mine],
        y[mine],
        batch_size=4,
        steps_per_epoch=1,
        verbose=0,
        shuffle=False,
        validation_data=(x[mine], y[mine]),
        callbacks=[keras_callbacks.MetricAverage()],
    ).history
    logs = model.evaluate(x[mine], y[mine], batch_size=4, verbose=0, return_dict=True)
    whole = model.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)
    everybody = exchange_objects(
        [logs["loss"], history["val_loss"][0], history["loss"][0]], wire, "losses"
    )
    assert everybody[0][0] != everybody[1][0]
    assert everybody[0][1:] == everybody[1][1:]
    np.testing.assert_allclose(history["val_accuracy"][0], whole["accuracy"], rtol=1e-6)
    np.testing.assert_allclose(
        everybody[0][1], np.average([e[0] for e in everybody], weights=sizes), rtol=1e-5
    )


class _Worse(keras.callbacks.Callback):
    """Replaces the loss: it improves on rank 0 and worsens on rank 1 and on average."""

    def on_epoch_end(self, epoch, logs=None):
        logs["loss"] = -float(epoch) if tp.rank() == 0 else 3.0 * epoch


def test_keras_callbacks_decide_identically_on_all_ranks(wire):
    model = compiled()
    callbacks = [
        _Worse(),
        keras_callbacks.MetricAverage(),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, factor=0.5),
        keras.callbacks.EarlyStopping("loss", patience=3),
    ]
    history = model.fit(
        *models.mlp.data(8), batch_size=4, epochs=10, verbose=0, callbacks=callbacks
    )
    epochs = exchange_objects(len(history.epoch), wire, "epochs")
    rates = exchange_objects(float(model.optimizer.learning_rate), wire, "rates")
    assert epochs == [4, 4]
    assert rates[0] == rates[1] < 0.05


def _rates_with_warmup(schedule_from, together=1):
    """Returns the learning rate of each execution in four epochs, with two epochs of warm-up.

    The schedule divides the rate by ten from epoch `schedule_from` on.
    """
    rates = []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: rates.append(float(model.optimizer.learning_rate))
    )
    model = compiled(optimizer=SGD(0.8, momentum=0.9), steps_per_execution=together)
    warmup = keras_callbacks.LearningRateWarmup(0.8, warmup_epochs=2)
    schedule = keras_callbacks.LearningRateSchedule(
        0.8, lambda epoch: 0.1, start_epoch=schedule_from
    )
    callbacks = [warmup, schedule, record]
    model.fit(*models.mlp.data(16), batch_size=4, epochs=4, verbose=0, callbacks=callbacks)
    return rates


def test_warmup_raises_the_rate_in_each_step(wire):
    expected = [*np.linspace(0.4, 0.8, 9)[:8], *[0.8] * 4, *[0.08] * 4]
    np.testing.assert_allclose(_rates_with_warmup(3), expected, rtol=1e-5)


def test_warmup_reaches_the_full_rate_in_a_partial_execution(wire):
    """An epoch has an execution of three steps and one of a single step."""
    expected = [0.4, 0.55, 0.6, 0.75, *[0.8] * 2, *[0.08] * 2]
    np.testing.assert_allclose(_rates_with_warmup(3, together=3), expected, rtol=1e-5)


def test_a_schedule_applies_directly_after_warmup(wire):
    expected = [*np.linspace(0.4, 0.8, 9)[:8], *[0.08] * 8]
    np.testing.assert_allclose(_rates_with_warmup(2), expected, rtol=1e-5)


def test_a_resumed_run_reaches_the_full_rate(wire):
    """The snapshot contains the learning rate of the last execution in the warm-up."""
    for together, warmup_epochs, epoch, batch, last in (
        (1, 2, 2, 0, 1.75),
        (2, 2, 2, 0, 1.5),
        (1, 1.5, 1, 2, 1.25),
    ):
        model = compiled(optimizer=SGD(0.8), steps_per_execution=together)
        warmup = keras_callbacks.LearningRateWarmup(0.8, warmup_epochs, momentum_correction=False)
        warmup.set_model(model)
        warmup.set_params({"steps": 4})
        model.optimizer.learning_rate = 0.8 * warmup.multiplier(last)
        warmup.on_train_begin()
        warmup.on_epoch_begin(epoch)
        warmup.on_train_batch_begin(batch)
        assert float(model.optimizer.learning_rate) == np.float32(0.8)


def test_momentum_correction_scales_the_velocity(wire):
    model = compiled(optimizer=SGD(0.8, momentum=0.9))
    model.fit(*models.mlp.data(8), batch_size=4, verbose=0)
    innermost = model.optimizer.inner_optimizer
    before = [v.numpy() for v in innermost.momentums]
    schedule = keras_callbacks.LearningRateSchedule(0.8, 0.25)
    schedule.set_model(model)
    schedule.set_params({})
    schedule.on_epoch_begin(0)
    for now, then in zip(innermost.momentums, before, strict=True):
        np.testing.assert_allclose(now.numpy(), 0.25 * then, rtol=1e-6)


def test_moving_statistics_are_averaged_over_ranks(wire):
    model = noisy()
    optimizer = tp.DistributedOptimizer(sgd(), synchronize_model=False)
    model.compile(optimizer, models.LOSS)
    x, y = models.mlp.data(8)
    model.fit(x + wire.topology.rank, y, batch_size=4, verbose=0)
    layer = model.layers[1]
    means = exchange_objects(layer.moving_mean.numpy().tolist(), wire, "means")
    assert means[0] != means[1]
    model.evaluate(x, y, verbose=0, callbacks=[keras_callbacks.AverageBatchNorm()])
    np.testing.assert_allclose(
        layer.moving_mean.numpy(), np.mean(means, axis=0), rtol=1e-5, atol=1e-6
    )
    same_on_all_ranks([layer.moving_mean.numpy(), layer.moving_variance.numpy()], wire)


class _Part(keras.callbacks.Callback):
    """Changes a weight of rank 1 after the third step."""

    def on_train_batch_end(self, batch, logs=None):
        if tp.rank() == 1 and batch == 2:
            kernel = self.model.trainable_variables[2]
            kernel.assign(kernel + 1e-3)


def _checked_fit(action):
    model = compiled()
    check = keras_callbacks.ReplicaCheck(every_n_steps=4, action=action)
    model.fit(*models.mlp.data(32), batch_size=4, verbose=0, callbacks=[_Part(), check])
    return model


def _of_ranks(lines):
    """Returns the lines that report ranks, without those that `fit` logs at its start."""
    return [line for line in lines if "rank(s)" in line]


def test_replica_check_stops_training_if_replicas_differ(wire):
    with Raises(RuntimeError, r"After 4 steps: .*dense_1/kernel.* on rank\(s\) \[1\] from rank 0"):
        _checked_fit("stop")


def test_replica_check_repairs_different_replicas(wire):
    with LogLines() as lines:
        model = _checked_fit("repair")
    same_on_all_ranks(model.get_weights(), wire)
    assert len(_of_ranks(lines)) == (1 if wire.topology.rank == 0 else 0)


def test_replica_check_reports_without_changing_weights(wire):
    """Rank 0 logs one line at each of the two checks, and one at the end of `fit`."""
    with LogLines() as lines:
        model = _checked_fit("report")
    lines = _of_ranks(lines)
    assert len(lines) == (3 if wire.topology.rank == 0 else 0), lines
    for steps, line in zip((4, 8), lines, strict=False):
        assert re.search(
            rf"After {steps} steps: .*dense_1/kernel.* on rank\(s\) \[1\] from rank 0, .*s\.$", line
        ), line
    digests = exchange_objects(models.digest(model.get_weights()), wire, "digests")
    assert digests[0] != digests[1]


def test_throughput_is_that_of_the_slowest_rank(wire, monkeypatch):
    """A simulated clock advances by a second per batch on rank 0, and by two on rank 1."""
    clock = SimpleNamespace(now_s=0.0)

    def advance(batch, logs):
        clock.now_s += 1.0 + wire.topology.rank

    timing = SimpleNamespace(perf_counter=lambda: clock.now_s)
    monkeypatch.setattr("keras_callbacks.throughput.time", timing)
    folder = shared_folder(wire)
    model = compiled()
    callbacks = [keras_callbacks.Throughput(), keras.callbacks.TensorBoard(folder)]
    batches = keras.callbacks.LambdaCallback(on_train_batch_begin=advance)
    history = model.fit(
        *models.mlp.data(64),
        batch_size=4,
        epochs=2,
        verbose=0,
        callbacks=[*callbacks, batches],
        validation_data=models.mlp.data(8),
    ).history
    names = ("samples_per_second", "exposed_communication", "megabytes_sent")
    everybody = exchange_objects({n: history[n] for n in names}, wire, "history")
    assert everybody[0] == everybody[1]
    assert all(0 < share < 1 for share in history["exposed_communication"])
    assert history["megabytes_sent"][0] * 1e6 == model.optimizer.plan.cost.bytes > 0
    # The first of 16 batches is excluded. The others take 30 s on rank 1, which is the slowest.
    assert history["samples_per_second"] == [2 * 15 * 4 / 30] * 2
    if wire.topology.rank == 0:
        assert {f"epoch_{n}" for n in names} <= _scalars(os.path.join(folder, "train"))
        shutil.rmtree(folder)


def _scalars(folder):
    names = set()
    for name in os.listdir(folder):
        for record in tf.data.TFRecordDataset(os.path.join(folder, name)).as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(record)
            names |= {value.tag for value in event.summary.value}
    return names

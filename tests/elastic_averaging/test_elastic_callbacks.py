"""Tests callbacks and custom loops with a server on rank 0."""

import contextlib
import csv
import json
import os
import shutil
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_callbacks
import tfposeidon as tp
from tests.helpers import models
from tests.helpers.callbacks import shared_folder
from tests.helpers.checks import LogLines, Raises
from tests.helpers.elastic_averaging import elastic_fitted, elastic_share, is_server, sgd
from tests.helpers.models import same_on_all_ranks
from tests.helpers.several_optimizers import Gan, gan_data
from tfposeidon.communication.wire import HorovodWire, exchange_objects

pytestmark = pytest.mark.ranks("3", server_rank=0)

FEW, MANY = 48, 96
"""Numbers of samples for 6 and 12 steps of each of 2 workers in an epoch."""


@contextlib.contextmanager
def _folder(wire):
    """Yields a folder that all ranks share, and removes it after all ranks have used it."""
    folder = shared_folder(wire)
    try:
        yield folder
    finally:
        exchange_objects(None, wire, "done")
        if is_server():
            shutil.rmtree(folder)


class _OtherCollectives:
    """Records collectives of more than two ranks within a `with` block."""

    NAMES = ("all_reduce", "all_gather", "all_to_all", "broadcast")

    def __enter__(self):
        self._own = {name: getattr(HorovodWire, name) for name in self.NAMES}
        found = []
        for name, own in self._own.items():
            setattr(HorovodWire, name, _recording(own, name, found))
        return found

    def __exit__(self, *_):
        for name, own in self._own.items():
            setattr(HorovodWire, name, own)


def _recording(own, kind, found):
    def collective(wire, tensor, group, *others, **named):
        if kind == "broadcast" or group.size > 2:
            found.append(kind)
        return own(wire, tensor, group, *others, **named)

    return collective


def test_callbacks_for_synchronous_ranks_exchange_nothing_within_an_epoch(wire):
    def collectives(epochs):
        callbacks = [
            keras_callbacks.BroadcastVariables(),
            keras_callbacks.AverageBatchNorm(),
            keras_callbacks.MetricAverage(),
            keras_callbacks.ReplicaCheck(every_n_steps=2),
            keras_callbacks.Throughput(),
        ]
        with _OtherCollectives() as found:
            elastic_fitted(models.mlp.data(FEW), epochs=epochs, callbacks=callbacks)
        return found

    of_begin_and_end = collectives(epochs=0)
    assert "broadcast" in of_begin_and_end
    assert collectives(epochs=2) == of_begin_and_end


class _EvaluatesSlowly(keras.callbacks.Callback):
    """Delays the server's first evaluation until all workers have finished further epochs."""

    def __init__(self, folder, epochs):
        super().__init__()
        self._folder, self._epochs = Path(folder), epochs
        self.evaluations = 0

    def on_epoch_end(self, epoch, logs=None):
        if not is_server() and epoch + 1 == self._epochs:
            (self._folder / f"{tp.rank()}").touch()

    def on_test_begin(self, logs=None):
        self.evaluations += 1
        while len(list(self._folder.iterdir())) < tp.workers().size:
            time.sleep(0.01)


def test_epochs_that_end_during_an_evaluation_are_merged(wire):
    with _folder(wire) as folder:
        epochs = 6
        begun = []
        note = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: begun.append(epoch)
        )
        slow = _EvaluatesSlowly(folder, 4)
        with LogLines() as lines:
            model, _ = elastic_fitted(
                models.mlp.data(FEW),
                epochs=epochs,
                callbacks=[slow, note],
            )
        ended, logs = model.history.epoch, model.history.history
        assert ended[-1] == epochs - 1
        if is_server():
            assert len(ended) < epochs
            assert set(ended) <= set(begun)
            assert slow.evaluations == len(ended)
            # Each of 2 workers exchanges twice per epoch, and an evaluation includes the exchanges
            # of its epoch.
            least = [2 * 2 * (epoch + 1) for epoch in ended]
            assert (np.greater_equal(logs["exchanges"], least)).all()
            assert any("ended during an evaluation" in line for line in lines)
        else:
            assert ended == begun == list(range(epochs))


def test_a_worker_without_batches_does_not_end_an_epoch(wire):
    x, y = models.mlp.data(FEW)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    is_idle = tp.rank() == 1
    model = models.mlp()
    model.compile(tp.ElasticAveraging(sgd(), sync_every=3), models.LOSS)
    wait = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(0.01))
    model.fit(
        data.filter(lambda *_: tf.constant(not is_idle)),
        epochs=3,
        verbose=0,
        validation_data=data,
        callbacks=[wait],
    )
    same_on_all_ranks(model.get_weights(), wire)
    if is_server():
        assert model.history.epoch[-1] == 2
        exchanges = model.history.history["exchanges"]
        # The other worker takes 6 steps in each epoch.
        assert all(
            done >= 2 * (epoch + 1)
            for done, epoch in zip(exchanges, model.history.epoch, strict=True)
        )


def test_ranks_with_different_optimizers_or_epochs_are_refused(wire):
    made = [tp.ElasticAveraging(sgd()) for _ in range(2)]
    for optimizer in made:
        optimizer.build([keras.Variable([1.0])])
    with Raises(RuntimeError, "Optimizers must be the same on all ranks"):
        made[0].run(lambda: None, others=made[1:] if is_server() else [])
    for differing in ({"epochs": 2 + tp.rank()}, {"epochs": 9, "initial_epoch": tp.rank()}):
        with Raises(RuntimeError, f"same epochs. Received: {list(differing)[-1]} .* on rank 0"):
            elastic_fitted(models.mlp.data(FEW), **differing)
    model, _ = elastic_fitted(models.mlp.data(FEW), epochs=4, initial_epoch=2)
    assert model.history.epoch[-1] == 3
    assert model.history.epoch[0] >= 2


class _Notes(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(epoch)


class _NotesAtServer(_Notes):
    acts_at_server = True


def test_callbacks_with_acts_at_server_run_on_the_server_only(wire):
    everywhere, at_server = _Notes(), _NotesAtServer()
    elastic_fitted(models.mlp.data(FEW), epochs=1, callbacks=[everywhere, at_server])
    assert everywhere.epochs == [0]
    assert at_server.epochs == ([0] if is_server() else [])


def test_a_backup_is_restored_on_all_ranks(wire):
    with _folder(wire) as folder:
        data = models.mlp.data(FEW)

        def backup():
            return keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)

        model, _ = elastic_fitted(data, epochs=2, callbacks=[backup()])
        resumed, _ = elastic_fitted(data, epochs=2, callbacks=[backup()])
        assert not resumed.history.epoch
        same_on_all_ranks(resumed.get_weights(), wire)
        assert models.digest(resumed.get_weights()) == models.digest(model.get_weights())
        resumed, _ = elastic_fitted(data, epochs=3, callbacks=[backup()])
        assert resumed.history.epoch == [2]
        same_on_all_ranks(resumed.get_weights(), wire)
        assert int(resumed.optimizer.iterations) == 3 * 6


def test_logs_have_the_columns_of_epochs_with_validation(wire):
    with _folder(wire) as folder:
        path = os.path.join(folder, "epochs.csv")
        logger = keras.callbacks.CSVLogger(path)
        model, _ = elastic_fitted(
            models.mlp.data(FEW),
            epochs=4,
            validation_freq=[4],
            callbacks=[keras.callbacks.LearningRateScheduler(lambda _: 0.01), logger],
        )
        if is_server():
            with open(path, newline="") as stream:
                rows = list(csv.DictReader(stream))
            names = {"epoch", "exchanges", "learning_rate", "val_accuracy", "val_loss"}
            assert set(rows[0]) == names
            assert [int(row["epoch"]) for row in rows] == model.history.epoch
            assert float(rows[-1]["val_loss"]) == model.history.history["val_loss"][-1]
            assert rows[0]["val_loss"] != "NA"
            assert all(row["val_loss"] == "NA" for row in rows[1:-1])


def test_a_failure_saves_the_epoch_to_resume_at(wire):
    with _folder(wire) as folder:
        data = models.mlp.data(FEW)

        def epoch_of_newest():
            newest = sorted(Path(folder).glob("snapshot-*"))[-1]
            return json.loads((newest / "meta.json").read_text())["epoch"]

        class Fails(keras.callbacks.Callback):
            """Simulates a failure before the first epoch, and one after the last epoch."""

            acts_at_server = True

            def __init__(self, checkpoint, expected):
                super().__init__()
                self._checkpoint, self._expected = checkpoint, expected

            def on_train_begin(self, logs=None):
                self._checkpoint.on_job_failure()
                assert epoch_of_newest() == self._expected[0]

            def on_train_end(self, logs=None):
                self._checkpoint.on_job_failure()
                assert epoch_of_newest() == self._expected[1]

        for epochs, expected in ((1, (0, 1)), (3, (1, 3))):
            saved = keras_callbacks.Checkpoint(folder)
            elastic_fitted(data, epochs=epochs, callbacks=[saved, Fails(saved, expected)])


def test_throughput_and_learning_rates_come_from_workers(wire):
    warmup = keras_callbacks.LearningRateWarmup(0.1, warmup_epochs=1)
    assert warmup.multiplier(0) == 1 / 2
    callbacks = [keras_callbacks.Throughput(), warmup]
    elastic_fitted(models.mlp.data(MANY), epochs=1, callbacks=callbacks)


class _Normalized(Gan):
    """GAN whose generator has moving statistics."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(8, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(4),
            ]
        )


def test_a_custom_loop_trains_two_optimizers_and_exchanges_statistics(wire):
    gan, made = _Normalized(), [tp.ElasticAveraging(sgd(), sync_every=2) for _ in range(2)]
    gan.compile(*made)
    parts = gan.discriminator, gan.generator
    with Raises(ValueError, "a SGD that is not built. Use ElasticAveraging"):
        made[0].build(parts[0].trainable_weights)
        made[0].run(lambda: None, others=[sgd()])
    made[1].build(parts[1].trainable_weights)
    mean = gan.generator.layers[1].moving_mean
    starts = [part.get_weights() for part in parts]

    def train():
        noise, real = elastic_share(gan_data(FEW))
        step = tf.function(gan.train_step)
        for begin in range(0, len(noise), 4):
            gan.generator(noise[begin : begin + 4], training=True)
            step((tf.constant(noise[begin : begin + 4]), tf.constant(real[begin : begin + 4])))

    discriminator, generator = made
    discriminator.run(train, others=[generator], models=parts, on_failure=lambda: None)
    assert mean.numpy().any()
    for part, start in zip(parts, starts, strict=True):
        same_on_all_ranks(part.get_weights(), wire)
        assert models.digest(part.get_weights()) != models.digest(start)
    assert [int(optimizer.iterations) for optimizer in made] == [6, 6]

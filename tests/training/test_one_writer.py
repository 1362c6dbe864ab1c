"""If ranks share a path, only one of them runs Keras's callbacks that write files."""

import json
import os

import keras
import numpy as np
import pytest

import keras_callbacks
import tfposeidon as tp
from tests.helpers import models
from tests.helpers.checks import LogLines, Raises
from tests.helpers.models import same_on_all_ranks
from tests.helpers.over_ranks import exchange_objects
from tfposeidon.local.showing import reads_after_batches
from tfposeidon.training import fit_arguments

pytestmark = pytest.mark.ranks("2")


@pytest.fixture
def folder(tmp_path, wire):
    """Returns a folder that all ranks share."""
    return exchange_objects(str(tmp_path), wire, "folder")[0]


def _compiled(rate=0.1):
    model = models.mlp()
    model.compile(tp.DistributedOptimizer(keras.optimizers.SGD(rate)), models.LOSS)
    return model


def _fit(model, wire, *callbacks, epochs=2):
    mine = models.share(models.mlp.data(16), 8, wire.topology)
    average = keras_callbacks.MetricAverage()
    return model.fit(*mine, batch_size=4, epochs=epochs, verbose=0, callbacks=[average, *callbacks])


def test_files_are_written_once(wire, folder):
    model = _compiled()
    with LogLines() as lines:
        _fit(
            model,
            wire,
            keras.callbacks.ModelCheckpoint(f"{folder}/best.keras", "loss", save_best_only=True),
            keras.callbacks.CSVLogger(f"{folder}/log.csv"),
            keras.callbacks.TensorBoard(f"{folder}/board"),
            keras.callbacks.CSVLogger(f"{folder}/log-{wire.topology.rank}.csv"),
        )
    tp.barrier()
    loaded = keras.models.load_model(f"{folder}/best.keras")
    for one, other in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    for name in ("log", "log-0", "log-1"):
        with open(f"{folder}/{name}.csv") as file:
            assert [line.partition(",")[0] for line in file] == ["epoch", "0", "1"]
    said = [line for line in lines if "only rank 0 writes" in line]
    assert len(said) == (3 if wire.topology.rank == 0 else 0)


@pytest.mark.parametrize(("save_freq", "first"), [("epoch", 2), (1, 1)])
def test_all_ranks_resume_from_the_backup_of_one_rank(wire, folder, save_freq, first):
    """The backup is that of the last epoch, or of the last batch."""

    class Interrupted(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise InterruptedError

    def backup():
        return keras.callbacks.BackupAndRestore(f"{folder}/b", save_freq=save_freq)

    model = _compiled()
    with Raises(InterruptedError, ""):
        _fit(model, wire, backup(), Interrupted(), epochs=4)
    weights = model.get_weights()
    tp.barrier()
    keras.utils.set_random_seed(8 + wire.topology.rank)
    resumed, begun = _compiled(), []
    record = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: begun.append((epoch, resumed.get_weights()))
    )
    # The resumed run continues from the state of the first run.
    _fit(resumed, wire, backup(), record, epochs=4)
    assert [epoch for epoch, _ in begun] == list(range(first, 4))
    for one, other in zip(begun[0][1], weights, strict=True):
        np.testing.assert_array_equal(one, other)
    same_on_all_ranks(resumed.get_weights(), wire)
    # A remaining backup would end the next run immediately.
    assert not os.path.exists(f"{folder}/b")


def test_ranks_with_local_weights_resume_from_the_backup(wire, folder):
    """Each rank resumes the state of its own inner optimizer."""

    def fit(epochs):
        model = models.mlp()
        model.compile(tp.LocalUpdates(keras.optimizers.Adam(0.01), sync_every=2), models.LOSS)
        backup = keras.callbacks.BackupAndRestore(f"{folder}/b", delete_checkpoint=False)
        _fit(model, wire, backup, epochs=epochs)
        return model.optimizer.inner_optimizer

    fit(2)
    tp.barrier()
    assert int(fit(4).iterations) == 8


def test_one_rank_saves_with_orbax(wire):
    """Orbax is not installed, so the callback is created without it."""
    callback = keras.callbacks.OrbaxCheckpoint.__new__(keras.callbacks.OrbaxCheckpoint)
    callback.directory, callback.save_freq = "/nowhere", 2
    kept = fit_arguments.with_one_writer([callback])
    assert kept == ([callback] if wire.topology.rank == 0 else [])
    assert reads_after_batches(callback)


def test_overridden_methods_of_callbacks_run(wire, folder):
    class Noted(keras.callbacks.ModelCheckpoint):
        def on_epoch_end(self, epoch, logs=None):
            noted.append(epoch)

    noted = []
    _fit(_compiled(), wire, Noted(f"{folder}/noted.keras"))
    assert noted == [0, 1]


def test_saving_on_all_ranks_logs_a_warning(wire, folder):
    model = _compiled()
    _fit(model, wire)
    # Allow the warning again, because an earlier test in this job may have caused it.
    fit_arguments.warn_if_all_save.cache_clear()
    with LogLines() as lines:
        for _ in range(2):
            model.save(f"{folder}/{wire.topology.rank}.keras")
    said = [line for line in lines if "rank 1 saves" in line and "tp.rank() == 0" in line]
    assert len(said) == (wire.topology.rank == 1), lines


def test_fit_accepts_a_callback_list_of_keras(wire):
    """The ranks have different numbers of batches."""
    model = _compiled()
    count = 16 if wire.topology.rank == 0 else 8
    callbacks = keras.callbacks.CallbackList(
        [keras_callbacks.MetricAverage()], add_history=True, model=model, epochs=2, steps=None
    )
    x, y = models.mlp.data(count)
    history = model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=callbacks)
    assert int(model.optimizer.iterations) == 4
    assert len(history.history["loss"]) == 2
    same_on_all_ranks(model.get_weights(), wire)
    model.fit(x, y, verbose=0, callbacks=keras_callbacks.MetricAverage())
    model.fit(x, y, verbose=0, callbacks=None)


def test_arrays_in_logs_are_averaged(wire):
    class Adds(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs |= {"of classes": np.array([1.0, 3.0]) * wire.topology.rank, "text": "as it is"}
            logs |= {"nothing": None}

    model = models.mlp()
    model.compile(
        tp.DistributedOptimizer(keras.optimizers.SGD(0.1)),
        "categorical_crossentropy",
        metrics=[keras.metrics.F1Score(average=None)],
    )
    x, y = models.share(models.mlp.data(16), 8, wire.topology)
    history = model.fit(
        x,
        keras.utils.to_categorical(y, models.CLASSES),
        batch_size=4,
        verbose=0,
        callbacks=[Adds(), keras_callbacks.MetricAverage()],
    ).history
    assert history["of classes"][0].tolist() == [0.5, 1.5]
    assert (history["text"], history["nothing"]) == (["as it is"], [None])
    scores = exchange_objects(history["f1_score"][0].tolist(), wire, "scores")
    assert scores[0] == scores[1]
    assert len(scores[0]) == models.CLASSES
    json.dumps(scores)


def test_logs_of_different_shapes_are_refused(wire):
    class Adds(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["odd"] = np.zeros(1 + wire.topology.rank)

    with Raises(RuntimeError, r"same shape of metric 'odd'. Received: \(1,\) on rank 0, \(2,\)"):
        model = _compiled()
        mine = models.share(models.mlp.data(16), 8, wire.topology)
        model.fit(*mine, verbose=0, callbacks=[Adds(), keras_callbacks.MetricAverage()])

"""Resumed runs on two ranks equal uninterrupted runs."""

import json
import os
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_callbacks
import tfposeidon as tp
from tests import phased
from tests.helpers import models
from tests.helpers.callbacks import SGD, compiled, noisy, shared_folder
from tests.helpers.checkpoints import (
    BATCHES,
    BETWEEN_AND_WITHIN,
    EVERY_STEP,
    check_resumes,
    checkpoint_job,
    saved_state,
)
from tests.helpers.checks import LogLines, Raises
from tests.helpers.over_ranks import exchange_objects
from tests.helpers.training import sgd
from tfposeidon.state import snapshots

pytestmark = pytest.mark.ranks("2")
SPARSE = tp.schemes.TopK(density=0.05, min_elements=0)


def test_runs_resume_at_every_step(wire):
    check_resumes(wire, noisy, sgd, stops=EVERY_STEP)


def test_runs_resume_in_every_phase(wire):
    """Images, batches and schemes change, and ranks have moving statistics and their own seeds."""
    phases = [
        keras_callbacks.Phase(epochs=1, size=6, batch=4, scheme=SPARSE),
        keras_callbacks.Phase(epochs=1, size=8, batch=2, scheme="torus2d"),
    ]

    def job(folder, every_n_steps=None):
        model = phased.compiled(scheme=SPARSE)
        resize = keras_callbacks.ProgressiveResize(phases, learning_rate=lambda e: 0.1 / (1 + e))
        checkpoint = keras_callbacks.Checkpoint(folder, every_n_steps=every_n_steps, keep=100)
        phased.train(model, resize, checkpoint, [keras_callbacks.BroadcastVariables()])
        return model

    folder = shared_folder(wire)
    whole = job(os.path.join(folder, "whole"), every_n_steps=1)
    names = sorted(os.listdir(os.path.join(folder, "whole")))
    assert len(names) == 2 * BATCHES + 2
    # Resume in each phase, between the two phases, and after the last batch.
    for name in (names[1], names[BATCHES], names[-2]):
        target = os.path.join(folder, f"from-{name}")
        if wire.topology.rank == 0:
            shutil.copytree(os.path.join(folder, "whole", name), os.path.join(target, name))
        exchange_objects(None, wire, "copied")
        for a, b in zip(saved_state(job(target)), saved_state(whole), strict=True):
            np.testing.assert_array_equal(a, b, f"resumed from {name}")
    if wire.topology.rank == 0:
        shutil.rmtree(folder)


def test_runs_resume_after_the_last_batch_of_an_epoch(wire):
    """The callback makes ranks check for exhausted input, also in an epoch without steps."""
    watching = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    folder = shared_folder(wire)
    whole, _ = checkpoint_job(
        models.mlp, os.path.join(folder, "whole"), sgd, [watching], every_n_steps=1
    )
    name = sorted(os.listdir(os.path.join(folder, "whole")))[BATCHES - 1]
    target = os.path.join(folder, "from")
    if wire.topology.rank == 0:
        shutil.copytree(os.path.join(folder, "whole", name), os.path.join(target, name))
    exchange_objects(None, wire, "copied")
    resumed, _ = checkpoint_job(models.mlp, target, sgd, [watching])
    for a, b in zip(saved_state(resumed), saved_state(whole), strict=True):
        np.testing.assert_array_equal(a, b)
    if wire.topology.rank == 0:
        shutil.rmtree(folder)


def test_runs_resume_with_a_schedule_that_starts_at_zero(wire):
    schedule = keras_callbacks.LearningRateSchedule(0.1, lambda epoch: epoch / 2, staircase=False)
    check_resumes(wire, models.mlp, sgd, callbacks=[schedule])


def test_a_fit_after_a_resumed_fit_starts_at_epoch_0(wire):
    folder = shared_folder(wire)
    checkpoint_job(models.mlp, folder, sgd, epochs=1)
    model, _ = checkpoint_job(models.mlp, folder, sgd, epochs=2)
    history = model.fit(*models.mlp.data(8), batch_size=4, epochs=2, verbose=0)
    assert len(history.epoch) == 2
    exchange_objects(None, wire, "done")
    if wire.topology.rank == 0:
        shutil.rmtree(folder)


def _drop_newest(folder, wire):
    """Removes the snapshot of an epoch's end, so that a run resumes from the previous snapshot."""
    exchange_objects(None, wire, "saved")
    if wire.topology.rank == 0:
        shutil.rmtree(sorted(Path(folder).iterdir())[-1])
    exchange_objects(None, wire, "the newest is gone")


class ByParts(keras.Sequential):
    """Updates its layers separately, one after the other."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x, y, predicted)
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        if not self.optimizer.built:
            self.optimizer.build(variables)
        for part in (slice(0, 2), slice(2, 4)):
            self.optimizer.apply(gradients[part], variables[part])
        return self.compute_metrics(x, y, predicted)


def test_runs_resume_if_a_step_updates_layers_separately(wire):
    """The residual of each layer is restored to the exchange of this layer."""
    check_resumes(wire, lambda: ByParts(models.mlp().layers), sgd, scheme=SPARSE)


def test_runs_resume_after_a_partial_last_execution(wire):
    def make():
        keras.utils.set_random_seed(5)
        return compiled(models.mlp, sgd(), steps_per_execution=2)

    folder = shared_folder(wire)
    checkpoint_job(models.mlp, folder, sgd, every_n_steps=4, epochs=1, model=make())
    _drop_newest(folder, wire)
    resumed, _ = checkpoint_job(models.mlp, folder, sgd, epochs=2, model=make())
    assert int(resumed.optimizer.iterations) == 2 * BATCHES
    exchange_objects(None, wire, "done")
    if wire.topology.rank == 0:
        shutil.rmtree(folder)


def test_eager_runs_resume_with_their_metrics(wire):
    """`fit` builds metrics before the first step, so that it can restore their values."""
    folder = shared_folder(wire)

    def job(**options):
        model = compiled(models.mlp, sgd(), metrics=["accuracy"], run_eagerly=True)
        return checkpoint_job(models.mlp, folder, sgd, model=model, **options)

    _, whole = job(every_n_steps=1, epochs=1)
    _drop_newest(folder, wire)
    resumed, history = job(epochs=2)
    assert int(resumed.optimizer.iterations) == 2 * BATCHES
    assert history["accuracy"][0] == whole["accuracy"][0]
    exchange_objects(None, wire, "done")
    if wire.topology.rank == 0:
        shutil.rmtree(folder)


def test_runs_resume_with_accumulation(wire):
    def accumulating():
        return SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)

    check_resumes(wire, models.mlp, accumulating, batches=3, stops=BETWEEN_AND_WITHIN)


def test_a_full_disk_preserves_the_last_snapshot(wire):
    folder = shared_folder(wire)
    original = snapshots.save_arrays
    calls = []

    def save(path, arrays):
        calls.append(path)
        if wire.topology.rank == 1 and len(calls) == 3:
            raise OSError(28, "No space left on device")
        original(path, arrays)

    snapshots.save_arrays = save
    try:
        with Raises(
            snapshots.SnapshotError,
            "rank 1: OSError.*No space left.*last complete snapshot is snapshot-000002",
        ):
            checkpoint_job(models.mlp, folder, sgd, epochs=4)
    finally:
        snapshots.save_arrays = original
    resumed, _ = checkpoint_job(models.mlp, folder, sgd, epochs=4)
    assert int(resumed.optimizer.iterations) == 4 * BATCHES
    assert not [name for name in os.listdir(folder) if name.startswith(".")]
    exchange_objects(None, wire, "done")
    if wire.topology.rank == 0:
        shutil.rmtree(folder)


def _spoil(folder, wire, cut):
    """Damages the file of rank 1 in the newest snapshot."""
    newest = sorted(os.listdir(folder))[-1]
    exchange_objects(None, wire, "listed")
    if wire.topology.rank == 1:
        path = os.path.join(folder, newest, "rank-1.npz")
        with open(path, "r+b") as stream:
            content = bytearray(stream.read())
            if cut:
                stream.truncate(len(content) // 2)
            else:
                for place in range(len(content) // 3, 2 * len(content) // 3):
                    content[place] ^= 1
                stream.seek(0)
                stream.write(content)
    exchange_objects(None, wire, "spoiled")


def test_damaged_snapshots_are_skipped(wire):
    saved, resumed = shared_folder(wire), None
    checkpoint_job(noisy, saved, sgd, epochs=2)
    for cut in (True, False):
        folder = os.path.join(saved, f"cut-{cut}")
        if wire.topology.rank == 0:
            shutil.copytree(saved, folder, ignore=shutil.ignore_patterns("cut-*"))
        exchange_objects(None, wire, "copied")
        _spoil(folder, wire, cut)
        resumed, rest = checkpoint_job(noisy, folder, sgd, epochs=3, model=resumed)
        assert len(rest["loss"]) == 2, "the run must resume at the end of the first epoch"
        assert int(resumed.optimizer.iterations) == 3 * BATCHES
    exchange_objects(None, wire, "done")
    if wire.topology.rank == 0:
        shutil.rmtree(saved)


def test_a_checkpoint_of_another_model_is_refused(wire):
    folder = shared_folder(wire)
    checkpoint_job(models.mlp, folder, sgd, epochs=1)
    with Raises(
        snapshots.SnapshotError,
        "must match the model and its optimizers. Received: variable 0: .*20, 24.*20, 16",
    ):
        checkpoint_job(noisy, folder, sgd)
    exchange_objects(None, wire, "done")
    if wire.topology.rank == 0:
        shutil.rmtree(folder)


def test_a_snapshot_within_an_epoch_of_other_samples_is_refused(wire):
    """The number of ranks or of steps per epoch differs from that of the snapshot.

    With resume="epoch", the epoch restarts.
    """
    folder = shared_folder(wire)
    model, _ = checkpoint_job(noisy, folder, sgd, every_n_steps=1)
    for saved in sorted(Path(folder).iterdir()) if wire.topology.rank == 0 else ():
        meta = json.loads((saved / "meta.json").read_text()) if saved.is_dir() else {}
        if [meta.get("epoch"), meta.get("batches")] != [1, 2]:
            shutil.rmtree(saved) if saved.is_dir() else saved.unlink()
            continue
        meta |= {"nodes": [[0, 1], [2]]}
        (saved / "meta.json").write_text(json.dumps(meta))
        shutil.copy(saved / "rank-1.npz", saved / "rank-2.npz")
    exchange_objects(None, wire, "changed")
    with Raises(
        snapshots.SnapshotError,
        r"snapshot at batch 2 with 3 ranks in .*, and 2 in this run.*=\"epoch\"",
    ):
        checkpoint_job(noisy, folder, sgd)
    with Raises(
        snapshots.SnapshotError, "with 3 steps per epoch in .*, and 4 in this run.*CachePosition"
    ):
        checkpoint_job(noisy, folder, sgd, batches=4, callbacks=[_Positioned()])
    begun = []
    record = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: begun.append(
            (epoch, model.optimizer.iterations.numpy())
        ),
        on_train_batch_end=lambda batch, logs: begun.append(batch),
    )
    checkpoint_job(noisy, folder, sgd, model=model, callbacks=[record], resume="epoch")
    assert [step for step in begun if not isinstance(step, tuple)] == [0, 1, 2]
    assert begun[0] == (1, 5)
    # The snapshot of the end of this epoch has the current number of ranks.
    checkpoint_job(noisy, folder, sgd, model=model, epochs=3)
    exchange_objects(None, wire, "done")
    if wire.topology.rank == 0:
        shutil.rmtree(folder)


def test_shuffling_by_fit_is_logged(wire):
    """`fit` shuffles arrays and `PyDataset`s unless it receives shuffle=False."""
    x, y = models.mlp.data(16)
    arrays, batches = (x, y), (models.Batches(x, y, 4),)
    ordered = (tf.data.Dataset.from_tensor_slices((x, y)).batch(4),)
    model = models.mlp()
    model.compile(tp.DistributedOptimizer(sgd()), models.LOSS)
    for data, options, is_told in (
        (arrays, {"batch_size": 4}, True),
        (batches, {}, True),
        (arrays, {"batch_size": 4, "shuffle": False}, False),
        (ordered, {}, False),
    ):
        folder = shared_folder(wire)
        checkpoint = keras_callbacks.Checkpoint(folder, every_n_steps=3)
        model.fit(*data, verbose=0, callbacks=[checkpoint], **options)
        _drop_newest(folder, wire)
        with LogLines() as lines:
            model.fit(*data, verbose=0, callbacks=[keras_callbacks.Checkpoint(folder)], **options)
        said = [line for line in lines if "shuffles the data in another order" in line]
        assert len(said) == (is_told and wire.topology.rank == 0), lines
        exchange_objects(None, wire, "done")
        if wire.topology.rank == 0:
            shutil.rmtree(folder)


class _Positioned(keras.callbacks.Callback):
    """Declares, like `CachePosition`, that all ranks share one order of batches."""

    knows_position = True

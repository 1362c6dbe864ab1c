"""Tests `LocalUpdates` in `fit`: weights in callbacks, stops, and refused features."""

import os
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_callbacks
import tfposeidon as tp
from tests.helpers import models
from tests.helpers.callbacks import shared_folder
from tests.helpers.checks import LogLines, Raises
from tests.helpers.local_updates import (
    EVERY,
    SPARSE,
    SpoilsStatistics,
    batch_norm,
    fitted,
    hidden,
    own_weights,
    sgd,
)
from tests.helpers.models import same_on_all_ranks
from tests.helpers.over_ranks import exchange_objects
from tests.helpers.training import BATCH, check_equal
from tfposeidon.state import snapshots

pytestmark = pytest.mark.ranks("2", job="local")


class Looking(keras.callbacks.ModelCheckpoint):
    """Saves within epochs, and records weights in each step and at the end of each epoch.

    Its base class, a callback of Keras, acts only at the end of epochs.
    """

    def __init__(self, path):
        super().__init__(path)
        self.path, self.saved, self.seen, self.ends = path, [], [], []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(self.model.get_weights())
        self.model.save(self.path)
        self.saved.append(keras.saving.load_model(self.path).get_weights())

    def on_epoch_end(self, epoch, logs=None):
        self.ends.append(self.model.get_weights())


def test_global_weights_are_saved_and_evaluated(wire):
    data, start = models.mlp.data(7 * BATCH), models.mlp()
    undisturbed = fitted(
        models.mlp,
        start,
        data,
        wire,
        tp.LocalUpdates(sgd(), EVERY, "elastic"),
        epochs=2,
    )
    looking = Looking(os.path.join(shared_folder(wire), f"{wire.topology.rank}.keras"))
    best = keras.callbacks.EarlyStopping(
        "val_loss", patience=5, restore_best_weights=True, start_from_epoch=5
    )
    local = {"validation_data": data, "callbacks": [looking, best]}
    optimizer = tp.LocalUpdates(sgd(), EVERY, "elastic")
    model = fitted(models.mlp, start, data, wire, optimizer, epochs=2, **local)
    for weights in (*looking.saved, *looking.seen, *looking.ends, model.get_weights()):
        same_on_all_ranks(weights, wire)
    own = exchange_objects(models.digest(own_weights(model)), wire, "own")
    assert len(set(own)) == wire.topology.size
    # The callbacks do not change training.
    assert models.digest(model.get_weights()) == models.digest(undisturbed.get_weights())
    moved = [np.abs(a - b).max() for a, b in zip(looking.saved[0], looking.saved[-1], strict=True)]
    assert max(moved) > 0


def test_ranks_continue_from_assigned_weights(wire):
    data, start = models.mlp.data(6 * BATCH), models.mlp()
    model = fitted(models.mlp, start, data, wire, tp.LocalUpdates(sgd(), EVERY))
    model.set_weights([np.zeros_like(w) for w in model.get_weights()])
    local = BATCH // wire.topology.size
    again = [part[:local] for part in models.share(data, BATCH, wire.topology)]
    model.fit(*again, batch_size=local, shuffle=False, verbose=0)
    # After one step without a synchronization, the global weights are the assigned weights.
    assert not any(np.any(w) for w in model.get_weights())


class Stops(keras.callbacks.Callback):
    """Stops the second rank in the middle of the second epoch."""

    def __init__(self):
        super().__init__()
        self.epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch, tp.rank()) == (1, 1, 1):
            self.model.stop_training = True


def test_a_stop_within_an_epoch_stops_all_ranks_at_its_end(wire):
    """The callbacks of both cases communicate in batch hooks."""
    data, start = models.mlp.data(5 * BATCH), models.mlp()
    folder = shared_folder(wire)
    options = {"epochs": 4, "validation_data": data}
    for callbacks in (
        [keras_callbacks.Checkpoint(os.path.join(folder, "steps"), every_n_steps=2)],
        [keras_callbacks.ReplicaCheck(1), keras.callbacks.TerminateOnNaN()],
    ):
        optimizer = tp.LocalUpdates(sgd(), EVERY, "elastic")
        callbacks = [Stops(), *callbacks]
        model = fitted(models.mlp, start, data, wire, optimizer, callbacks=callbacks, **options)
        assert model.history.epoch == [0, 1]
        # All ranks executed every step, without an additional synchronization.
        assert int(optimizer.iterations) == 10
        assert int(optimizer.variables[0].numpy()) == 10 // EVERY
        same_on_all_ranks(model.get_weights(), wire)
    exchange_objects(None, wire, "done")
    if wire.topology.rank == 0:
        shutil.rmtree(folder)


class Assigns(keras.callbacks.Callback):
    """Sets all weights to a number between the first epoch and the second."""

    def __init__(self, number, begins=False):
        super().__init__()
        self.number, self.begins = number, begins

    def _assign(self):
        self.model.set_weights([np.full_like(w, self.number) for w in self.model.get_weights()])

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1 and self.begins:
            self._assign()

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0 and not self.begins:
            self._assign()


def test_ranks_continue_from_weights_assigned_between_epochs(wire):
    """Earlier training and residuals do not affect the assigned weights."""
    data, start = models.mlp.data(7 * BATCH), models.mlp()
    share, assigned = models.share(data, BATCH, wire.topology), models.copy(models.mlp, start)
    assigned.set_weights([np.full_like(w, 0.1) for w in start.get_weights()])
    # Neither optimizer has momentum, because its velocity would be retained.
    plain = keras.optimizers.SGD
    for make, begins in (
        (lambda: tp.LocalUpdates(plain(0.05), EVERY, "elastic"), True),
        (
            lambda: tp.LocalUpdates(
                plain(0.05), EVERY, tp.local.Outer(plain(0.7)), SPARSE, overlap_steps=1
            ),
            False,
        ),
    ):

        def trained(begin, make=make, **fit):
            return fitted(models.mlp, begin, data, wire, make(), **fit)

        found = trained(start, epochs=2, callbacks=[Assigns(0.1, begins)])
        expected = trained(assigned)
        assert models.digest(found.get_weights()) == models.digest(expected.get_weights())
        assert models.digest(own_weights(found)) == models.digest(own_weights(expected))
    # If weights are assigned at the end of the last epoch, the next `fit` continues from them.
    found = trained(start, callbacks=[Assigns(0.1)])
    found.fit(*share, batch_size=BATCH // wire.topology.size, shuffle=False, verbose=0)
    assert models.digest(found.get_weights()) == models.digest(expected.get_weights())
    with Raises(RuntimeError, "All ranks must hold the same weights"):
        trained(start, epochs=2, callbacks=[Assigns(float(wire.topology.rank))])


def test_runs_resume_from_assigned_weights(wire):
    """A run that resumes at or after the assignment equals the uninterrupted run."""
    data, start = models.mlp.data(7 * BATCH), models.mlp()
    for begins in (False, True):
        _check_resumes_as_assigned(wire, data, start, begins)


def _check_resumes_as_assigned(wire, data, start, begins):
    folder = shared_folder(wire)

    def trained(name, epochs):
        callbacks = [Assigns(0.1, begins), keras_callbacks.Checkpoint(os.path.join(folder, name))]
        made = tp.LocalUpdates(sgd(), EVERY, "elastic")
        keras.utils.clear_session(free_memory=False)
        model = fitted(models.mlp, start, data, wire, made, epochs=epochs, callbacks=callbacks)
        return [*model.get_weights(), *own_weights(model)]

    whole = trained("whole", 2)
    trained("parts", 1)
    assert models.digest(trained("parts", 2)) == models.digest(whole)
    exchange_objects(None, wire, "done")
    if wire.topology.rank == 0:
        shutil.rmtree(folder)


def test_a_rank_without_batches_receives_assigned_weights(wire):
    """The rank has no batch in the next epoch, and had non-finite weights before."""
    x, y = models.mlp.data(32)
    epochs = []

    def batches():
        epochs.append(None)
        count = 0 if wire.topology.rank == 1 and len(epochs) == 2 else 4
        yield from ((x[4 * i : 4 * i + 4], y[4 * i : 4 * i + 4]) for i in range(count))

    signature = (tf.TensorSpec([None, 20]), tf.TensorSpec([None], tf.as_dtype(y.dtype)))
    data = tf.data.Dataset.from_generator(batches, output_signature=signature)

    class Breaks(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if wire.topology.rank == 1 and epoch == 0:
                with hidden(self.model):
                    self.model.set_weights([w * np.nan for w in self.model.get_weights()])

    # The first op of this model waits for data; otherwise TensorFlow would start a step without
    # data.
    model = batch_norm()
    model.compile(tp.LocalUpdates(sgd(), EVERY), models.LOSS)
    model.fit(data, epochs=3, verbose=0, callbacks=[Breaks(), Assigns(0.1)])
    same_on_all_ranks(model.get_weights(), wire)
    assert all(np.isfinite(w).all() for w in [*model.get_weights(), *own_weights(model)])


def test_custom_loops_restart_from_loaded_weights(wire):
    data, start = models.mlp.data(2 * BATCH), models.mlp()
    folder = shared_folder(wire)
    path = os.path.join(folder, f"{wire.topology.rank}.weights.h5")
    start.save_weights(path)
    share = models.share(data, BATCH, wire.topology)
    for options in ({"sync_every": 4}, {"sync_every": 4, "overlap_steps": 2}):
        model = models.copy(models.mlp, start)
        model.compile(tp.LocalUpdates(sgd(), outer_optimizer="outer", **options), models.LOSS)
        # Before the first step, loaded weights are the start on all ranks.
        model.load_weights(path)
        for _ in range(7):
            model.train_on_batch(*share)
        same_on_all_ranks(model.get_weights(), wire)
        model.load_weights(path)
        with Raises(RuntimeError, "call LocalUpdates.restart_from_weights"):
            model.train_on_batch(*share)
        model.optimizer.restart_from_weights()
        model.train_on_batch(*share)
        with model.optimizer.global_weights():
            assert models.digest(model.get_weights()) == models.digest(start.get_weights())
        for _ in range(5):
            model.train_on_batch(*share)
        with model.optimizer.global_weights():
            same_on_all_ranks(model.get_weights(), wire)
    exchange_objects(None, wire, "done")
    if wire.topology.rank == 0:
        shutil.rmtree(folder)


def test_steps_between_two_fits_continue_from_local_weights(wire):
    """The next `fit` continues from these steps, without a synchronization in between."""
    data, start = models.mlp.data(2 * 11 * BATCH), models.mlp()
    local = BATCH // wire.topology.size
    share = models.share(data, BATCH, wire.topology)
    fit = {"batch_size": local, "shuffle": False, "verbose": 0}

    def parts(begin, end):
        return [part[begin * local : end * local] for part in share]

    whole = models.copy(models.mlp, start)
    whole.compile(tp.LocalUpdates(sgd(), EVERY, "elastic"), models.LOSS)
    whole.fit(*share, **fit)
    model = models.copy(models.mlp, start)
    model.compile(tp.LocalUpdates(sgd(), EVERY, "elastic"), models.LOSS)
    model.fit(*parts(0, 7), **fit)
    for step in range(7, 12):
        model.train_on_batch(*parts(step, step + 1))
    model.fit(*parts(12, 22), **fit)
    assert models.digest(model.get_weights()) == models.digest(whole.get_weights())
    assert models.digest(own_weights(model)) == models.digest(own_weights(whole))
    # After weights are loaded outside of `fit`, the next step continues from them.
    model.set_weights(start.get_weights())
    model.train_on_batch(*parts(0, 1))
    with model.optimizer.global_weights():
        check_equal(model.get_weights(), start.get_weights())


def test_a_first_fit_after_a_loop_continues_from_local_weights(wire):
    """The local weights of the ranks differ, and `fit` does not broadcast those of rank 0."""
    data, start = models.mlp.data(2 * EVERY * BATCH), models.mlp()
    local = BATCH // wire.topology.size
    x, y = models.share(data, BATCH, wire.topology)
    fit = {"batch_size": local, "shuffle": False, "verbose": 0}
    whole, model = (models.copy(models.mlp, start) for _ in range(2))
    for one in (whole, model):
        one.compile(tp.LocalUpdates(sgd(), EVERY), models.LOSS)
    whole.fit(x, y, **fit)
    optimizer = model.optimizer
    for step in range(EVERY + 1):
        rows = slice(step * local, (step + 1) * local)
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x[rows], y[rows], model(x[rows], training=True))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        optimizer.end_step()
    rest = slice((EVERY + 1) * local, None)
    with LogLines() as lines:
        model.fit(x[rest], y[rest], **fit)
    assert not any("All ranks start with" in line for line in lines)
    check_equal(model.get_weights(), whole.get_weights())


def test_snapshots_of_another_inner_optimizer_are_refused(wire):
    """The state of another optimizer may have the same shapes."""
    folder = shared_folder(wire)
    for inner in (keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.RMSprop(1e-3)):
        model = models.mlp()
        model.compile(tp.LocalUpdates(inner, EVERY), models.LOSS)
        saves = keras_callbacks.Checkpoint(folder)
        fit = {"batch_size": 8, "verbose": 0, "callbacks": [saves]}
        if isinstance(inner, keras.optimizers.SGD):
            model.fit(*models.mlp.data(16), **fit)
        else:
            with Raises(snapshots.SnapshotError, "Received: SGD in .*, RMSprop in the model"):
                model.fit(*models.mlp.data(16), **fit)
    exchange_objects(None, wire, "done")
    if wire.topology.rank == 0:
        shutil.rmtree(folder)


def test_features_that_require_synchronous_ranks_are_refused(wire):
    x, y = models.mlp.data(4 * (2 + wire.topology.rank))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4).filter(lambda *_: True)
    model = models.mlp()
    model.compile(tp.LocalUpdates(sgd(), EVERY), models.LOSS)
    folder = shared_folder(wire)
    refused = {
        "Checkpoint.every_n_steps=2.": keras_callbacks.Checkpoint(folder, every_n_steps=2),
        "ReplicaCheck": keras_callbacks.ReplicaCheck(2),
        "a SchemeSchedule": keras_callbacks.SchemeSchedule({0: "alltoall", 1: "torus2d"}),
    }
    for pattern, callback in refused.items():
        with Raises(ValueError, f"at the end of epochs only. Received: {pattern}"):
            model.fit(data, verbose=0, callbacks=[callback])
    model.fit(data, epochs=2, verbose=0, callbacks=[keras_callbacks.Checkpoint(folder)])
    same_on_all_ranks(model.get_weights(), wire)
    sparse = models.mlp()
    sparse.compile(tp.LocalUpdates(sgd(), EVERY, "elastic", SPARSE), models.LOSS)
    with Raises(ValueError, "would otherwise count twice. Received: outer_optimizer=Elastic"):
        sparse.optimizer.build(sparse.trainable_variables)


def test_schemes_change_between_epochs(wire):
    data, start = models.mlp.data(6 * BATCH), models.mlp()
    schedule = keras_callbacks.SchemeSchedule({0: SPARSE, 2: "torus2d"}, verbose=0)
    optimizer = tp.LocalUpdates(sgd(), EVERY, scheme=SPARSE)
    model = fitted(models.mlp, start, data, wire, optimizer, epochs=4, callbacks=[schedule])
    same_on_all_ranks(model.get_weights(), wire)
    assert {bucket.scheme.name for bucket in optimizer.plan.buckets} == {"torus2d"}


class Twice(keras.Model):
    """Trains its only layer with two optimizers in turn."""

    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(1)

    def compile(self, first, second):
        super().compile(loss="mse")
        self.first, self.second = first, second

    def call(self, x):
        return self.layer(x)

    def train_step(self, data):
        x, y = data
        for optimizer in (self.first, self.second):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x))
            weights = self.trainable_weights
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def test_two_global_weights_of_one_variable_are_refused(wire):
    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    for run_eagerly in (False, True):
        model = Twice()
        model.compile(tp.LocalUpdates(sgd(), EVERY), tp.LocalUpdates(sgd(), EVERY, name="second"))
        model.run_eagerly = run_eagerly
        with Raises(
            ValueError, "only one optimizer that synchronizes.*kernel.*'local_updates' and 'second'"
        ):
            model.fit(x, y, batch_size=4, verbose=0)
    # An optimizer that was replaced is no longer part of the model.
    again = models.mlp()
    for _ in range(2):
        again.compile(tp.LocalUpdates(sgd(), 2), models.LOSS)
        again.fit(*models.mlp.data(16), batch_size=4, verbose=0)
    same_on_all_ranks(again.get_weights(), wire)


def test_non_finite_statistics_are_replaced_by_global_statistics(wire):
    """The rank still contributes its weights, and retains its optimizer state."""
    data, start = models.mlp.data(7 * BATCH), batch_norm()
    for options in (
        {"outer_optimizer": "average", "overlap_steps": 1},
        {"outer_optimizer": "elastic", "hierarchical": True},
    ):
        found = []
        for callbacks in ([], [SpoilsStatistics()]):
            optimizer = tp.LocalUpdates(sgd(), EVERY, **options)
            with LogLines() as lines:
                model = fitted(batch_norm, start, data, wire, optimizer, callbacks=callbacks)
            said = [line for line in lines if "statistics of layers of rank 1 are not" in line]
            assert len(said) == (bool(callbacks) and wire.topology.rank == 1), lines
            same_on_all_ranks([v.numpy() for v in model.variables], wire)
            assert all(np.isfinite(v.numpy()).all() for v in model.variables)
            assert all(np.isfinite(w).all() for w in own_weights(model))
            # Training does not depend on the statistics.
            trained = [v.numpy() for v in model.trainable_variables]
            found.append(models.digest(trained))
        assert found[0] == found[1], options


def test_global_statistics_are_initial_before_a_synchronization(wire):
    """Steps and ends of epochs do not change the global statistics."""
    data, start = models.mlp.data(5 * BATCH), batch_norm()
    for compile_options in ({"steps_per_execution": 2}, {"run_eagerly": True}):
        model = models.copy(batch_norm, start)
        model.compile(tp.LocalUpdates(sgd(), sync_every=100), models.LOSS, **compile_options)
        local, share = BATCH // wire.topology.size, models.share(data, BATCH, wire.topology)
        model.fit(*share, batch_size=local, epochs=2, verbose=0)
        assert models.digest(model.get_weights()) == models.digest(start.get_weights())
        model.train_on_batch(*(part[:local] for part in share))
        with model.optimizer.global_weights():
            assert models.digest(model.get_weights()) == models.digest(start.get_weights())

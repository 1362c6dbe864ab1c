"""Tests the state of `LocalUpdates` in files, checkpoints, callbacks and warnings."""

import os
import shutil
import time

import keras
import numpy as np
import pytest

import keras_callbacks
import tfposeidon as tp
from tests.helpers import models
from tests.helpers.automatic import WIDTH, parallel_layers
from tests.helpers.callbacks import shared_folder
from tests.helpers.checks import LogLines, Raises
from tests.helpers.local_updates import EVERY, SPARSE, batch_norm, fitted, hidden, own_weights, sgd
from tests.helpers.models import same_on_all_ranks
from tests.helpers.training import BATCH, check_equal

pytestmark = pytest.mark.ranks("2", job="local")


def test_inner_and_outer_momentum_within_few_steps_logs_a_warning(wire):
    plain, adam = keras.optimizers.SGD, keras.optimizers.Adam
    expected = {
        "few steps": (lambda: tp.LocalUpdates(sgd(), 7, "outer"), True),
        "momentum of Adam": (lambda: tp.LocalUpdates(adam(), 2, "slow_momentum"), True),
        "enough steps": (lambda: tp.LocalUpdates(sgd(), 8, "outer"), False),
        "no inner momentum": (lambda: tp.LocalUpdates(plain(0.1), 2, "outer"), False),
        "no outer momentum": (lambda: tp.LocalUpdates(sgd(), 2, "average"), False),
        "outer optimizer without momentum": (
            lambda: tp.LocalUpdates(sgd(), 2, tp.local.Outer(plain(0.7))),
            False,
        ),
    }
    for name, (make, is_warned) in expected.items():
        model = models.mlp()
        with LogLines() as lines:
            make().build(model.trainable_variables)
        said = [line for line in lines if "fewer than 8 steps between synchronizations" in line]
        assert len(said) == (is_warned and wire.topology.rank == 0), (name, lines)


def test_throughput_reports_the_mean_bytes_of_a_step(wire):
    """Every fourth step has an exchange. In one case, every step also has one within the node."""
    data, start = models.mlp.data(4 * BATCH), models.mlp()
    length = 4 * sum(w.size for w in start.get_weights())
    accumulating = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)
    for optimizer, copies in (
        (tp.DistributedOptimizer(accumulating, "allreduce"), 1 / 4),
        (tp.LocalUpdates(sgd(), sync_every=4), 1 / 4),
        (tp.LocalUpdates(sgd(), sync_every=4, hierarchical=True), 1 + 1 / 4),
    ):
        throughput = keras_callbacks.Throughput()
        model = fitted(models.mlp, start, data, wire, optimizer, callbacks=[throughput])
        shown = 1e6 * model.history.history["megabytes_sent"][-1]
        # Each of two ranks sends half of the values twice.
        np.testing.assert_allclose(shown, copies * length, rtol=0.05)


def test_files_hold_global_weights_and_state_of_the_outer_optimizer(wire):
    """Each rank saves its model and loads the file."""
    data, start = models.mlp.data(7 * BATCH), models.mlp()
    for rule in (tp.local.Outer(), tp.local.SlowMomentum(0.6)):
        model = fitted(models.mlp, start, data, wire, tp.LocalUpdates(sgd(), EVERY, rule))
        folder = shared_folder(wire)
        path = os.path.join(folder, f"{wire.topology.rank}.keras")
        model.save(path)
        loaded = keras.saving.load_model(path)
        own, found = model.optimizer, loaded.optimizer
        assert models.digest(loaded.get_weights()) == models.digest(model.get_weights())
        velocity = [v.numpy() for v in rule.variables]
        assert any(np.abs(v).max() > 0 for v in velocity[2:])
        assert models.digest(velocity) == models.digest([v.numpy() for v in found._outer.variables])
        same_on_all_ranks([v.numpy() for v in found._outer.variables], wire)
        # The optimizer state is that of the rank that saved it.
        slots = [v.numpy() for v in own.inner_optimizer.variables]
        assert models.digest(slots) == models.digest(
            [v.numpy() for v in found.inner_optimizer.variables]
        )
        local = BATCH // wire.topology.size
        loaded.fit(*models.share(data, BATCH, wire.topology), batch_size=local, verbose=0)
        same_on_all_ranks(loaded.get_weights(), wire)
        if wire.topology.rank == 0:
            shutil.rmtree(folder)


class Late(keras.callbacks.Callback):
    """Delays one rank in some steps, as a slow network would.

    Args:
      rank: The rank to delay.
    """

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def on_train_batch_end(self, batch, logs=None):
        if tp.rank() == self.rank and batch % 2:
            time.sleep(0.1)


def test_the_speed_of_ranks_does_not_change_the_weights(wire):
    data, start = models.mlp.data(11 * BATCH), models.mlp()
    found = []
    for late in (0, 1):
        optimizer = tp.LocalUpdates(sgd(), EVERY, "outer", SPARSE, overlap_steps=2)
        model = fitted(models.mlp, start, data, wire, optimizer, callbacks=[Late(late)])
        found.append((models.digest(model.get_weights()), models.digest(own_weights(model))))
    assert len(set(found)) == 1, found


class Spoil(keras.callbacks.Callback):
    """Changes the global weights on one rank, like a faulty machine."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 4 and tp.rank() == 1:
            with hidden(self.model):
                copy = self.model.optimizer._synchronization.weights.copies[0]
                copy.assign(copy + 1.0)


def test_replica_check_compares_global_weights(wire):
    data, start = models.mlp.data(9 * BATCH), models.mlp()

    def run(*callbacks):
        optimizer = tp.LocalUpdates(sgd(), EVERY, "outer", overlap_steps=1)
        return fitted(models.mlp, start, data, wire, optimizer, callbacks=list(callbacks))

    expected = run()
    checked = run(keras_callbacks.ReplicaCheck(1))
    assert models.digest(checked.get_weights()) == models.digest(expected.get_weights())
    assert models.digest(own_weights(checked)) == models.digest(own_weights(expected))
    with Raises(RuntimeError, "After 5 steps: .* '.*dense.*/kernel', .* first of 1 diff"):
        run(Spoil(), keras_callbacks.ReplicaCheck(1))
    keras.utils.clear_session(free_memory=False)
    repaired = run(Spoil(), keras_callbacks.ReplicaCheck(5, action="repair"))
    same_on_all_ranks(repaired.get_weights(), wire)


def test_learning_rates_follow_callbacks(wire):
    """The optimizer of each rank receives the rate, and averaged metrics keep ranks equal."""
    data, start = models.mlp.data(5 * BATCH), models.mlp()
    schedule = keras_callbacks.LearningRateSchedule(0.1, lambda epoch: 1 / (1 + epoch))
    averaged = keras_callbacks.MetricAverage()
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=100.0)
    for callbacks, rate in (([schedule], 0.1 / 3), ([averaged, plateau], 0.05 / 4)):
        optimizer = tp.LocalUpdates(sgd(), EVERY)
        model = fitted(
            models.mlp, start, data, wire, optimizer, epochs=3, callbacks=list(callbacks)
        )
        np.testing.assert_allclose(float(optimizer.learning_rate), rate, rtol=1e-6)
        same_on_all_ranks(model.get_weights(), wire)


def test_ranks_of_a_single_node_train_like_all_reduce(wire):
    """Synchronizations do not change the weights of a single replica."""
    data, start = models.mlp.data(3 * EVERY * BATCH), models.mlp()
    together = fitted(models.mlp, start, data, wire, tp.DistributedOptimizer(sgd(), "allreduce"))
    optimizer = tp.LocalUpdates(sgd(), EVERY, tp.local.Elastic(1.0), hierarchical=True)
    apart = fitted(models.mlp, start, data, wire, optimizer)
    check_equal(apart.get_weights(), together.get_weights())
    assert models.digest(own_weights(apart)) == models.digest(apart.get_weights())


def test_training_that_ends_before_its_first_synchronization_logs_a_warning(wire):
    data, start = models.mlp.data(3 * BATCH), models.mlp()
    for options, is_told in (
        ({"sync_every": 4}, True),
        ({"sync_every": 3, "overlap_steps": 1}, True),
        ({"sync_every": 2, "overlap_steps": 1}, False),
    ):
        with LogLines() as lines:
            model = fitted(models.mlp, start, data, wire, tp.LocalUpdates(sgd(), **options))
        is_as_before = models.digest(model.get_weights()) == models.digest(start.get_weights())
        said = [line for line in lines if "training ended before the first sync" in line]
        assert (is_as_before, len(said)) == (is_told, is_told and wire.topology.rank == 0), lines


def test_weights_of_other_dtypes_are_synchronized(wire):
    data = models.share(models.mlp.data(7 * BATCH), BATCH, wire.topology)
    for policy, options in (
        ("bfloat16", {"outer_optimizer": "outer", "overlap_steps": 1}),
        ("float16", {"scheme": tp.schemes.AllToAll(wire_dtype="float16"), "overlap_steps": 1}),
        ("float64", {"scheme": SPARSE}),
    ):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(5)
        keras.config.set_dtype_policy(policy)
        model = batch_norm()
        start = model.get_weights()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tp.LocalUpdates(sgd(), EVERY, **options), loss)
        model.fit(*data, batch_size=BATCH // wire.topology.size, verbose=0)
        weights = [np.asarray(w, "float64") for w in model.get_weights()]
        same_on_all_ranks(weights, wire)
        assert all(np.isfinite(w).all() for w in weights)
        assert any(np.any(w != before) for w, before in zip(weights, start, strict=True))


def test_residuals_are_sent_before_schemes_change(wire):
    """The gradients do not depend on weights, so the result equals that of a dense scheme."""
    x = np.random.default_rng(wire.topology.rank).normal(size=(36, WIDTH)).astype("float32")
    schedule = keras_callbacks.SchemeSchedule({0: SPARSE, 1: "torus2d"}, verbose=0)
    found = []
    for scheme, callbacks in (
        (SPARSE, []),
        ("torus2d", []),
        (SPARSE, [schedule]),
    ):
        keras.utils.set_random_seed(5)
        model = parallel_layers()
        optimizer = tp.LocalUpdates(keras.optimizers.SGD(0.05), EVERY, scheme=scheme)
        model.compile(optimizer, lambda _, outputs: keras.ops.mean(outputs, axis=-1))
        options = {"batch_size": 6, "epochs": 2, "shuffle": False, "verbose": 0}
        model.fit(x, np.zeros(len(x)), callbacks=callbacks, **options)
        found.append(model.get_weights())
    sparse, dense, flushed = found
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(sparse, dense, strict=True))
    check_equal(flushed, dense)
    late = models.mlp()
    late.compile(tp.LocalUpdates(sgd(), EVERY, scheme=SPARSE, overlap_steps=1), models.LOSS)
    with Raises(ValueError, "must be 0 if the scheme changes. Received: a change from topk"):
        late.fit(*models.mlp.data(24), epochs=2, verbose=0, callbacks=[schedule])

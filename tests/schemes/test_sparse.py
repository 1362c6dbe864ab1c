"""Sparse schemes lose no part of a gradient in real steps, even if rates or schemes change."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_callbacks
import tfposeidon as tp
from tests import contract
from tests.helpers import models
from tests.helpers.checkpoints import check_resumes
from tests.helpers.checks import LogLines, Raises
from tests.helpers.models import rank_variables, same_on_all_ranks
from tests.helpers.training import BATCH, STEPS, check_equal, sgd, train_alone, train_together
from tests.helpers.wait_free import check_independent, traced
from tfposeidon.schemes import HiTopK, TopK

pytestmark = pytest.mark.ranks("2x1")

KINDS = (HiTopK, TopK)
LENGTH = 997


@pytest.mark.ranks("2x2")
def test_sparse_schemes_send_or_retain_each_part_in_graphs(wire):
    """The steps include the warm-up and a flush of the residuals."""
    options = ({"wire_dtype": "float16"}, {"momentum": 0.9, "select": "dgc"}, {"warmup_steps": 2})
    for turn, (kind, more) in enumerate(itertools.product(KINDS, options)):
        scheme = kind(density=0.02, **more)
        # Trace the exchange once, as in training, so that steps differ only in their state.
        compiled = functools.cache(functools.partial(tf.function, autograph=False))
        mean, _ = contract.check_conservation(
            scheme,
            LENGTH,
            wire,
            5,
            f"sparse.{turn}",
            lambda function, *args, compiled=compiled: compiled(function)(*args),
            flush_at=4,
        )
        same_on_all_ranks([mean], wire)


class _Given:
    """Trains a weight on gradients that do not depend on it, so dense SGD's result is known."""

    def __init__(self, wire, scheme, rate, inner=None, initial_scale=None):
        self.wire = wire
        self.weight = keras.Variable(np.zeros(LENGTH, "float32"), name="weight")
        self.expected = np.zeros(LENGTH)
        inner = keras.optimizers.SGD(rate) if inner is None else inner
        self.optimizer = self.outer = tp.DistributedOptimizer(inner, scheme)
        if initial_scale:
            self.outer = keras.optimizers.LossScaleOptimizer(self.optimizer, initial_scale)
        self.step = tf.function(lambda gradient: self.outer.apply([gradient], [self.weight]))
        self.turn = 0

    def go(self, rate, steps, scale=1.0):
        for _ in range(steps):
            everybody = [self._gradient(rank) for rank in range(self.wire.topology.size)]
            self.expected -= rate * np.mean(everybody, axis=0)
            self.step(tf.constant(everybody[self.wire.topology.rank] * np.float32(scale)))
            self.turn += 1

    def check(self):
        """Checks that the weights after a flush are those of dense training."""
        self.optimizer.exchange.flush()
        self.go(0.1, 1)
        np.testing.assert_allclose(self.weight.numpy(), self.expected, atol=1e-5)
        same_on_all_ranks([self.weight.numpy()], self.wire)

    def _gradient(self, rank):
        return np.random.default_rng([self.turn, rank]).normal(size=LENGTH).astype("float32")


def test_a_changed_learning_rate_does_not_change_the_residual(wire):
    for kind in KINDS:
        given = _Given(wire, kind(density=0.02, min_elements=0), 0.1)
        for rate, steps in ((0.1, 3), (0.02, 3), (0.0, 2), (0.3, 3), (0.1, 0)):
            given.optimizer.inner_optimizer.learning_rate.assign(rate)
            given.go(rate, steps)
        assert np.abs(rank_variables(given.optimizer)[1].numpy()).max() > 0
        given.check()


def test_a_changed_loss_scale_does_not_change_the_residual(wire):
    given = _Given(wire, HiTopK(density=0.02, min_elements=0), 0.1, initial_scale=64.0)
    given.go(0.1, 3, scale=64.0)
    # One rank overflows, so all ranks skip the step, and the scale decreases.
    given.step(
        tf.fill([LENGTH], np.float32(np.inf) if wire.topology.rank == 0 else np.float32(1.0))
    )
    assert float(given.outer.dynamic_scale) == 32.0
    given.go(0.1, 3, scale=32.0)
    given.optimizer.exchange.flush()
    given.go(0.1, 1, scale=32.0)
    np.testing.assert_allclose(given.weight.numpy(), given.expected, atol=1e-5)


def test_a_non_finite_step_does_not_change_the_state(wire):
    for kind in KINDS:
        given = _Given(wire, kind(density=0.02, min_elements=0, momentum=0.5), 0.1)
        given.go(0.1, 2)
        before = [v.numpy() for v in rank_variables(given.optimizer)]
        bad = np.ones(LENGTH, "float32")
        bad[3] = np.nan if wire.topology.rank == 1 else 1.0
        given.step(tf.constant(bad))
        for variable, value in zip(rank_variables(given.optimizer), before, strict=True):
            np.testing.assert_array_equal(variable.numpy(), value)
        assert not np.isfinite(given.weight.numpy()).all(), "NaN must reach every rank"


def test_runs_resume_with_momentum_and_warm_up(wire):
    scheme = HiTopK(density=0.05, momentum=0.9, warmup_steps=3, min_elements=0)
    check_resumes(wire, models.mlp, lambda: keras.optimizers.SGD(0.05), scheme=scheme)


@pytest.mark.ranks("2")
def test_runs_resume_under_a_schedule_of_schemes(wire):
    schedule = keras_callbacks.SchemeSchedule({0: TopK(density=0.05, min_elements=0), 1: "torus2d"})
    check_resumes(wire, models.mlp, sgd, callbacks=[schedule])


def test_no_collective_waits_for_another_bucket(wire):
    for kind in KINDS:
        optimizer = tp.DistributedOptimizer(sgd(), scheme=kind(min_elements=0), bucket_bytes=0)
        check_independent(traced(models.mlp(), optimizer, models.mlp.data(4)), 4)


@pytest.mark.ranks("2x2")
def test_a_schedule_of_schemes_loses_no_gradients(wire):
    _check_schedule(wire, steps_per_execution=1, accumulated=3)


def test_a_schedule_of_schemes_loses_no_gradients_with_several_steps_per_execution(wire):
    _check_schedule(wire, steps_per_execution=2, accumulated=None)


def _check_schedule(wire, steps_per_execution, accumulated):
    """Checks the final weights, which show the applied gradients, as the loss is linear in them."""
    x = np.random.default_rng(wire.topology.rank).normal(size=(24, 500)).astype("float32")
    everybody = [
        np.random.default_rng(rank).normal(size=(24, 500)) for rank in range(wire.topology.size)
    ]
    model = keras.Sequential([keras.Input((500,)), keras.layers.Dense(1, use_bias=False)])
    start = model.get_weights()[0]
    model.compile(
        optimizer=tp.DistributedOptimizer(
            keras.optimizers.SGD(0.1, gradient_accumulation_steps=accumulated)
        ),
        loss=lambda _, predicted: tf.reduce_mean(predicted),
        steps_per_execution=steps_per_execution,
    )
    schedule = {
        0: TopK(density=0.01, min_elements=0),
        1: HiTopK(min_elements=0),
        3: "torus2d",
    }
    callbacks = [keras_callbacks.SchemeSchedule(schedule)]
    with LogLines() as lines:
        model.fit(
            x,
            np.zeros(24),
            batch_size=4,
            epochs=4,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )
    assert wire.topology.rank or any("epoch 3 changes the scheme to" in line for line in lines), (
        lines
    )
    assert model.optimizer.plan.buckets[0].scheme == tp.schemes.Torus2D()
    assert not any(piece.members for _, piece in model.optimizer.rank_state), (
        "the torus must have no state"
    )
    expected = start - 0.1 * 4 * 6 / (accumulated or 1) * np.mean(everybody, axis=(0, 1))[:, None]
    np.testing.assert_allclose(model.get_weights()[0], expected, atol=1e-4)


class _WatchingFlushes(keras.callbacks.Callback):
    """Callback with a batch hook, so that ranks check for exhausted input in each step."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        plan, exchange = self.model.optimizer.plan, self.model.optimizer.exchange
        self.seen.append((plan.buckets[0].scheme.name, exchange.has_flushed))


def test_with_exhausted_input_checks_a_schedule_costs_one_dense_step(wire):
    """Only the last step of the epoch before the change is dense, to send the residuals."""
    model, watching = models.mlp(), _WatchingFlushes()
    scheme = TopK(density=0.05, min_elements=0)
    model.compile(optimizer=tp.DistributedOptimizer(sgd(), scheme=scheme), loss=models.LOSS)
    schedule = keras_callbacks.SchemeSchedule({0: scheme, 2: "torus2d"})
    data = models.mlp.data(12)
    fit = {"batch_size": 4, "epochs": 3, "shuffle": False, "verbose": 0}
    with LogLines() as lines:
        model.fit(*data, callbacks=[watching, schedule], **fit)
    changes = [line for line in lines if "changes the scheme to" in line]
    expected = [f"tfposeidon: epoch 2 changes the scheme to {tp.schemes.Torus2D()}."]
    assert changes == ([] if wire.topology.rank else expected), lines
    sparse, flushed, dense = ("topk", False), ("topk", True), ("torus2d", True)
    assert watching.seen == [*[sparse] * 5, flushed, *[dense] * 3], watching.seen
    same_on_all_ranks(model.get_weights(), wire)


def test_momentum_correction_at_density_1_equals_momentum(wire):
    """This also holds for small variables, and while the learning rate changes."""
    data = models.mlp.data(STEPS * BATCH)
    start = models.mlp()
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([4], [0.05, 0.02])
    reference = train_alone(
        models.copy(models.mlp, start), data, keras.optimizers.SGD(schedule, momentum=0.9)
    )
    for scheme in (
        HiTopK(momentum=0.9, density=1.0),
        HiTopK(momentum=0.9, min_elements=10**6),
    ):
        optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(schedule), scheme=scheme)
        weights = train_together(models.copy(models.mlp, start), data, optimizer, wire)
        check_equal(weights, reference)


def test_the_callback_corrects_the_momentum_of_schemes(wire):
    """The callback scales the scheme's velocity like that of an optimizer."""
    data = models.mlp.data(STEPS * BATCH)
    start = models.mlp()
    fit = {
        "epochs": 2,
        "callbacks": [
            keras_callbacks.LearningRateSchedule(0.05, lambda epoch: 0.2 if epoch else 1.0)
        ],
    }
    reference = train_alone(
        models.copy(models.mlp, start), data, keras.optimizers.SGD(0.05, momentum=0.9), **fit
    )
    optimizer = tp.DistributedOptimizer(
        keras.optimizers.SGD(0.05), HiTopK(momentum=0.9, density=1.0)
    )
    weights = train_together(models.copy(models.mlp, start), data, optimizer, wire, **fit)
    check_equal(weights, reference)


def test_small_variables_are_sent_densely(wire):
    model = models.mlp()
    optimizer = tp.DistributedOptimizer(sgd(), scheme=HiTopK(min_elements=400))
    optimizer.build(model.trainable_variables)
    schemes = {d.length: b.scheme.name for b in optimizer.plan.buckets for d in b.descriptions}
    assert schemes == {480: "hitopk", 120: "allreduce", 24: "allreduce", 5: "allreduce"}
    assert "fewer than 400 elements for hitopk" in str(optimizer.plan)


def test_the_plan_advises_about_the_optimizer(wire):
    scheme = HiTopK(density=0.02, min_elements=0)
    for inner, advice in (
        (keras.optimizers.Adam(), "Adam is not linear in the gradient"),
        (keras.optimizers.SGD(0.1, momentum=0.9), r"HiTopK\(momentum=0.9\)"),
    ):
        given = _Given(wire, scheme, 0.1, inner)
        with LogLines() as lines:
            given.step(tf.ones(LENGTH))
        assert wire.topology.rank or any(advice.replace("\\", "") in line for line in lines), lines
        assert advice.replace("\\", "") in str(given.optimizer.plan)
    corrected = HiTopK(momentum=0.9, min_elements=0)
    given = _Given(wire, corrected, 0.1, keras.optimizers.SGD(0.1, momentum=0.9))
    with Raises(ValueError, r"optimizer's momentum must be 0.*Use SGD\(momentum=0.0\)"):
        given.step(tf.ones(LENGTH))

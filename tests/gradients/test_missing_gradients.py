"""Tests steps in which only some variables or some ranks have gradients."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfposeidon as tp
from tests.helpers import models
from tests.helpers.checks import Raises
from tests.helpers.models import same_on_all_ranks
from tests.helpers.training import SERVED, distributed

pytestmark = pytest.mark.ranks("2")

SHAPE = (4, 3)
SCHEMES = ("allreduce", "torus2d", "hybcomm", SERVED)


class _Trained:
    """Three variables and an optimizer; each selection of gradients is traced."""

    def __init__(self, optimizer, name, is_eager=False):
        self.optimizer = optimizer
        self.variables = [
            keras.Variable(np.ones(SHAPE, "float32"), name=f"{name}_{place}") for place in range(3)
        ]
        # Run the single-process reference eagerly, because its traces are not under test.
        self._step = self._apply if is_eager else tf.function(self._apply, reduce_retracing=False)

    def _apply(self, gradients, present):
        chosen = [g if there else None for g, there in zip(gradients, present, strict=True)]
        self.optimizer.apply(chosen, self.variables)

    def go(self, gradients, present):
        self._step([tf.constant(g) for g in gradients], tuple(present))

    @property
    def values(self):
        return [variable.numpy() for variable in self.variables]


def _gradients(step, rank):
    random = np.random.default_rng([step, rank])
    return [random.normal(size=SHAPE).astype("float32") for _ in range(3)]


def _check_like_one_process(wire, scheme, presence):
    """Compares with one process; `presence(step, rank)` selects the gradients of a rank."""
    make = lambda: keras.optimizers.AdamW(0.1, weight_decay=0.05)  # noqa: E731
    ours, alone = (
        _Trained(distributed(make(), scheme), "ours"),
        _Trained(make(), "alone", is_eager=True),
    )
    ranks = range(wire.topology.size)
    for step in range(6):
        flags = [presence(step, rank) for rank in ranks]
        given = [
            [g * there for g, there in zip(_gradients(step, r), flags[r], strict=True)]
            for r in ranks
        ]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mine = flags[wire.topology.rank]
            ours.go(given[wire.topology.rank], mine)
        anybody = [any(there) for there in zip(*flags, strict=True)]
        warned = [str(w.message) for w in caught if "Gradients do not exist" in str(w.message)]
        assert not warned or not all(mine)
        alone.go(np.mean(given, axis=0), anybody)
    for mine, theirs in zip(ours.values, alone.values, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6, err_msg=str(scheme))
    same_on_all_ranks(ours.values, wire)


def test_a_gradient_may_disappear_after_some_steps(wire):
    for scheme in ("allreduce", "hybcomm"):
        _check_like_one_process(wire, scheme, lambda step, rank: (True, True, step < 3))


def test_a_gradient_may_appear_after_some_steps(wire):
    for scheme in ("ps", "hybcomm"):
        _check_like_one_process(wire, scheme, lambda step, rank: (True, step >= 2, step >= 4))


def test_heads_may_train_in_turn(wire):
    for scheme in ("ps", "hybcomm"):
        _check_like_one_process(
            wire, scheme, lambda step, rank: (True, step % 2 == 0, step % 2 == 1)
        )


def test_heads_with_residuals_may_train_in_turn(wire):
    """Biases have no residuals, and do not change while a residual of their kernel is sent."""
    scheme = [("kernel", tp.schemes.TopK(density=0.5, min_elements=0)), (".*", "allreduce")]
    optimizer = distributed(keras.optimizers.SGD(1.0), scheme)
    variables = [
        keras.Variable(np.zeros(4, "float32"), name=f"{name}_{head}")
        for head in range(2)
        for name in ("kernel", "bias")
    ]

    @tf.function(reduce_retracing=False)
    def step(head):
        optimizer.apply([tf.ones(4) if i // 2 == head else None for i in range(4)], variables)

    for head in (0, 1, 0, 1, 1, 1):
        step(head)
    for variable, steps in zip(variables, (2, 2, 4, 4), strict=True):
        is_late = variable.name == "kernel_1"
        np.testing.assert_allclose(variable.numpy(), -float(steps), atol=1.0 if is_late else 1e-6)
    same_on_all_ranks([v.numpy() for v in variables], wire)


def test_a_gradient_may_exist_on_one_rank_only(wire):
    for scheme in SCHEMES:
        _check_like_one_process(wire, scheme, lambda step, rank: (True, rank == 0, rank == 1))


def test_keras_warns_of_variables_without_a_gradient(wire):
    trained = _Trained(tp.DistributedOptimizer(keras.optimizers.SGD(0.1)), "warned")
    trained.go(_gradients(0, 0), (True, True, True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained.go(_gradients(1, 0), (True, True, False))
    assert [w for w in caught if "Gradients do not exist for variables" in str(w.message)]


def test_residuals_of_a_sparse_scheme_are_still_sent(wire):
    """A variable without a gradient still sends its whole residual."""
    shape = (64, 32)
    scheme = tp.schemes.TopK(density=0.1, min_elements=0)
    optimizer = distributed(keras.optimizers.SGD(1.0), scheme)
    variables = [
        keras.Variable(np.ones(shape, "float32"), name=f"kept_{place}") for place in range(2)
    ]

    @tf.function(reduce_retracing=False)
    def step(gradients, present):
        optimizer.apply(
            [g if there else None for g, there in zip(gradients, present, strict=True)], variables
        )

    gradients = np.random.default_rng(wire.topology.rank).normal(size=(2, *shape)).astype("float32")
    step([tf.constant(g) for g in gradients], (True, False))
    step([tf.constant(g) for g in gradients[::-1]], (False, True))
    for _ in range(20):
        step([tf.zeros(shape)] * 2, (False, True))
        step([tf.zeros(shape)] * 2, (True, False))
    assert {bucket.scheme for bucket in optimizer.plan.buckets} == {scheme}
    sums = (
        wire.all_reduce(tf.constant(gradients[0].ravel()), wire.topology.world, "kept")
        .numpy()
        .reshape(shape)
    )
    for variable in variables:
        np.testing.assert_allclose(
            variable.numpy(), 1.0 - sums / wire.topology.size, rtol=1e-4, atol=1e-5
        )
    same_on_all_ranks([v.numpy() for v in variables], wire)


def test_regularized_factors_need_gradients_on_all_ranks(wire):
    """Each rank adds weight decay itself, so a rank without the gradient would diverge."""
    model = models.mlp()
    x, y = models.mlp.data(8)
    optimizer = tp.DistributedOptimizer(
        keras.optimizers.SGD(0.1), [("kernel", "factors"), (".*", "allreduce")]
    )

    @tf.function
    def step(x, y, without):
        with tf.GradientTape() as tape:
            loss = models.LOSS(y, model(x, training=True)) + sum(model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(
            [None if place == without else g for place, g in enumerate(gradients)],
            model.trainable_variables,
        )

    step(x, y, -1)
    assert optimizer.plan.buckets[0].descriptions, "the first step must make a plan"
    with Raises(
        tf.errors.InvalidArgumentError,
        "a gradient on all ranks or on none. Received: .*dense/kernel",
    ):
        step(x, y, 0 if wire.topology.rank == 1 else -2)

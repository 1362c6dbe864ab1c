"""Tests schemes with state, with a scheme that sends half the bits and retains the others."""

from dataclasses import dataclass
from typing import ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfposeidon as tp
from tests.helpers import models
from tests.helpers.checkpoints import check_resumes
from tests.helpers.models import rank_variables
from tests.helpers.over_ranks import exchange_objects
from tests.helpers.training import SERVED, sgd
from tests.helpers.wait_free import check_independent, traced
from tfposeidon.schemes import Scheme
from tfposeidon.schemes.base import Slot

pytestmark = pytest.mark.ranks("2")


@dataclass(frozen=True, kw_only=True)
class Rounded(Scheme):
    """All-reduces values rounded to bfloat16, and adds the rest to the next gradient."""

    name: ClassVar[str] = "rounded"

    def slots(self, length, topology):
        return (Slot(name="residual", shape=(length,)),)

    def exchange(self, gradient, state, wire, name):
        wanted = gradient + state[0]
        sent = tf.cast(tf.cast(wanted, tf.bfloat16), tf.float32)
        mean = wire.all_reduce(sent, wire.topology.world, name, scale=1.0 / wire.topology.size)
        return mean, (wanted - sent,)

    def stages(self, length, itemsize, topology):
        return tp.schemes.AllReduce().stages(length, itemsize, topology)


def _step(optimizer, weight, gradient):
    optimizer.apply([tf.constant(gradient)], [weight])


def _made():
    optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(1.0), scheme=Rounded())
    return optimizer, keras.Variable(np.zeros(5, "float32"), name="weight")


def test_updates_and_residuals_sum_to_the_gradients(wire):
    """Over all ranks: sum(gradient + old residual) = ranks x update + sum(new residual)."""
    optimizer, weight = _made()
    step = tf.function(lambda x: optimizer.apply([x], [weight]))
    for turn in range(5):
        gradient = (
            np.random.default_rng([turn, wire.topology.rank]).normal(size=5).astype("float32")
        )
        before, old = (
            weight.numpy(),
            [v.numpy() for v in rank_variables(optimizer)] or [np.zeros(5)],
        )
        step(tf.constant(gradient))
        new = rank_variables(optimizer)[0].numpy()
        update = before - weight.numpy()
        given = np.sum(exchange_objects((gradient + old[0]).tolist(), wire, "given"), axis=0)
        kept = np.sum(exchange_objects(new.tolist(), wire, "kept"), axis=0)
        np.testing.assert_allclose(given, wire.topology.size * update + kept, atol=1e-5)
        assert np.abs(new).max() > 0


def test_a_non_finite_step_does_not_change_the_state(wire):
    optimizer, weight = _made()
    _step(optimizer, weight, np.full(5, 0.3, "float32"))
    before = rank_variables(optimizer)[0].numpy()
    _step(optimizer, weight, np.full(5, np.inf if wire.topology.rank == 1 else 0.7, "float32"))
    np.testing.assert_array_equal(rank_variables(optimizer)[0].numpy(), before)
    assert not np.isfinite(weight.numpy()).any(), "the infinity must reach every rank"


def test_runs_resume_with_scheme_state(wire):
    check_resumes(wire, models.mlp, sgd, scheme=Rounded())


def test_layer_rates_resume_with_sharded_state(wire):
    check_resumes(wire, models.mlp, lambda: tp.optimizers.LAMB(0.01), scheme=SERVED)


def test_no_bucket_waits_for_the_state_of_another(wire):
    optimizer = tp.DistributedOptimizer(sgd(), scheme=Rounded(), bucket_bytes=0)
    check_independent(traced(models.mlp(), optimizer, models.mlp.data(4)), 4)


def test_scheme_state_changes_in_long_executions(wire):
    optimizer = tp.DistributedOptimizer(sgd(), scheme=Rounded(), bucket_bytes=0)
    model = models.mlp()
    model.compile(optimizer=optimizer, loss=models.LOSS, steps_per_execution=2)
    model.fit(*models.mlp.data(16), batch_size=4, verbose=0)
    assert len(rank_variables(optimizer)) == 4 + 2, (
        "one for each bucket, its learning rate, and the gradients seen"
    )
    assert any(np.abs(v.numpy()).max() > 0 for v in rank_variables(optimizer))

"""Samples that ranks weigh by: as expected, and others; what each step sends for them."""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfposeidon as tp
from tests.helpers.models import same_on_all_ranks

pytestmark = pytest.mark.ranks("2")

COUNTS = [(4, 4), (4, 4), (4, 4), (3, 1), (4, 4), (4, 4), (0, 0), (0, 0), (2, 2), (0, 5), (5, 5)]
"""Samples of rank 0 and of rank 1 in each step."""
COLLECTIVES = [3, 2, 2, 4, 3, 2, 4, 3, 3, 4, 3]
"""One for the bucket and one that tells whether samples are as expected; one more that asks for
them after a step in which they were not, and two more that exchange again."""


def _gradient(step, rank):
    values = np.random.default_rng([step, rank]).normal(size=8).astype("float32")
    return values if COUNTS[step][rank] else np.full(8, np.nan, "float32")


def _expected(step):
    total = sum(COUNTS[step])
    parts = [COUNTS[step][rank] * _gradient(step, rank) for rank in range(2) if COUNTS[step][rank]]
    return sum(parts) / total if total else np.zeros(8)


def _steps(optimizer, weight, wire, wrapped):
    """Takes a step for each of the counts, and yields the weights after it."""

    def step(gradient, count):
        optimizer.apply([gradient], [weight], sample_count=count)

    step = tf.function(step) if wrapped else step
    for number, counts in enumerate(COUNTS):
        rank = wire.topology.rank
        step(tf.constant(_gradient(number, rank)), tf.constant(float(counts[rank])))
        yield weight.numpy()


@pytest.mark.parametrize("wrapped", [True, False], ids=["graph", "eager"])
def test_means_are_over_all_samples(wire, wrapped):
    weight, expected = keras.Variable(np.zeros(8, "float32"), name="weight"), np.zeros(8)
    optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(1.0), scheme="allreduce")
    for number, values in enumerate(_steps(optimizer, weight, wire, wrapped)):
        expected = expected - _expected(number)
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6, err_msg=str(number))
        same_on_all_ranks([values], wire)


def test_nothing_is_lost_by_a_scheme_that_keeps_a_residual(wire):
    """Also where a step was exchanged twice: what was sent and what is left are the mean's sum."""
    weight = keras.Variable(np.zeros(8, "float32"), name="weight")
    scheme = tp.schemes.TopK(density=0.5, min_elements=0)
    optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(1.0), scheme=scheme)
    for values in _steps(optimizer, weight, wire, True):
        same_on_all_ranks([values], wire)
    residuals = [v for v, piece in optimizer.rank_state if piece.name == "residual"]
    left = wire.all_reduce(tf.convert_to_tensor(residuals[0]), wire.topology.world, "left").numpy()
    expected = -sum(_expected(number) for number in range(len(COUNTS)))
    np.testing.assert_allclose(weight.numpy() - left / 2, expected, rtol=1e-4, atol=1e-5)


def test_a_step_waits_for_a_count_only_where_samples_change(wire):
    weight = keras.Variable(np.zeros(8, "float32"), name="weight")
    optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(1.0), scheme="allreduce")
    seen, before = [], 0
    with mock.patch.object(wire, "all_reduce", wraps=wire.all_reduce) as spy:
        for _ in _steps(optimizer, weight, wire, False):
            seen.append(spy.call_count - before)
            before = spy.call_count
    assert seen == COLLECTIVES

"""Tests weights by expected and unexpected numbers of samples, and the collectives of each step."""

import contextlib
import re
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfposeidon as tp
from tests.helpers import models
from tests.helpers.models import same_on_all_ranks
from tests.helpers.training import check_equal
from tests.helpers.wait_free import ancestors, bucket_of

pytestmark = pytest.mark.ranks("2")

COUNTS = [(4, 4), (4, 4), (2, 2), (2, 2), (3, 1), (4, 4), (4, 4), (0, 0), (0, 0), (2, 2), (0, 5)]
"""Samples of rank 0 and of rank 1 in each step."""
COLLECTIVES = [3, 2, 3, 2, 4, 3, 2, 4, 3, 3, 4]
"""Number of collectives in each step: one for the bucket, and one that compares sample counts with
the expected counts. If they differ, or after a step with unequal counts, a third one sums samples,
and a fourth one repeats the exchange."""


def _gradient(step, rank):
    values = np.random.default_rng([step, rank]).normal(size=8).astype("float32")
    return values if COUNTS[step][rank] else np.full(8, np.nan, "float32")


def _expected(step):
    total = sum(COUNTS[step])
    parts = [COUNTS[step][rank] * _gradient(step, rank) for rank in range(2) if COUNTS[step][rank]]
    return sum(parts) / total if total else np.zeros(8)


def _steps(optimizer, weight, wire, wrapped):
    """Performs one step for each entry of `COUNTS`, and yields the weights after each step."""

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


def test_a_scheme_with_a_residual_loses_no_gradient(wire):
    """Applied gradients and residuals add up to the mean, also if a step is exchanged twice."""
    weight = keras.Variable(np.zeros(8, "float32"), name="weight")
    scheme = tp.schemes.TopK(density=0.5, min_elements=0)
    optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(1.0), scheme=scheme)
    for values in _steps(optimizer, weight, wire, True):
        same_on_all_ranks([values], wire)
    residuals = [v for v, piece in optimizer.rank_state if piece.name == "residual"]
    left = wire.all_reduce(tf.convert_to_tensor(residuals[0]), wire.topology.world, "left").numpy()
    expected = -sum(_expected(number) for number in range(len(COUNTS)))
    np.testing.assert_allclose(weight.numpy() - left / 2, expected, rtol=1e-4, atol=1e-5)


def test_a_step_waits_for_a_count_only_if_batch_sizes_differ(wire):
    weight = keras.Variable(np.zeros(8, "float32"), name="weight")
    optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(1.0), scheme="allreduce")
    calls, seen = [], []
    with mock.patch.multiple(
        wire,
        all_reduce=mock.Mock(wraps=wire.all_reduce, side_effect=_noted(calls)),
        all_gather=mock.Mock(wraps=wire.all_gather, side_effect=_noted(calls)),
    ):
        # In the first step, ranks also compare their plans, with other collectives.
        optimizer.exchange.exchanger([weight])
        for _ in _steps(optimizer, weight, wire, False):
            seen.append(sum(".bucket" in name or "samples" in name for name in calls))
            calls.clear()
    assert seen == COLLECTIVES


def _noted(calls):
    def note(tensor, group, name, *others, **options):
        calls.append(name)
        return mock.DEFAULT

    return note


def test_no_bucket_waits_for_the_gradient_of_another(wire):
    """The gradient of the last variable in the list need not be the first to exist."""
    weights = [keras.Variable(np.ones((8, 8), "float32"), name=name) for name in "ab"]
    optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(1.0), "allreduce", bucket_bytes=0)

    @tf.function
    def step(first, second):
        optimizer.apply([first, second], weights, sample_count=first[0, 0])

    specification = tf.TensorSpec([8, 8])
    graph = step.get_concrete_function(specification, specification).graph
    inputs = [tensor.op for tensor in graph.inputs[:2]]
    buckets = {name: op for op in graph.get_operations() if (name := bucket_of(op, graph))}
    assert set(buckets) == {"bucket_0", "bucket_1"}
    # The last variable of the list is in the first bucket.
    assert inputs[1] not in ancestors(buckets["bucket_1"], graph)


@contextlib.contextmanager
def _exchanged(wire):
    """Yields a set; when the context ends, it contains the names of the traced collectives."""
    calls, names = [], set()
    with mock.patch.multiple(
        wire,
        all_reduce=mock.Mock(wraps=wire.all_reduce, side_effect=_noted(calls)),
        all_gather=mock.Mock(wraps=wire.all_gather, side_effect=_noted(calls)),
    ):
        yield names
    found = [re.fullmatch(r"tp\d+\.(bucket_.*|.*samples.*)", name) for name in calls]
    names |= {match[1] for match in found if match}


def _fitted(model, rows, wire):
    """Fits a model on a number of samples, and returns the names of the traced collectives."""
    with _exchanged(wire) as names:
        model.fit(*models.mlp.data(rows), batch_size=4, shuffle=False, verbose=0)
    return names


def test_fits_with_equal_batches_count_nothing(wire):
    """Fits with a smaller last batch, and single batches, do exchange numbers of samples."""
    model = models.mlp()
    optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.1), scheme="allreduce")
    model.compile(optimizer, models.LOSS)
    assert _fitted(model, 16, wire) == {"bucket_0"}
    assert _fitted(model, 16, wire) == set()
    assert _fitted(model, 14, wire) == {"all_samples", "samples", "bucket_0"}
    # A single batch follows a fit with equal batches.
    assert _fitted(model, 16, wire) == {"bucket_0"}
    rows = 2 + 4 * wire.topology.rank
    with _exchanged(wire) as names:
        model.train_on_batch(*models.mlp.data(rows))
    assert names == {"all_samples", "samples", "bucket_0"}
    same_on_all_ranks([v.numpy() for v in model.trainable_variables], wire)
    assert _fitted(model, 16, wire) == {"bucket_0"}


class Nested(keras.Sequential):
    """Model whose train step calls a function that keeps its traces."""

    def train_step(self, data):
        return {"loss": self.update(*data)}

    @tf.function
    def update(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return loss


@pytest.mark.parametrize("accumulated", [None, 2])
@pytest.mark.parametrize("eagerly", [False, True])
def test_functions_within_train_steps_always_count_samples(wire, eagerly, accumulated):
    """Keras does not retrace such a function for a later `fit` with unequal batches."""
    model = Nested(models.mlp().layers)
    sgd = keras.optimizers.SGD(0.1, gradient_accumulation_steps=accumulated)
    optimizer = tp.DistributedOptimizer(sgd, scheme="allreduce")
    model.compile(optimizer, models.LOSS, run_eagerly=eagerly)
    assert _fitted(model, 16, wire) > {"bucket_0"}
    _fitted(model, 16 - 2 * wire.topology.rank, wire)
    _fitted(model, 16, wire)
    same_on_all_ranks([v.numpy() for v in model.trainable_variables], wire)


class Signed(Nested):
    """Model whose train step calls a function that has one trace for all sizes of batches."""

    update = tf.function(
        Nested.update.python_function,
        input_signature=[tf.TensorSpec([None, 20]), tf.TensorSpec([None], tf.int64)],
    )

    def train_step(self, data):
        x, y = data
        return super().train_step((x, tf.cast(y, tf.int64)))


@pytest.mark.parametrize("eagerly", [False, True])
def test_one_trace_of_a_function_weights_batches_of_all_sizes(wire, eagerly):
    x, y = models.mlp.data(16)
    start = models.mlp()
    model, alone = (models.copy(models.mlp, start) for _ in range(2))
    model, alone = Signed(model.layers), Signed(alone.layers)
    optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.1), scheme="allreduce")
    model.compile(optimizer, models.LOSS, run_eagerly=eagerly)
    alone.compile(keras.optimizers.SGD(0.1), models.LOSS)
    for of_first in (8, 11, 5, 8):
        mine = slice(0, of_first) if wire.topology.rank == 0 else slice(of_first, 16)
        model.fit(x[mine], y[mine], batch_size=16, verbose=0, shuffle=False)
        alone.fit(x, y, batch_size=16, verbose=0, shuffle=False)
    check_equal(model.get_weights(), alone.get_weights())
    same_on_all_ranks(model.get_weights(), wire)


def test_a_step_with_a_second_call_counts_samples(wire):
    """The second call may lack gradients that the first call has."""

    class Twice(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            first, *others = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply([first, *others], self.trainable_variables)
            self.optimizer.apply([first, *(None for _ in others)], self.trainable_variables)
            return {"loss": loss}

    model = Twice(models.mlp().layers)
    optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.1), scheme="allreduce")
    model.compile(optimizer, models.LOSS)
    assert "samples" in _fitted(model, 16, wire)
    same_on_all_ranks([v.numpy() for v in model.trainable_variables], wire)


def test_a_missing_gradient_is_refused_without_sample_counts(wire):
    model = models.mlp()
    optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.1), scheme="allreduce")
    model.compile(optimizer, models.LOSS)
    _fitted(model, 16, wire)
    exchanger, *_ = optimizer.exchange.exchangers
    with pytest.raises(ValueError, match=r"in every traced step\. Received: None for "):
        exchanger.equal_share([None] * len(exchanger.plan.descriptions))

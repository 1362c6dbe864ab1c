"""Sufficient factors give the same weights as matrices, without a local matrix product."""

import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfposeidon as tp
from benchmarks.baselines import FactorServer
from tests.helpers import models
from tests.helpers.factors import KERNELS, large_table, token_batches
from tests.helpers.models import same_on_all_ranks
from tests.helpers.training import (
    BATCH,
    STEPS,
    adam,
    check_close,
    check_equal,
    sgd,
    train_alone,
    train_together,
)
from tests.helpers.wait_free import ancestors, check_independent, traced
from tfposeidon import policies

pytestmark = pytest.mark.ranks("2x1")
SERVED = [("kernel", FactorServer(server=1)), (".*", "ps")]


@pytest.mark.ranks("2x2")
def test_factors_give_the_same_weights_as_matrices(wire):
    data = models.mlp.data(STEPS * BATCH)
    start = models.mlp()
    reference = train_alone(models.copy(models.mlp, start), data, sgd())
    for rules in (KERNELS, SERVED):
        optimizer = tp.DistributedOptimizer(sgd(), scheme=rules)
        weights = train_together(models.copy(models.mlp, start), data, optimizer, wire)
        check_equal(weights, reference)
        same_on_all_ranks(weights, wire)
        schemes = [bucket.scheme.name for bucket in optimizer.plan.buckets for _ in bucket.members]
        expected = [policies.parse(scheme).scheme.name for _, scheme in rules]
        assert sorted(schemes) == sorted(expected * 2)


def test_embeddings_send_rows(wire):
    start, data = large_table(), token_batches(STEPS * BATCH)
    for make_optimizer, scheme in (
        (adam, "hybcomm"),
        (sgd, [("embeddings", FactorServer()), (".*", "ps")]),
    ):
        reference = train_alone(models.copy(large_table, start), data, make_optimizer())
        optimizer = tp.DistributedOptimizer(make_optimizer(), scheme=scheme)
        weights = train_together(models.copy(large_table, start), data, optimizer, wire)
        check_equal(weights, reference)
        same_on_all_ranks(weights, wire)
        (bucket,) = [b for b in optimizer.plan.buckets if "embeddings" in b.descriptions[0].path]
        assert bucket.scheme.name == ("factors" if scheme == "hybcomm" else "factorserver")
        assert bucket.descriptions[0].structure.rows == 4 * BATCH // wire.topology.size
        assert "sent as a dense matrix" not in str(optimizer.plan)


def test_factors_of_unequal_batches_equal_one_process(wire):
    """Ranks have different numbers of rows and therefore different weights in the mean."""
    x, y = models.mlp.data(40)
    start = models.mlp()
    reference = train_alone(models.copy(models.mlp, start), (x, y), sgd(), batch_size=40)
    model = models.copy(models.mlp, start)
    model.compile(optimizer=tp.DistributedOptimizer(sgd(), scheme=KERNELS), loss=models.LOSS)
    bounds = np.linspace(0, 1, wire.topology.size + 1) ** 2 * 40
    mine = slice(int(bounds[wire.topology.rank]), int(bounds[wire.topology.rank + 1]))
    model.train_on_batch(x[mine], y[mine])
    check_equal(model.get_weights(), reference)
    same_on_all_ranks(model.get_weights(), wire)


@pytest.mark.ranks("2x2")
def test_products_of_many_rows_are_summed_in_the_node(wire):
    """The factors of all rows would be larger than the matrix."""
    x, y = models.mlp.data(64 * wire.topology.size)
    start = models.mlp()
    reference = train_alone(models.copy(models.mlp, start), (x, y), sgd(), batch_size=len(x))
    model = models.copy(models.mlp, start)
    optimizer = tp.DistributedOptimizer(sgd(), scheme=KERNELS)
    model.compile(optimizer=optimizer, loss=models.LOSS)
    mine = slice(64 * wire.topology.rank, 64 * (wire.topology.rank + 1))
    model.fit(x[mine], y[mine], batch_size=64, verbose=0)
    check_equal(model.get_weights(), reference)
    same_on_all_ranks(model.get_weights(), wire)
    assert "factors(sums_in_node=True)" in str(optimizer.plan)


def test_factors_of_half_precision_are_multiplied_in_float32(wire):
    """The optimizer is inside a loss scale, and layers compute in float16."""
    keras.config.set_dtype_policy("mixed_float16")
    data = models.mlp.data(STEPS * BATCH)
    start = models.mlp()
    reference = train_together(
        models.copy(models.mlp, start),
        data,
        tp.DistributedOptimizer(sgd(), scheme="allreduce"),
        wire,
    )
    optimizer = tp.DistributedOptimizer(sgd(), scheme=KERNELS)
    weights = train_together(models.copy(models.mlp, start), data, optimizer, wire)
    same_on_all_ranks(weights, wire)
    sent = [
        d.structure.dtype
        for b in optimizer.plan.buckets
        for d in b.descriptions
        if b.scheme.name == "factors"
    ]
    assert sent == ["float16"] * 2, sent
    check_close(weights, reference, start.get_weights(), 2e-3)


@pytest.mark.ranks("2x2")
def test_the_step_has_no_local_product_and_no_serialized_collective(wire):
    optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.1), scheme=KERNELS, bucket_bytes=0)
    graph = traced(models.mlp(), optimizer, models.mlp.data(4))
    check_independent(graph, 4)
    kept = set().union(
        *(ancestors(op, graph) | {op} for op in graph.get_operations() if op.op_def.is_stateful)
    )
    products = [
        op for op in graph.get_operations() if op.type == "MatMul" and op.get_attr("transpose_a")
    ]
    local = [op for op in products if "gradient_tape" in op.name]
    assert len(local) == 2, [op.name for op in products]
    assert not kept & set(local), "the graph still computes the local product"
    # The exchange adds no further product outside of the branches for few and many rows.
    assert set(products) == set(local)


def test_hybcomm_reports_the_compared_bytes(wire):
    model = models.mlp()
    optimizer = tp.DistributedOptimizer(sgd(), scheme="hybcomm")
    train_together(model, models.mlp.data(STEPS * BATCH), optimizer, wire)
    nodes, k = len(wire.topology.nodes), BATCH // wire.topology.size
    p, k = (nodes, k * len(wire.topology.nodes[0])) if nodes > 1 else (wire.topology.size, k)
    plan = json.loads(optimizer.plan.to_json())
    chosen = {
        "/".join(v["path"].split("/")[-2:]): (b, v) for b in plan["buckets"] for v in b["variables"]
    }
    for layer in model.layers:
        m, n = layer.kernel.shape
        bucket, variable = chosen[f"{layer.name}/kernel"]
        factors, ps = 2 * k * (p - 1) * (m + n), 2 * m * n * (p + p - 2) / p
        assert bucket["scheme"] == ("factors" if factors <= ps else "ps")
        assert variable["candidates"] == {"factors": 4 * factors, "ps": 4 * ps}
        bucket, variable = chosen[f"{layer.name}/bias"]
        assert bucket["scheme"] == "ps"
        assert "not a product of two matrices" in variable["reason"]
    assert f"K={k}, P={p}" in str(optimizer.plan)


def test_gradients_without_factors_are_all_reduced(wire):
    """Examples are the biases of attention and the kernels of convolutions."""
    for build, path, why in (
        (models.attention, "query/bias", "it comes from Sum"),
        (models.cnn, "conv2d.*/kernel", "it comes from Conv2DBackpropFilter"),
    ):
        start, data = build(), build.data(STEPS * BATCH)
        reference = train_alone(models.copy(build, start), data, sgd())
        optimizer = tp.DistributedOptimizer(sgd(), scheme="factors", bucket_bytes=0)
        weights = train_together(models.copy(build, start), data, optimizer, wire)
        check_equal(weights, reference)
        same_on_all_ranks(weights, wire)
        buckets = {bucket.descriptions[0].path: bucket for bucket in optimizer.plan.buckets}
        (without,) = [bucket for name, bucket in buckets.items() if re.search(path, name)]
        assert without.scheme.name == "allreduce"
        assert f"no factors for factors: {why}" in without.choices[0].reason
        assert "factors" in {bucket.scheme.name for bucket in buckets.values()}


def test_a_model_without_any_factors_is_refused(wire):
    model = keras.Sequential(
        [keras.Input((10, 10, 2)), keras.layers.Conv2D(models.CLASSES, 10), keras.layers.Flatten()]
    )
    optimizer = tp.DistributedOptimizer(sgd(), scheme="factors")
    with pytest.raises(
        ValueError,
        match=r"'factors' requires gradients.*conv2d.*has no factors.*Conv2DBackpropFilter.*"
        r"Use \"hybcomm\"",
    ):
        train_together(model, models.cnn.data(BATCH), optimizer, wire)


def test_non_finite_factors_reach_all_ranks(wire):
    """Only one rank has non-finite factors."""
    model = models.mlp()
    model.compile(optimizer=tp.DistributedOptimizer(sgd(), scheme=KERNELS), loss=models.LOSS)
    x, y = models.mlp.data(4)
    if wire.topology.rank == wire.topology.size - 1:
        x[0, 0] = np.nan
    model.train_on_batch(x, y)
    assert all(np.isnan(layer.kernel.numpy()).any() for layer in model.layers)


def test_hybcomm_compares_again_for_another_batch_size(wire):
    model = models.mlp()
    x, y = models.mlp.data(240)
    model.compile(optimizer=tp.DistributedOptimizer(sgd(), scheme="hybcomm"), loss=models.LOSS)
    names = lambda: [bucket.scheme.name for bucket in model.optimizer.plan.buckets]  # noqa: E731
    for batch_size, has_factors in ((2, True), (120, False), (2, True)):
        model.fit(
            x[: 2 * batch_size],
            y[: 2 * batch_size],
            batch_size=batch_size,
            shuffle=False,
            verbose=0,
        )
        assert ("factors" in names()) == has_factors, (batch_size, str(model.optimizer.plan))
        same_on_all_ranks(model.get_weights(), wire)


def test_a_trace_without_factors_sends_the_matrix(wire):
    """The last rank clips gradients in its second trace, unlike the plan and the other ranks."""
    start = np.random.default_rng(0).normal(size=(6, 4)).astype("float32")
    x = np.random.default_rng(1).normal(size=(wire.topology.size, 3, 6)).astype("float32")

    def train(regularized):
        weight = tf.Variable(start)
        optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.1), scheme="factors")

        def step(change):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.matmul(x[wire.topology.rank], weight) ** 2)
                loss += tf.reduce_sum(weight**2) if regularized else 0.0
            optimizer.apply([change(g) for g in tape.gradient(loss, [weight])], [weight])

        tf.function(lambda: step(lambda g: g))()
        is_last = wire.topology.rank == wire.topology.size - 1
        tf.function(
            lambda: step(lambda g: tf.clip_by_value(g, -1e9, 1e9) if is_last or regularized else g)
        )()
        return weight.numpy()

    expected = start.astype("float64")
    for _ in range(2):
        expected -= 0.1 * np.mean([2 * part.T @ (part @ expected) for part in x], axis=0)
    weight = train(regularized=False)
    np.testing.assert_allclose(weight, expected, atol=1e-4 * np.abs(expected).max())
    same_on_all_ranks([weight], wire)
    with pytest.raises(
        ValueError,
        match=r"regularized variable must have factors in all traces.*ClipByValue|Minimum|Maximum",
    ):
        train(regularized=True)


def test_hybcomm_trains_tensorflow_variables(wire):
    weight = tf.Variable(np.ones((6, 4), "float32"))
    optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(1.0), scheme="hybcomm")
    x = tf.constant(np.full((2, 6), 1.0 + wire.topology.rank, "float32"))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.matmul(x, weight))
        optimizer.apply(tape.gradient(loss, [weight]), [weight])

    step(x)
    np.testing.assert_allclose(weight, np.full((6, 4), 1 - 2 * (1 + (wire.topology.size - 1) / 2)))

"""Factors under gradient accumulation: kept as rows across steps, and exchanged once per update."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfposeidon as tp
from tests.helpers import models
from tests.helpers.checkpoints import BETWEEN_AND_WITHIN, check_resumes
from tests.helpers.factors import KERNELS, large_table, token_batches
from tests.helpers.models import rank_variables, same_on_all_ranks
from tests.helpers.over_ranks import on_one_rank
from tests.helpers.training import (
    BATCH,
    STEPS,
    check_close,
    check_equal,
    train_alone,
    train_together,
)

pytestmark = pytest.mark.ranks("2x1")

ACCUMULATED = 2


def accumulating():
    return keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=ACCUMULATED)


def _by_variable(plan):
    return {d.path.rpartition("/")[2]: (b, d) for b in plan.buckets for d in b.descriptions}


def test_equal_to_one_process(wire):
    for build, data, scheme in (
        (models.mlp, models.mlp.data(STEPS * BATCH), [("kernel", "factors"), (".*", "ps")]),
        (
            large_table,
            token_batches(STEPS * BATCH),
            [("embeddings", "factors"), (".*", "allreduce")],
        ),
    ):
        start, (variable, name) = build(), scheme[0]
        reference = train_alone(models.copy(build, start), data, accumulating())
        optimizer = tp.DistributedOptimizer(accumulating(), scheme=scheme)
        weights = train_together(models.copy(build, start), data, optimizer, wire)
        check_equal(weights, reference)
        same_on_all_ranks(weights, wire)
        bucket, description = _by_variable(optimizer.plan)[variable]
        assert bucket.scheme.name == name
        rows = ACCUMULATED * BATCH // wire.topology.size
        # More rows than the smaller side of a kernel are kept as a matrix, which takes no more room
        # than that many rows.
        expected = 4 * rows if variable == "embeddings" else min(rows, *description.shape)
        assert description.factors.rows == expected
        assert "batch rows of factors are stored over 2 steps" in str(optimizer.plan)


def test_the_cheaper_of_both(wire):
    """More steps make more rows, until the matrix is less."""
    schemes = []
    for steps in (1, 2, 64):
        optimizer = tp.DistributedOptimizer(
            keras.optimizers.SGD(0.1),
            scheme="hybcomm",
            bucket_bytes=0,
            gradient_accumulation_steps=steps if steps > 1 else None,
        )
        # 4 rows a step of a kernel of 500 x 40.
        model = keras.Sequential([keras.Input((500,)), keras.layers.Dense(40)])
        model.compile(optimizer=optimizer, loss="mse")
        model.fit(np.ones((4 * steps, 500)), np.ones((4 * steps, 40)), batch_size=4, verbose=0)
        bucket, description = _by_variable(optimizer.plan)["kernel"]
        schemes.append(bucket.scheme.name)
        assert description.factors.rows == min(4 * steps, 40)
    assert schemes == ["factors", "factors", "ps"]
    assert "K=" in str(optimizer.plan)


def test_batches_that_weigh_differently(wire):
    """Where samples are counted, the mean is one over all of them."""
    # One sample, then two, and so on, over the ranks.
    bounds = np.cumsum(range(2 * wire.topology.size + 1))
    x, y = models.mlp.data(bounds[-1])
    start = models.mlp()
    reference = train_alone(
        models.copy(models.mlp, start), (x, y), keras.optimizers.SGD(0.1), batch_size=len(x)
    )
    model = models.copy(models.mlp, start)
    optimizer = tp.DistributedOptimizer(
        keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
        scheme=KERNELS,
        sample_count=tp.sample_counts.batch_size,
    )
    model.compile(optimizer=optimizer, loss=models.LOSS)
    for step in range(2):
        part = 2 * wire.topology.rank + step
        mine = slice(*bounds[part : part + 2])
        model.train_on_batch(x[mine], y[mine])
    same_on_all_ranks(model.get_weights(), wire)
    check_close(model.get_weights(), reference, start.get_weights(), 1e-5)
    assert not any(np.any(v.numpy()) for v in rank_variables(optimizer))


def test_between_two_plans(wire):
    """Rows wait for their update while larger batches need matrices, and matrices the other way."""
    x, y = models.mlp.data(32 * wire.topology.size)
    mine = slice(wire.topology.rank, None, wire.topology.size)

    def trained(model, optimizer, x, y, ranks):
        model.compile(optimizer=optimizer, loss=models.LOSS)
        for size in (1, 32, 32, 1):
            rows = slice(0, size * ranks)
            model.fit(x[rows], y[rows], batch_size=size * ranks, shuffle=False, verbose=0)
        assert int(optimizer.iterations) == 2
        return model.get_weights()

    start = models.mlp()
    alone = models.copy(models.mlp, start)
    reference = on_one_rank(lambda: trained(alone, accumulating(), x, y, wire.topology.size))
    optimizer = tp.DistributedOptimizer(accumulating(), scheme="hybcomm")
    check_equal(trained(start, optimizer, x[mine], y[mine], 1), reference)


def test_resume(wire):
    more = {"scheme": KERNELS, "batches": 3, "stops": BETWEEN_AND_WITHIN}
    check_resumes(wire, models.mlp, accumulating, **more)


def _step(optimizer, model, variables, losses):
    """A hand-written step, that AutoGraph sees."""

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = sum(part(model, x, y) for part in losses)
        gradients = tape.gradient(loss, variables)
        optimizer.apply(gradients, variables, sample_count=tf.shape(x)[0])

    return step


def _fit_loss(model, x, y):
    return models.LOSS(y, model(x))


def _bias_loss(model, x, y):
    return tf.reduce_sum(model.layers[0].bias ** 2)


def _looped(wire, scheme, calls, changes=()):
    """Returns the weights after calls with these losses and changes of scheme before some."""
    keras.utils.set_random_seed(3)
    model = models.mlp()
    variables = [v.value for v in model.trainable_variables]
    optimizer = tp.DistributedOptimizer(
        keras.optimizers.SGD(0.1), scheme=scheme, gradient_accumulation_steps=len(calls) // 2
    )
    x, y = models.mlp.data(8 * wire.topology.size)
    mine = [tf.constant(part[wire.topology.rank :: wire.topology.size]) for part in (x, y)]
    steps = {}
    for number, losses in enumerate(calls):
        if number in dict(changes):
            optimizer.change_scheme(dict(changes)[number])
            steps.clear()
        if losses not in steps:
            steps[losses] = _step(optimizer, model, variables, losses)
        steps[losses](*mine)
    same_on_all_ranks(model.get_weights(), wire)
    left = [v.numpy() for v in rank_variables(optimizer)]
    assert not any(np.any(array) for array in left)
    return model.get_weights()


def test_hand_written_loops(wire):
    """Steps of two losses in turn, which trace twice; two updates."""
    calls = [(_fit_loss,), (_fit_loss, _bias_loss)] * 2
    scheme = [("kernel", "factors"), (".*", "ps")]
    check_equal(_looped(wire, scheme, calls), _looped(wire, "allreduce", calls))


def test_variables_without_gradients_in_some_calls(wire):
    calls = [(_fit_loss,), (_bias_loss,), (_fit_loss,)] * 2
    check_equal(_looped(wire, KERNELS, calls), _looped(wire, "allreduce", calls))


def test_changes_of_scheme_between_two_updates(wire):
    calls = [(_fit_loss,)] * 6
    reference = _looped(wire, "allreduce", calls)
    changes = [(1, KERNELS), (2, "allreduce"), (4, "hybcomm")]
    check_equal(_looped(wire, "allreduce", calls, changes), reference)

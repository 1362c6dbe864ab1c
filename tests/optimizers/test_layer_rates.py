"""LARS and LAMB on ranks equal one process on whole batches, whichever rank computes the norms."""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfposeidon as tp
from tests.helpers import models
from tests.helpers.checks import Raises
from tests.helpers.models import same_on_all_ranks
from tests.helpers.training import (
    BATCH,
    SERVED,
    check_equal,
    distributed,
    train_alone,
    train_together,
)
from tfposeidon.optimizers import LAMB, LARS
from tfposeidon.optimizers.layer_wise import local_norms

pytestmark = pytest.mark.ranks("2")

STEPS = 6


def lars(**options):
    return LARS(2.0, trust_coefficient=0.02, weight_decay=0.01, **options)


def lamb(**options):
    return LAMB(0.01, epsilon=1e-3, weight_decay=0.01, **options)


def _compare(wire, make_optimizer, ways, build=models.mlp):
    """Compares ranks with one process, for several schemes and ways of computing norms.

    Args:
      ways: Pairs of a scheme and of the argument `parallel`.
    """
    keras.utils.clear_session(free_memory=False)
    data = build.data(STEPS * BATCH)
    start = build()
    reference = train_alone(models.copy(build, start), data, make_optimizer())
    for scheme, parallel in ways:
        optimizer = distributed(make_optimizer(parallel=parallel), scheme=scheme)
        weights = train_together(models.copy(build, start), data, optimizer, wire)
        check_equal(weights, reference)
        same_on_all_ranks(weights, wire)
    moved = max(np.abs(a - b).max() for a, b in zip(reference, start.get_weights(), strict=True))
    assert moved > 1e-3, "training must change the reference"


@pytest.mark.ranks("2x2")
def test_lars_equals_one_process(wire):
    _compare(wire, lars, [("alltoall", True), (SERVED, "auto")])


def test_lars_with_the_norm_of_the_sum_equals_one_process(wire):
    _compare(
        wire,
        lambda **options: lars(ratio="norm_of_sum", nesterov=True, **options),
        [("torus2d", "auto")],
    )


def test_lamb_equals_one_process(wire):
    _compare(wire, lamb, [("allreduce", False)])


def test_lars_of_convolutions_equals_one_process(wire):
    _compare(wire, lars, [("alltoall", True), (SERVED, True)], models.cnn)


def test_lamb_of_embeddings_equals_one_process(wire):
    _compare(wire, lamb, [("alltoall", True), (SERVED, False)], models.embedding)


def test_lars_with_clipping_and_ema_equals_one_process(wire):
    averaged = {"global_clipnorm": 0.1, "use_ema": True, "ema_overwrite_frequency": 3}
    both = [("alltoall", True), (SERVED, "auto")]
    for options, ways in ((averaged, both), ({"clipnorm": 0.05}, both[1:])):
        _compare(wire, lambda options=options, **more: lars(**options, **more), ways)


def test_lamb_with_accumulation_equals_one_process(wire):
    accumulated = lambda **more: lamb(gradient_accumulation_steps=2, **more)  # noqa: E731
    _compare(wire, accumulated, [("alltoall", True), (SERVED, "auto")])


def test_lars_that_excludes_all_layers_equals_one_process(wire):
    ways = [("alltoall", True), (SERVED, "auto")]
    _compare(wire, lambda **more: LARS(0.05, exclude=[""], **more), ways)


def test_all_ranks_skip_an_overflow_in_mixed_precision(wire):
    keras.config.set_dtype_policy("mixed_float16")
    x, y = models.mlp.data(4 * BATCH)
    # The first loss scale is too large for these inputs.
    x = 300 * x
    for scheme, parallel in (("alltoall", True), (SERVED, "auto")):
        model = models.mlp()
        model.compile(
            optimizer=distributed(lars(parallel=parallel), scheme=scheme),
            loss=models.LOSS,
        )
        before = model.get_weights()
        share = models.share((x, y), BATCH, wire.topology)
        model.fit(
            *share, batch_size=BATCH // wire.topology.size, epochs=4, verbose=0, shuffle=False
        )
        same_on_all_ranks(model.get_weights(), wire)
        assert all(np.isfinite(w).all() for w in model.get_weights())
        assert any((a != b).any() for a, b in zip(before, model.get_weights(), strict=True))


def test_one_optimizer_trains_two_networks_in_turn(wire):
    """Each list of variables has its own norms and names."""
    a, b = (
        [keras.Variable(np.full((n, n), 2.0 + i), name=f"w{i}") for i in range(3)] for n in (2, 3)
    )
    optimizer = tp.DistributedOptimizer(lars(parallel=True), scheme="alltoall")
    optimizer.build([*a, *b])

    @tf.function(reduce_retracing=False, autograph=False)
    def step(x):
        for variables in (a, b):
            optimizer.apply([tf.ones(v.shape) * tf.reduce_sum(x) for v in variables], variables)

    for size in (1, 2):
        step(tf.ones([size]))
    inner = optimizer.inner_optimizer
    assert inner.norms is local_norms
    alone = lars()
    expected = [
        keras.Variable(np.full(v.shape, 2.0 + i), name=v.name)
        for part in (a, b)
        for i, v in enumerate(part)
    ]
    alone.build(expected)
    for size in (1.0, 2.0):
        for part in (expected[:3], expected[3:]):
            alone.apply([tf.fill(v.shape, size) for v in part], part)
    for found, wanted in zip([*a, *b], expected, strict=True):
        np.testing.assert_allclose(found.numpy(), wanted.numpy(), rtol=1e-5)


def test_variables_of_other_dtypes_are_updated(wire):
    for dtypes in (
        ["float16"],
        ["bfloat16"],
        ["float64"],
        ["float64", "float32"],
        ["float32", "float64"],
    ):
        for parallel in (True, "auto"):
            made = [
                keras.Variable(np.full((2, 2), 2.0), dtype=d, name=f"w{i}")
                for i, d in enumerate(dtypes)
            ]
            optimizer = tp.DistributedOptimizer(lars(parallel=parallel), scheme="allreduce")
            optimizer.apply([tf.ones([2, 2], d) for d in dtypes], made)
            for variable in made:
                # |w| = 4, |g| = 2, decay 0.01: 2 - 2.0 * 0.02 * 4 / 2.04 * 1.02.
                np.testing.assert_allclose(
                    tf.cast(variable.value, "float64"), np.full((2, 2), 1.92), rtol=1e-2
                )


def test_ranks_with_different_norm_methods_are_refused(wire):
    for options, words in (
        ({"parallel": wire.topology.rank == 0}, "parallel.*on rank"),
        (
            {"exclude": ["kernel"] if wire.topology.rank else None},
            r"exclude None on rank 0, \['kernel'\] on rank 1",
        ),
    ):
        optimizer = tp.DistributedOptimizer(lars(**options), scheme="alltoall")
        model = models.mlp()
        optimizer.build(model.trainable_variables)
        with Raises(RuntimeError, words):
            optimizer.apply([tf.ones(v.shape) for v in model.trainable_variables])


def test_the_plan_notes_the_method_for_norms(wire):
    for scheme, parallel, words in (
        ("alltoall", True, "norms of 2 layers: each rank computes a share (parallel=True)"),
        ("alltoall", False, "norms of 2 layers: every rank computes all (parallel=False)"),
        ("alltoall", "auto", "(measured once: "),
        (
            SERVED,
            "auto",
            "norms of layers: the ranks sum the squared norms of their shards",
        ),
    ):
        optimizer = distributed(lars(parallel=parallel), scheme=scheme)
        with mock.patch.object(wire, "all_gather", wraps=wire.all_gather) as spy:
            eager = {"run_eagerly": True}
            train_together(models.mlp(), models.mlp.data(BATCH), optimizer, wire, eager)
        gathered = any("norms_of_layers" in str(call) for call in spy.call_args_list)
        assert parallel == "auto" or gathered == parallel
        notes = [note for note in optimizer.plan.notes if words in note]
        assert len(notes) == 1, optimizer.plan.notes
        same_on_all_ranks([np.frombuffer(notes[0].encode(), np.uint8)], wire)

"""Tests features that the optimizer refuses or disables, with the same errors on both ranks."""

import keras
import pytest
import tensorflow as tf

import tfposeidon as tp
from tests.helpers import models
from tests.helpers.automatic import ideal, links, planning
from tests.helpers.checks import Raises
from tests.helpers.over_ranks import exchange_objects
from tests.helpers.training import sgd
from tfposeidon.communication import runtime

pytestmark = pytest.mark.ranks("2")

SGD = keras.optimizers.SGD


def test_different_accumulation_is_refused(wire):
    optimizer = tp.DistributedOptimizer(
        SGD(0.1, gradient_accumulation_steps=2 + wire.topology.rank)
    )
    with Raises(
        RuntimeError, "All ranks must use the same exchange settings.*gradient_accumulation_steps"
    ):
        optimizer.apply([tf.constant([1.0])], [keras.Variable([1.0], name="w")])
    weight, inner = keras.Variable([1.0], name="w"), SGD(0.1, gradient_accumulation_steps=2)
    inner.build([weight])
    if wire.topology.rank == 1:
        inner.apply([tf.constant([1.0])], [weight])
    with Raises(RuntimeError, "calls since the last update 0 on rank 0, 1 on rank 1"):
        tp.DistributedOptimizer(inner).apply([tf.constant([1.0])], [weight])


def test_different_settings_of_inner_optimizers_are_refused(wire):
    inner = keras.optimizers.Adam(0.1, beta_1=(0.9, 0.8)[wire.topology.rank])
    optimizer = tp.DistributedOptimizer(inner)
    with Raises(RuntimeError, r"optimizer.beta_1 0.9 on rank 0, 0.8 on rank 1"):
        optimizer.apply([tf.constant([1.0])], [keras.Variable([1.0], name="w")])


def test_different_loss_scales_are_refused(wire):
    steps, optimizer = 2 + wire.topology.rank, tp.DistributedOptimizer(SGD())
    scaled = keras.optimizers.LossScaleOptimizer(optimizer, dynamic_growth_steps=steps)
    with Raises(RuntimeError, r"loss scale.dynamic_growth_steps 2 on rank 0, 3 on rank 1"):
        scaled.apply([tf.constant([1.0])], [keras.Variable([1.0], name="w")])
    other = tp.DistributedOptimizer(SGD())
    apply = keras.optimizers.LossScaleOptimizer(other).apply if wire.topology.rank else other.apply
    with Raises(RuntimeError, "loss scale None on rank 0, 'LossScaleOptimizer' on rank 1"):
        apply([tf.constant([1.0])], [keras.Variable([1.0], name="w")])


def test_different_collectives_are_refused(wire):
    with Raises(
        RuntimeError,
        "All ranks must call the same collectives in the same order. "
        "Received: 'here' on rank 0, 'there' on rank 1",
    ):
        exchange_objects(1, wire, ("here", "there")[wire.topology.rank])


def test_different_models_are_refused(wire):
    width = 3 + wire.topology.rank
    model = keras.Sequential(
        [keras.Input((20,)), keras.layers.Dense(width), keras.layers.Dense(models.CLASSES)]
    )
    model.compile(optimizer=tp.DistributedOptimizer(sgd()), loss=models.LOSS)
    with Raises(
        RuntimeError,
        r"first difference at variable 0: .*kernel' \(20, 3\).*\(20, 4\) float32 on rank 1",
    ):
        model.fit(*models.mlp.data(8), verbose=0)


def test_a_different_order_of_variables_is_refused(wire):
    pair = [keras.Variable([1.0], name="a"), keras.Variable([1.0], name="b")]
    ordered = pair if wire.topology.rank == 0 else pair[::-1]
    with Raises(RuntimeError, "variable 0: 'a' .* on rank 0, 'b' .* on rank 1"):
        tp.DistributedOptimizer(sgd()).apply([tf.constant([1.0])] * 2, ordered)


def test_different_schemes_are_refused(wire):
    optimizer = tp.DistributedOptimizer(sgd(), scheme=("alltoall", "allreduce")[wire.topology.rank])
    with Raises(RuntimeError, "All ranks must use the same exchange settings"):
        optimizer.apply([tf.constant([1.0])], [keras.Variable([1.0], name="w")])


def test_rules_for_generated_names_are_refused(wire):
    """A generated name depends on the layers that a rank has created before."""
    keras.utils.clear_session(free_memory=False)
    if wire.topology.rank == 0:
        keras.layers.Dense(1)
    model = models.mlp()
    rules = [("dense_1/", tp.schemes.TopK(min_elements=0)), (".*", "allreduce")]
    model.compile(optimizer=tp.DistributedOptimizer(sgd(), rules), loss=models.LOSS)
    with Raises(
        RuntimeError,
        "same scheme for a variable. Received: first difference at variable 0: TopK.* on rank 0, "
        "AllReduce.* on rank 1. Name the layers that rules match",
    ):
        model.fit(*models.mlp.data(8), verbose=0)


def test_xla_is_refused_in_custom_steps(wire):
    weight, optimizer = keras.Variable([1.0], name="w"), tp.DistributedOptimizer(sgd())
    step = tf.function(lambda: optimizer.apply([tf.ones([1])], [weight]), jit_compile=True)
    with Raises(ValueError, "must run without XLA.*jit_compile"):
        step()


def test_adafactor_with_sparse_schemes_is_refused(wire):
    scheme = tp.schemes.HiTopK(density=0.1, min_elements=0)
    optimizer = tp.DistributedOptimizer(keras.optimizers.Adafactor(0.1), scheme=scheme)
    with Raises(ValueError, "Adafactor requires a scheme that sends all elements.*Use Adam"):
        optimizer.apply([tf.ones([8, 8])], [keras.Variable(tf.ones([8, 8]), name="w")])


def test_adafactor_is_refused_if_auto_selects_sparse_schemes(wire):
    """The first plan, before the network is measured, sends all elements."""
    scheme = tp.policies.Auto(compression=("topk",))
    optimizer = tp.DistributedOptimizer(keras.optimizers.Adafactor(0.1), scheme=scheme)
    weight = keras.Variable(tf.ones([512, 512]), name="w")
    optimizer.build([weight])
    with links("measure"), planning(LONGEST_TRIAL_S=0.0):
        assert [one.scheme.name for one in optimizer.plan.buckets] == ["allreduce"]
        runtime.set_network_profile(ideal(wire, bytes_per_s=1e5), measures=True)
        # The error repeats if a script catches it and continues.
        for _ in range(2):
            with Raises(ValueError, "Adafactor requires a scheme that sends all elements.*Use Ada"):
                optimizer.apply([tf.ones([512, 512])], [weight])

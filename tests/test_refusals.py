"""Invalid arguments of optimizers and callbacks raise errors before training."""

import re
from unittest import mock

import keras
import pytest
import tensorflow as tf

import keras_callbacks
import tfposeidon as tp
from tests.helpers import models
from tests.test_optimizer import SGD, trained
from tfposeidon import schemes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: tp.DistributedOptimizer("sgd"),
            r"must be a Keras 3 optimizer\. Received: 'sgd' of type str",
        ),
        (
            lambda: tp.DistributedOptimizer(tp.DistributedOptimizer(SGD())),
            "must be wrapped only once",
        ),
        (
            lambda: tp.DistributedOptimizer(SGD(), scheme="ring"),
            r'one of "auto", "hybcomm", "allreduce", "alltoall", "torus2d"',
        ),
        (lambda: tp.DistributedOptimizer(SGD(), scheme=7), "Received: scheme=7"),
        (
            lambda: tp.DistributedOptimizer(SGD(), scheme=[("kernel",)]),
            "pairs of a pattern and a scheme",
        ),
        (
            lambda: tp.DistributedOptimizer(SGD(), scheme={"(": "alltoall"}),
            "must be a regular expression",
        ),
        (
            lambda: tp.DistributedOptimizer(SGD(), scheme={re.compile("kernel"): "alltoall"}),
            r"must be a regular expression, as a string\. Received: re.compile\('kernel'\)",
        ),
        (
            lambda: tp.DistributedOptimizer(SGD(), bucket_bytes=-1),
            "`bucket_bytes` must be an integer >= 0",
        ),
        (lambda: tp.DistributedOptimizer(SGD(), bucket_bytes=1.5), "Received: bucket_bytes=1.5"),
        (
            lambda: tp.DistributedOptimizer(SGD()).plan,
            "must be built before its plan is read",
        ),
        (lambda: tp.init(ranks_per_node=0), "`ranks_per_node` must be an integer >= 1"),
        (
            lambda: tp.LocalUpdates(SGD(), sync_every=0),
            "`sync_every` must be an integer >= 1",
        ),
        (lambda: tp.LocalUpdates(SGD(), sync_every=1.5), "Received: sync_every=1.5"),
        (
            lambda: tp.LocalUpdates(SGD(), sync_every=4, overlap_steps=4),
            r"must be less than `sync_every`.*overlap_steps=4, sync_every=4\. Use at most 3",
        ),
        (
            lambda: tp.LocalUpdates(SGD(), hierarchical="rack"),
            "`hierarchical` must be True or False. Received: hierarchical='rack'",
        ),
        (lambda: tp.LocalUpdates(SGD(), warmup_steps=-1), "`warmup_steps` must be an integer >= 0"),
        (
            lambda: tp.LocalUpdates(SGD(), outer_optimizer="gossip"),
            "one of average, elastic, outer, slow_momentum.*Received: outer_optimizer='gossip'",
        ),
        (
            lambda: tp.LocalUpdates(SGD(), scheme="auto"),
            "must support pseudo-gradients.*scheme=Auto",
        ),
        (
            lambda: tp.LocalUpdates(SGD(), scheme="factors"),
            "which reads the graph of gradients",
        ),
        (
            lambda: tp.LocalUpdates(SGD(), scheme=schemes.HiTopK(momentum=0.9)),
            "pseudo-gradients have no velocity",
        ),
        (lambda: tp.LocalUpdates(SGD(use_ema=True)), "use_ema=True. Remove use_ema"),
        (
            lambda: tp.LocalUpdates(tp.DistributedOptimizer(SGD())),
            "in DistributedOptimizer, LocalUpdates or ",
        ),
        (
            lambda: tp.local.Elastic(beta=1.2),
            r"`beta` must be a number in \(0, 1\].*diverges if .* exceeds 1 / replicas",
        ),
        (lambda: tp.local.SlowMomentum(1.0), "`momentum` must be a number in"),
        (lambda: tp.local.Outer("sgd"), "`optimizer` must be a Keras optimizer"),
    ],
)
def test_invalid_arguments_are_refused(make, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        make()


@pytest.mark.parametrize("dtype", ["int32", "complex64"])
def test_variables_must_be_floating_point(dtype):
    variable = tf.Variable(tf.zeros([2], dtype), name="counts")
    with pytest.raises(ValueError, match=rf"must be floating-point.*'counts:0' of dtype {dtype}"):
        tp.DistributedOptimizer(SGD()).apply([tf.zeros([2], dtype)], [variable])


@pytest.mark.parametrize(
    "wrap", [tp.DistributedOptimizer, tp.LocalUpdates, tp.ElasticAveraging], ids=str
)
def test_an_inner_loss_scale_is_refused(wrap):
    remedy = rf"Write LossScaleOptimizer\({wrap.__name__}\(optimizer\)\)"
    with pytest.raises(ValueError, match=remedy):
        wrap(keras.optimizers.LossScaleOptimizer(SGD()))


def test_unwrap_refuses_optimizers_that_do_not_communicate():
    for value in (SGD(), keras.optimizers.LossScaleOptimizer(SGD()), None):
        with pytest.raises(TypeError, match="`optimizer` must be a DistributedOptimizer"):
            tp.unwrap(value)


def test_local_updates_require_all_variables_in_each_call():
    weights = [keras.Variable([1.0]), keras.Variable([2.0])]
    optimizer = tp.LocalUpdates(SGD())
    optimizer.build(weights)
    with pytest.raises(ValueError, match="Received: gradients for 1 of 2 variables"):
        optimizer.apply([tf.constant([1.0])], weights[:1])


def test_tf_distribute_is_refused():
    with (
        tf.distribute.OneDeviceStrategy("/cpu:0").scope(),
        pytest.raises(ValueError, match="DistributedOptimizer replaces"),
    ):
        tp.DistributedOptimizer(SGD())


def test_other_backends_are_refused():
    with (
        mock.patch.object(keras.backend, "backend", return_value="jax"),
        pytest.raises(ValueError, match="Set KERAS_BACKEND=tensorflow"),
    ):
        tp.DistributedOptimizer(SGD())


def test_plain_keras_models_remain_unchanged():
    trained(tp.DistributedOptimizer(SGD(0.1)))
    model = trained(SGD(0.1))
    assert type(model.optimizer) is SGD
    assert "train_step" not in vars(model)


def test_unknown_variables_are_refused():
    optimizer = tp.DistributedOptimizer(SGD())
    optimizer.build([keras.Variable([1.0])])
    with pytest.raises(ValueError, match="unknown variable"):
        optimizer.apply([tf.constant([1.0])], [keras.Variable([1.0])])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: keras_callbacks.ReplicaCheck(every_n_steps=0),
            "`every_n_steps` must be a finite number >= 1",
        ),
        (lambda: keras_callbacks.ReplicaCheck(action="panic"), "one of stop, repair, report"),
        (
            lambda: keras_callbacks.Checkpoint("x", every_n_steps=0),
            "`every_n_steps` must be a finite number >= 1",
        ),
        (lambda: keras_callbacks.Checkpoint("x", keep=0), "`keep` must be an integer >= 1"),
        (
            lambda: keras_callbacks.LearningRateWarmup(0.1, warmup_epochs=0),
            "`warmup_epochs` must be a finite number > 0",
        ),
        (lambda: keras_callbacks.LearningRateSchedule(-1, 1.0), "must be a finite number >= 0"),
        (
            lambda: keras_callbacks.SchemeSchedule({}),
            r"must contain a scheme for epoch 0. Received: epochs \[\]",
        ),
        (
            lambda: keras_callbacks.SchemeSchedule({1: "alltoall"}),
            r"must contain a scheme for epoch 0. Received: epochs \[1\]",
        ),
        (lambda: keras_callbacks.SchemeSchedule({0: "gossip"}), "`scheme` must be one of"),
        (
            lambda: keras_callbacks.SchemeSchedule({0: schemes.HiTopK(momentum=0.9), 9: "torus2d"}),
            "schemes of a schedule must correct momentum, or none",
        ),
        (
            lambda: keras_callbacks.SchemeSchedule(
                {0: [(".*", schemes.HiTopK(momentum=0.9))], 9: "torus2d"}
            ),
            "schemes of a schedule must correct momentum, or none",
        ),
    ],
)
def test_callbacks_refuse_invalid_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_callbacks_refuse_learning_rate_schedules():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    model = models.mlp()
    model.compile(optimizer=tp.DistributedOptimizer(SGD(schedule)), loss=models.LOSS)
    with pytest.raises(ValueError, match="an optimizer whose learning rate is a number"):
        model.fit(
            *models.mlp.data(8), verbose=0, callbacks=[keras_callbacks.LearningRateWarmup(0.1)]
        )


def test_a_schedule_of_schemes_needs_a_distributed_optimizer_and_comes_first():
    schedule = keras_callbacks.SchemeSchedule({0: "alltoall"})
    model = models.mlp()
    model.compile(optimizer=SGD(), loss=models.LOSS)
    with pytest.raises(ValueError, match=r"needs a DistributedOptimizer. Received: SGD"):
        model.fit(*models.mlp.data(8), verbose=0, callbacks=[schedule])
    model.compile(optimizer=tp.DistributedOptimizer(SGD()), loss=models.LOSS)
    restored = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: setattr(model, "_initial_epoch", 1)
    )
    with pytest.raises(ValueError, match=r"must come before Checkpoint"):
        model.fit(*models.mlp.data(8), verbose=0, callbacks=[restored, schedule])

"""Each of P ranks holds 1/P of the optimizer's state, and training equals that of one process."""

import os
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_callbacks
import tfposeidon as tp
from tests.helpers import models
from tests.helpers.checkpoints import check_resumes
from tests.helpers.checks import Raises
from tests.helpers.models import rank_variables, same_on_all_ranks
from tests.helpers.over_ranks import exchange_objects
from tests.helpers.training import (
    BATCH,
    SERVED,
    adam,
    check_equal,
    sgd,
    train_alone,
    train_together,
)
from tests.helpers.wait_free import check_independent, traced

pytestmark = pytest.mark.ranks("2")

SGD = keras.optimizers.SGD


def _trained(wire, make_optimizer=sgd, build=models.mlp, batches=4):
    """Compares a few steps with those of one process; returns the model and both optimizers."""
    keras.utils.clear_session(free_memory=False)
    data = build.data(batches * BATCH)
    start = build()
    reference_optimizer = make_optimizer()
    reference = train_alone(models.copy(build, start), data, reference_optimizer)
    optimizer = tp.ShardedOptimizer(make_optimizer(), SERVED)
    model = models.copy(build, start)
    weights = train_together(model, data, optimizer, wire)
    check_equal(weights, reference)
    same_on_all_ranks(weights, wire)
    return model, optimizer, reference_optimizer


def _adamw():
    return keras.optimizers.AdamW(1e-3, weight_decay=0.1, epsilon=1e-3)


def _bytes(variables):
    return sum(np.prod(v.shape, dtype=int) * tf.as_dtype(v.dtype).size for v in variables)


@pytest.mark.ranks("2x2")
def test_each_rank_holds_an_equal_share_of_the_state_and_may_save_all(wire):
    model, optimizer, reference = _trained(wire, _adamw)
    inner = optimizer.inner_optimizer
    whole = _bytes(reference.variables) - _bytes(inner.variables[:2])
    slots = whole // _bytes(model.trainable_variables)
    # A rank that owns no part of a variable holds a single value.
    padding = 4 * slots * len(model.trainable_variables)
    share = whole / wire.topology.size
    assert _bytes(inner.variables[2:]) <= share + padding, (whole, _bytes(inner.variables[2:]))
    pairs = optimizer.rank_state
    kept = [v for v, p in pairs if p.offset < p.members[0][1]]
    held = sum(exchange_objects(int(_bytes(kept)), wire, "held"))
    assert held == whole, (held, whole)
    assert _bytes(optimizer.variables) == _bytes(inner.variables[:2])
    optimizer.gather_state()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        if wire.topology.rank > 0:
            with Raises(RuntimeError, "not gathered on this rank.*gather_state"):
                model.save(path)
        else:
            model.save(path)
            _check_loads_whole(path, model, reference)
        everybody = exchange_objects(path, wire, "path")
        loaded = keras.saving.load_model(everybody[0])
        exchange_objects(None, wire, "loaded")
    _check_trains_equally(model, loaded, wire)
    if wire.topology.rank == 0:
        with Raises(RuntimeError, "saving at step 5, whose state was not gathered"):
            optimizer.inner_optimizer.save_own_variables({})


def _check_loads_whole(path, model, reference):
    """Checks that the file is an ordinary checkpoint, with the arrays of one process."""
    plain = tp.DistributedOptimizer(_adamw())
    other = models.copy(models.mlp, model)
    other.compile(optimizer=plain, loss=models.LOSS)
    plain.build(other.trainable_variables)
    other.load_weights(path)
    for got, expected in zip(plain.variables, reference.variables, strict=True):
        np.testing.assert_allclose(got.numpy(), expected.numpy(), atol=1e-6)


def _check_trains_equally(model, loaded, wire):
    x, y = models.mlp.data(BATCH)
    for one in (model, loaded):
        one.fit(x, y, batch_size=BATCH, verbose=0)
    for a, b in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(rank_variables(model.optimizer), rank_variables(loaded.optimizer), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    same_on_all_ranks(loaded.get_weights(), wire)


def test_gather_state_allows_saving_on_one_rank(wire):
    model = models.mlp()
    model.compile(optimizer=tp.ShardedOptimizer(adam(), SERVED), loss=models.LOSS)
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [keras_callbacks.GatherState()]
        if wire.topology.rank == 0:
            callbacks.append(keras.callbacks.ModelCheckpoint(os.path.join(folder, "{epoch}.keras")))
        model.fit(
            *models.mlp.data(2 * BATCH), batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks
        )
        assert len(os.listdir(folder)) == (2 if wire.topology.rank == 0 else 0)


def test_schedules_scale_only_the_momentum(wire):
    """Adam's second moments are named velocities, too."""
    data = models.mlp.data(4 * BATCH)

    def train(optimizer):
        keras.utils.set_random_seed(3)
        model = models.mlp()
        model.compile(optimizer, models.LOSS)
        schedule = keras_callbacks.LearningRateSchedule(
            1e-2, lambda epoch: 0.1**epoch, staircase=False
        )
        model.fit(*data, batch_size=BATCH, verbose=0, shuffle=False, callbacks=[schedule])
        return model.get_weights()

    check_equal(
        train(tp.ShardedOptimizer(adam(), SERVED)), train(tp.DistributedOptimizer(adam(), SERVED))
    )


def test_runs_resume_with_sharded_state(wire):
    check_resumes(wire, models.mlp, adam, scheme=SERVED)


def test_constraints_receive_whole_variables(wire):
    def build():
        dense = keras.layers.Dense
        constrained = dense(8, kernel_constraint=keras.constraints.MaxNorm(0.5))
        return keras.Sequential([keras.Input((20,)), constrained, dense(models.CLASSES)])

    build.data = models.mlp.data
    _trained(wire, lambda: SGD(0.5), build)


def test_constraints_apply_if_a_rank_exhausts_its_input(wire):
    constrained = keras.layers.Dense(models.CLASSES, kernel_constraint=keras.constraints.UnitNorm())
    model = keras.Sequential([keras.Input((20,)), constrained])
    model.compile(optimizer=tp.ShardedOptimizer(SGD(0.5), SERVED), loss=models.LOSS)
    batches = 2 if wire.topology.rank == 0 else 1
    x, y = models.mlp.data(8 * batches)
    callbacks = [keras_callbacks.BroadcastVariables()]
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    same_on_all_ranks(model.get_weights(), wire)


def test_weight_decay_skips_excluded_variables(wire):
    def by_layer_and_by_name():
        optimizer = keras.optimizers.AdamW(1e-3, weight_decay=5.0, epsilon=1e-3)
        optimizer.exclude_from_weight_decay(var_names=["dense_1", "bias"])
        return optimizer

    _trained(wire, by_layer_and_by_name)
    weights = [keras.Variable(np.ones(40, "float32"), name=name) for name in "ab"]
    inner = SGD(0.1, weight_decay=1.0)
    inner.exclude_from_weight_decay(var_list=[weights[1]])
    tp.ShardedOptimizer(inner, SERVED).apply([tf.zeros(40), tf.zeros(40)], weights)
    np.testing.assert_allclose(weights[0].numpy(), 0.9)
    np.testing.assert_array_equal(weights[1].numpy(), 1.0)


def test_a_variable_without_gradients_on_any_rank_does_not_change(wire):
    weights = [keras.Variable(np.ones(40, "float32"), name=name) for name in "ab"]
    optimizer = tp.ShardedOptimizer(SGD(0.1), SERVED)
    tf.function(lambda: optimizer.apply([tf.ones(40), None], weights))()
    np.testing.assert_allclose(weights[0].numpy(), 0.9)
    np.testing.assert_array_equal(weights[1].numpy(), 1.0)


def test_rules_may_shard_only_some_variables(wire):
    """Owners update kernels, and all ranks update the other variables. Clipping includes both."""
    data = models.mlp.data(4 * BATCH)
    start = models.mlp()
    for clip in ({"global_clipnorm": 0.1}, {"clipnorm": 0.05}):
        reference = train_alone(
            models.copy(models.mlp, start), data, SGD(0.5, momentum=0.9, **clip)
        )
        inner = SGD(0.5, momentum=0.9, **clip)
        optimizer = tp.ShardedOptimizer(inner, [("kernel", SERVED), (".*", "allreduce")])
        weights = train_together(models.copy(models.mlp, start), data, optimizer, wire)
        check_equal(weights, reference)
        same_on_all_ranks([*weights, *(v.numpy() for v in optimizer.variables)], wire)
        assert len(optimizer.variables) == 2 + 2
        assert "ps" in {bucket.scheme.name for bucket in optimizer.plan.buckets}


def test_clipping_under_a_loss_scale_equals_one_process(wire):
    served = tp.ShardedOptimizer(SGD(0.5, global_clipnorm=0.1), SERVED)
    scaled = keras.optimizers.LossScaleOptimizer(served, initial_scale=64.0)
    data = models.mlp.data(4 * BATCH)
    start = models.mlp()
    reference = train_alone(models.copy(models.mlp, start), data, SGD(0.5, global_clipnorm=0.1))
    weights = train_together(models.copy(models.mlp, start), data, scaled, wire)
    check_equal(weights, reference)


def test_clipping_keeps_ranks_equal_if_one_rank_owns_most_elements(wire):
    """Each rank has only a part of the norm, and must not clip whole variables by it."""
    scheme = [("kernel", "ps"), (".*", "allreduce")]
    model = models.mlp()
    optimizer = tp.ShardedOptimizer(SGD(0.5, momentum=0.9, global_clipnorm=1e-3), scheme)
    model.compile(optimizer=optimizer, loss=models.LOSS)
    model.fit(*models.mlp.data(40 * BATCH), batch_size=BATCH, verbose=0)
    same_on_all_ranks([*model.get_weights(), *(v.numpy() for v in optimizer.variables)], wire)


def test_state_loaded_on_one_rank_is_distributed(wire):
    model, optimizer, _ = _trained(wire, adam)
    optimizer.gather_state()
    keras.utils.clear_session(free_memory=False)
    loaded = models.mlp()
    loaded.compile(optimizer=tp.ShardedOptimizer(adam(), SERVED), loss=models.LOSS)
    loaded.optimizer.build(loaded.trainable_variables)
    if wire.topology.rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.keras")
            model.save(path)
            loaded.load_weights(path)
    x, y = models.mlp.data(BATCH)
    loaded.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[keras_callbacks.BroadcastVariables()])
    model.fit(x, y, batch_size=BATCH, verbose=0)
    for a, b in zip(rank_variables(model.optimizer), rank_variables(loaded.optimizer), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_constraints_do_not_apply_to_weight_averages(wire):
    def build():
        constrained = keras.layers.Dense(8, kernel_constraint=keras.constraints.UnitNorm())
        return keras.Sequential(
            [keras.Input((20,)), constrained, keras.layers.Dense(models.CLASSES)]
        )

    build.data = models.mlp.data
    _trained(wire, lambda: SGD(0.5, use_ema=True, ema_momentum=0.5), build)


def test_external_changes_of_variables_are_used(wire):
    weight = keras.Variable(np.zeros(40, "float32"), name="weight")
    optimizer = tp.ShardedOptimizer(SGD(1.0), SERVED)
    step = tf.function(lambda: optimizer.apply([tf.ones(40)], [weight]))
    step()
    weight.assign(np.full(40, 7.0))
    step()
    np.testing.assert_array_equal(weight.numpy(), 6.0)


def test_bfloat16_and_float32_variables_may_share_a_bucket(wire):
    keras.config.set_dtype_policy("bfloat16")
    model = models.cnn(last="float32")
    model.compile(optimizer=tp.ShardedOptimizer(sgd(), SERVED), loss=models.LOSS)
    model.fit(*models.cnn.data(16), batch_size=8, verbose=0)
    same_on_all_ranks([np.asarray(w, "float32") for w in model.get_weights()], wire)
    model.optimizer.gather_state()


def test_no_bucket_waits_for_another(wire):
    optimizer = tp.ShardedOptimizer(sgd(), SERVED, bucket_bytes=0)
    check_independent(traced(models.mlp(), optimizer, models.mlp.data(4)), 4)


def test_unsupported_uses_are_refused(wire):
    weights = [keras.Variable(np.ones(40, "float32"), name=name) for name in "ab"]
    optimizer = tp.ShardedOptimizer(SGD(0.1), SERVED)
    optimizer.build(weights)
    with Raises(ValueError, "must update all its variables in each call.*1 of 2"):
        optimizer.apply([tf.ones(40)], weights[:1])
    with Raises(ValueError, "does not support a change of the scheme"):
        optimizer.change_scheme("allreduce")
    inner = SGD(0.1)
    inner.build(weights)
    with Raises(ValueError, "SwapEMAWeights"):
        model = models.mlp()
        served = tp.ShardedOptimizer(SGD(0.1, use_ema=True), SERVED)
        model.compile(optimizer=served, loss=models.LOSS)
        model.fit(*models.mlp.data(8), callbacks=[keras.callbacks.SwapEMAWeights()])
    with Raises(ValueError, "which is already built"):
        tp.ShardedOptimizer(inner, SERVED).build(weights)

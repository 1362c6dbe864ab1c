"""Tests features of Keras's optimizers on two ranks."""

import os
import tempfile
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfposeidon as tp
from tests import contract
from tests.helpers import models
from tests.helpers.models import same_on_all_ranks
from tests.helpers.over_ranks import exchange_objects
from tests.helpers.several_optimizers import gan_data, make_gan
from tests.helpers.training import (
    BATCH,
    SERVED,
    check_equal,
    distributed,
    sgd,
    train_alone,
    train_together,
)

pytestmark = pytest.mark.ranks("2")

SGD = keras.optimizers.SGD


def _compare(
    wire,
    make_optimizer,
    build=models.mlp,
    batches=8,
    compile=None,
    reference_fit=None,
    schemes=("alltoall", SERVED),
    **fit,
):
    data = build.data(batches * BATCH)
    start = build()
    reference = train_alone(
        models.copy(build, start), data, make_optimizer(), **(reference_fit or {})
    )
    for scheme in schemes:
        optimizer = distributed(make_optimizer(), scheme=scheme)
        weights = train_together(models.copy(build, start), data, optimizer, wire, compile, **fit)
        check_equal(weights, reference)
        same_on_all_ranks([*weights, *(v.numpy() for v in optimizer.variables)], wire)
    return optimizer


def test_clipnorm_equals_one_process(wire):
    _compare(wire, lambda: SGD(0.5, clipnorm=0.05), schemes=("alltoall", SERVED, "hybcomm"))


def test_global_clipnorm_in_long_executions_equals_one_process(wire):
    _compare(wire, lambda: SGD(0.5, global_clipnorm=0.1), compile={"steps_per_execution": 3})


def test_weight_decay_and_ema_equal_one_process(wire):
    averaged = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3}
    _compare(wire, lambda: keras.optimizers.AdamW(1e-3, weight_decay=0.1, epsilon=1e-3, **averaged))


def test_eager_steps_equal_one_process(wire):
    _compare(wire, sgd, compile={"run_eagerly": True}, batches=3)


def test_accumulation_equals_one_process(wire):
    optimizer = _compare(wire, lambda: SGD(0.1, momentum=0.9, gradient_accumulation_steps=4))
    assert int(optimizer.iterations) == 2


def test_fit_traces_the_step_once(wire):
    """TensorFlow would trace a step twice if its first trace created variables."""
    accumulating = SGD(0.1, gradient_accumulation_steps=2)
    for inner, scheme in (
        (sgd(), tp.schemes.AllToAll(wire_dtype="float16")),
        (sgd(), SERVED),
        (sgd(), tp.schemes.HiTopK(min_elements=0)),
        (accumulating, "allreduce"),
    ):
        model = models.mlp()
        optimizer = distributed(inner, scheme=scheme)
        model.compile(optimizer=optimizer, loss=models.LOSS, metrics=["accuracy"])
        traces = _counted(model)
        for _ in range(2):
            model.fit(*models.mlp.data(16), batch_size=4, verbose=0)
        assert len(traces) == 1, (scheme, len(traces))


def test_custom_steps_are_traced_once(wire):
    model = make_gan(True)
    traces = _counted(model)
    model.fit(*gan_data(8), batch_size=4, verbose=0)
    assert len(traces) == 1
    weight, calls = keras.Variable([1.0, 2.0]), []
    optimizer = tp.DistributedOptimizer(SGD(0.1, momentum=0.9, gradient_accumulation_steps=2))
    step = tf.function(lambda x: calls.append(1) or optimizer.apply([x], [weight]))
    for _ in range(4):
        step(tf.constant([1.0, 3.0]) * (tp.rank() + 1.0))
    assert len(calls) == 1
    np.testing.assert_allclose(weight.numpy(), [1 - 0.29 * 1.5, 2 - 0.29 * 4.5], rtol=1e-5)


def _counted(model):
    """Returns a list to which each trace of the model's train step appends an element."""
    step, traces = model.train_step, []
    model.train_step = lambda data: traces.append(1) or step(data)
    return traces


def test_accumulation_exchanges_once_per_update(wire):
    model = models.mlp()
    optimizer = tp.DistributedOptimizer(SGD(0.1, gradient_accumulation_steps=4), scheme="allreduce")
    x, y = models.mlp.data(4)
    with mock.patch.object(wire, "all_reduce", wraps=wire.all_reduce) as spy:
        for step in range(1, 9):
            _eager_step(model, optimizer, x, y)
            assert spy.call_count == 2 * (step // 4), (
                "every four calls exchange the counts and one bucket"
            )


def _eager_step(model, optimizer, x, y):
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(models.LOSS(y, model(x, training=True)))
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


def test_an_overflow_on_one_rank_is_skipped_on_all_ranks(wire):
    keras.config.set_dtype_policy("mixed_float16")
    _check_overflow(wire, "alltoall")


def test_an_overflow_is_skipped_on_all_ranks_with_sharded_state(wire):
    keras.config.set_dtype_policy("mixed_float16")
    _check_overflow(wire, SERVED)


def _check_overflow(wire, scheme):
    model = models.mlp()
    optimizer = distributed(sgd(), scheme=scheme)
    model.compile(optimizer=optimizer, loss=models.LOSS)
    x, y = models.mlp.data(8)
    model.fit(x, y, batch_size=8, verbose=0)
    assert tp.unwrap(model.optimizer) is optimizer
    before, scale = model.get_weights(), float(model.optimizer.dynamic_scale)
    poisoned = x * 1e30 if wire.topology.rank == 1 else x
    model.fit(poisoned, y, batch_size=8, verbose=0)
    assert float(model.optimizer.dynamic_scale) == scale / 2
    assert int(optimizer.iterations) == 1
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)
    model.fit(x, y, batch_size=8, verbose=0)
    assert int(optimizer.iterations) == 2
    same_on_all_ranks(model.get_weights(), wire)


def test_mixed_precision_accumulates_gradients(wire):
    keras.config.set_dtype_policy("mixed_float16")
    model = models.mlp()
    optimizer = tp.DistributedOptimizer(SGD(0.1, gradient_accumulation_steps=2))
    model.compile(optimizer=optimizer, loss=models.LOSS)
    x, y = models.mlp.data(16)
    model.fit(x, y, batch_size=4, verbose=0)
    assert int(optimizer.iterations) == 2
    same_on_all_ranks(model.get_weights(), wire)


def test_a_user_loss_scale_optimizer_wraps_the_optimizer(wire):
    inside = tp.DistributedOptimizer(sgd(), scheme="alltoall")
    wrapped = keras.optimizers.LossScaleOptimizer(inside, initial_scale=8.0)
    start = models.mlp()
    data = models.mlp.data(4 * BATCH)
    reference = train_alone(models.copy(models.mlp, start), data, sgd())
    check_equal(train_together(models.copy(models.mlp, start), data, wrapped, wire), reference)


def test_repeated_tokens_are_updated_once(wire):
    table = keras.Variable(np.zeros((4, 3), "float32"), name="table")
    optimizer = tp.DistributedOptimizer(keras.optimizers.Adam(0.1))

    @tf.function
    def step(tokens):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.gather(table.value, tokens))
        gradient = tape.gradient(loss, table.value)
        assert isinstance(gradient, tf.IndexedSlices)
        optimizer.apply([gradient], [table])

    step(tf.constant([1, 1, 2] if wire.topology.rank == 0 else [2, 2, 1]))
    moved = np.abs(table.numpy())
    np.testing.assert_allclose(moved[1:3], 0.1, rtol=1e-3)
    np.testing.assert_array_equal(moved[[0, 3]], 0)
    assert "rows are summed" in str(optimizer.plan)


class Tied(keras.Model):
    """Model whose embedding is also its output layer."""

    def __init__(self):
        super().__init__(name="tied")
        self.embedding = keras.layers.Embedding(11, 8, name="embedding")
        self.mix = keras.layers.Dense(8, activation="tanh", name="mix")

    def call(self, tokens):
        hidden = self.mix(keras.ops.mean(self.embedding(tokens), axis=1))
        return keras.ops.matmul(hidden, keras.ops.transpose(self.embedding.embeddings))


def _tied():
    model = Tied()
    model(np.zeros((1, 8), "int32"))
    return model


_tied.data = models.embedding.data


def test_tied_weights_of_a_subclassed_model_equal_one_process(wire):
    _compare(wire, sgd, build=_tied)


class CutAndTiled(keras.layers.Layer):
    """Adds positions cut to the batch's length and a tiled token, like BERT and ViT."""

    def build(self, shape):
        self.table = self.add_weight(shape=(12, shape[-1]), name="table")
        self.token = self.add_weight(shape=(1, 1, shape[-1]), name="token")

    def call(self, inputs):
        batch, length, width = keras.ops.shape(inputs)
        positions = keras.ops.slice(self.table, (0, 0), (length, width))
        token = keras.ops.tile(self.token, (batch, 1, 1))
        return keras.ops.concatenate([token, inputs + positions], axis=1)


def _cut_and_tiled():
    tokens = keras.Input((None,), dtype="int32")
    hidden = CutAndTiled(name="cut_and_tiled")(keras.layers.Embedding(11, 8)(tokens))
    return keras.Model(
        tokens, keras.layers.Dense(models.CLASSES)(keras.layers.GlobalAveragePooling1D()(hidden))
    )


_cut_and_tiled.data = models.embedding.data


def test_gradients_without_static_shapes_are_exchanged(wire):
    data = _cut_and_tiled.data(4 * BATCH)
    start = _cut_and_tiled()
    reference = train_alone(models.copy(_cut_and_tiled, start), data, SGD(0.1))
    mine = models.of_any_length(
        *models.share(data, BATCH, wire.topology), BATCH // wire.topology.size
    )
    for scheme in (*contract.OF_EACH_CLASS, SERVED, "hybcomm"):
        model = models.copy(_cut_and_tiled, start)
        optimizer = distributed(SGD(0.1), scheme=scheme)
        shapes = _shapes_of_gradients(optimizer)
        model.compile(optimizer=optimizer, loss=models.LOSS)
        model.fit(mine, verbose=0)
        same_on_all_ranks(model.get_weights(), wire)
        assert not all(shape.is_fully_defined() for shape in shapes), "some shapes must be unknown"
        if scheme == "hybcomm" or (scheme.exact and getattr(scheme, "wire_dtype", None) is None):
            check_equal(model.get_weights(), reference)


def _shapes_of_gradients(optimizer):
    """Returns a list to which the shapes of all applied gradients are appended."""
    apply, shapes = optimizer.apply, []

    def noted(grads, *args, **options):
        grads = list(grads)
        shapes.extend(grad.shape for grad in grads)
        return apply(grads, *args, **options)

    optimizer.apply = noted
    return shapes


def test_a_gradient_missing_on_one_rank_counts_as_zero(wire):
    here = keras.Variable([1.0], name="here")
    shared = keras.Variable([1.0], name="shared")
    never = keras.Variable([1.0], name="never")
    optimizer = tp.DistributedOptimizer(SGD(1.0, weight_decay=0.5))

    @tf.function
    def step(x):
        mine = [x if wire.topology.rank == 0 else None, x, None]
        optimizer.apply(mine, [here, shared, never])

    for _ in range(2):
        step(tf.constant([1.0]))
    # Each step halves the weight by decay, and subtracts the mean gradient, which is 0.5 for
    # `here`.
    np.testing.assert_allclose([here.numpy()[0], shared.numpy()[0]], [-0.5, -1.25])
    assert never.numpy()[0] == 1.0, "a variable without any gradient must not change"
    # Each rank notes its own missing gradients.
    notes = exchange_objects(str(optimizer.plan), wire, "notes")[1]
    assert "here: no gradient on rank 1, zeros are sent" in notes


def test_models_with_separate_optimizers_train_alternately(wire):
    trained = []
    for build in (models.mlp, models.cnn):
        start = build()
        data = build.data(4 * BATCH)
        reference = train_alone(models.copy(build, start), data, sgd())
        model = models.copy(build, start)
        model.compile(optimizer=tp.DistributedOptimizer(sgd()), loss=models.LOSS)
        trained.append((model, models.share(data, BATCH, wire.topology), reference))
    local = BATCH // wire.topology.size
    for step in range(4):
        for model, (x, y), _ in trained:
            part = slice(step * local, (step + 1) * local)
            model.train_on_batch(x[part], y[part])
    for model, _, reference in trained:
        check_equal(model.get_weights(), reference)
        same_on_all_ranks(model.get_weights(), wire)


def test_a_custom_loop_with_unequal_batches_equals_one_process(wire):
    data = models.mlp.data(4 * BATCH)
    start = models.mlp()
    reference = train_alone(models.copy(models.mlp, start), data, sgd())
    model = models.copy(models.mlp, start)
    optimizer = tp.DistributedOptimizer(sgd(), scheme="torus2d")

    @tf.function(reduce_retracing=True)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = models.LOSS(y, model(x, training=True)) + sum(model.losses) * 1.0
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables, sample_count=tf.shape(x)[0])

    for i in range(4):
        cut = BATCH * i + (5, 1, 11, 6)[i]
        mine = slice(BATCH * i, cut) if wire.topology.rank == 0 else slice(cut, BATCH * (i + 1))
        step(data[0][mine], data[1][mine])
    check_equal(model.get_weights(), reference)
    assert "exact for losses that are means over samples" in str(optimizer.plan)


def test_unequal_batches_in_fit_equal_one_process(wire):
    # The last batch has 6 samples on rank 0, and 2 on rank 1.
    x, y = models.mlp.data(BATCH + 8)
    start = models.mlp()
    reference = train_alone(models.copy(models.mlp, start), (x, y), sgd())
    mine = (
        [0, 1, 2, 3, 4, 5, 12, 13, 14, 15, 16, 17]
        if wire.topology.rank == 0
        else [6, 7, 8, 9, 10, 11, 18, 19]
    )
    for scheme in ("allreduce", SERVED, "hybcomm"):
        model = models.copy(models.mlp, start)
        model.compile(optimizer=distributed(sgd(), scheme=scheme), loss=models.LOSS)
        model.fit(x[mine], y[mine], batch_size=6, shuffle=False, verbose=0)
        check_equal(model.get_weights(), reference)


def test_empty_batches_are_ignored(wire):
    for steps in (None, 2):
        weight = keras.Variable([0.0], name="weight")
        optimizer = tp.DistributedOptimizer(SGD(1.0, gradient_accumulation_steps=steps))
        for _ in range(steps or 1):
            empty = wire.topology.rank == 1
            optimizer.apply(
                [tf.constant([np.nan if empty else 3.0])], [weight], sample_count=0 if empty else 5
            )
        np.testing.assert_allclose(weight.numpy(), [-3.0])


def test_bfloat16_variables_train_and_stay_equal(wire):
    keras.config.set_dtype_policy("bfloat16")
    model = models.cnn()
    model.compile(optimizer=tp.DistributedOptimizer(sgd(), scheme="alltoall"), loss=models.LOSS)
    before = [w.astype("float32") for w in model.get_weights()]
    model.fit(*models.cnn.data(8), batch_size=4, verbose=0)
    assert model.trainable_variables[0].dtype == "bfloat16"
    assert any(
        (w.astype("float32") != b).any() for w, b in zip(model.get_weights(), before, strict=True)
    )
    same_on_all_ranks(model.get_weights(), wire)


class TwoPlayers(keras.Model):
    """Model that trains its two parts in turn, and has no `call`, like a GAN."""

    def __init__(self):
        super().__init__(name="players")
        self.first = keras.layers.Dense(models.CLASSES, name="first")
        self.second = keras.layers.Dense(models.CLASSES, name="second")
        self.first.build((None, 20))
        self.second.build((None, 20))

    def train_step(self, data):
        x, y = data
        for player in (self.first, self.second):
            with tf.GradientTape() as tape:
                loss = models.LOSS(y, player(x))
            variables = player.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def test_a_custom_train_step_may_apply_several_updates(wire):
    model = TwoPlayers()
    optimizer = tp.DistributedOptimizer(sgd())
    optimizer.build(model.trainable_variables)
    model.compile(optimizer=optimizer)
    x, y = models.mlp.data(4 * (2 + wire.topology.rank))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4).filter(lambda *_: True)
    model.fit(data, epochs=2, verbose=0)
    assert int(optimizer.iterations) == 8, "expected two updates in each of two steps in two epochs"
    same_on_all_ranks(model.get_weights(), wire)
    assert sum(len(b.members) for b in optimizer.plan.buckets) == 4


def test_one_optimizer_trains_two_models(wire):
    shared = models.mlp()
    top = keras.Sequential([keras.Input((20,)), shared])
    optimizer = tp.DistributedOptimizer(sgd())
    for model in (shared, top):
        model.compile(optimizer=optimizer, loss=models.LOSS)
    x, y = models.mlp.data(4 * (2 + wire.topology.rank))
    unknown = tf.data.Dataset.from_tensor_slices((x, y)).batch(4).filter(lambda *_: True)
    shared.fit(*models.mlp.data(8), batch_size=4, verbose=0)
    top.fit(unknown, verbose=0)
    shared.fit(unknown, verbose=0)
    assert int(optimizer.iterations) == 6
    same_on_all_ranks(shared.get_weights(), wire)


def test_without_counts_the_gradient_is_a_mean_of_means(wire):
    weight = keras.Variable([0.0], name="weight")
    optimizer = tp.DistributedOptimizer(SGD(1.0))
    optimizer.apply([tf.constant([float(wire.topology.rank)])], [weight])
    np.testing.assert_allclose(weight.numpy(), [-0.5])
    assert "give a mean of means" in str(optimizer.plan)


def test_one_rank_may_load_a_saved_model(wire):
    model = models.mlp()
    optimizer = tp.DistributedOptimizer(
        SGD(0.1, momentum=0.9),
        scheme=[("kernel", tp.schemes.AllToAll(wire_dtype="float16")), (".*", "allreduce")],
    )
    model.compile(optimizer=optimizer, loss=models.LOSS)
    model.fit(*models.mlp.data(16), batch_size=8, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        model.save(path)
        # Only rank 0 loads the model, so loading must not wait for other ranks.
        loaded = keras.saving.load_model(path) if wire.topology.rank == 0 else model
    assert type(loaded.optimizer) is tp.DistributedOptimizer
    assert loaded.optimizer.get_config() == optimizer.get_config()
    for a, b in zip(loaded.optimizer.variables, optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())

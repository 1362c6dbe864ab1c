"""XLA compiles the gradients of Keras's train step, and exchanges run outside of XLA."""

import gc
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfposeidon as tp
from tests.helpers import models
from tests.helpers.checks import LogLines, Raises
from tests.helpers.models import same_on_all_ranks
from tests.helpers.training import (
    BATCH,
    SERVED,
    check_equal,
    distributed,
    sgd,
    train_alone,
    train_together,
)
from tfposeidon import native
from tfposeidon.training import xla

pytestmark = pytest.mark.ranks("2x1")


class SeesXla(keras.layers.Layer):
    """Records for each traced call whether XLA compiles it."""

    seen: list[bool] = []

    def call(self, inputs):
        if isinstance(inputs, tf.Tensor) and not tf.executing_eagerly():
            self.seen.append(native.in_xla())
        return inputs


def _watched(build):
    """Returns a model that records whether its calls are compiled."""
    inner = build()
    SeesXla.seen.clear()
    x = keras.Input(inner.input_shape[1:], dtype=inner.inputs[0].dtype)
    y = x
    for layer in inner.layers:
        y = y if isinstance(layer, keras.layers.InputLayer) else layer(y)
    return keras.Model(x, SeesXla()(y))


def _masked():
    layers = keras.layers
    embedded = layers.Embedding(11, 8, mask_zero=True)
    recurrent, inputs = layers.GRU(8, unroll=True), keras.Input((8,), dtype="int32")
    return keras.Sequential([inputs, embedded, recurrent, layers.Dense(models.CLASSES)])


_masked.data = models.embedding.data


class _SeesTraining(keras.layers.Layer):
    """Records the `training` argument of each traced call, whose default is False."""

    seen: list[object] = []

    def call(self, inputs, training=False):
        self.seen.append(training)
        return inputs


def _dropped():
    layers = keras.layers
    inputs = keras.Input((20,), batch_size=BATCH)
    # Keras records `training=False` in the nodes of the first two layers.
    x = layers.Dropout(0.0)(_SeesTraining()(inputs))
    x = layers.BatchNormalization()(layers.Dense(8)(x))
    return keras.Model(inputs, layers.Dense(models.CLASSES)(x))


def _residual():
    layers, inputs = keras.layers, keras.Input((20,))
    x = layers.Dense(20, activation="relu")(inputs)
    shared = layers.Dense(20)
    x = layers.Add()([x, shared(x), inputs])
    return keras.Model(inputs, layers.Dense(models.CLASSES)(x + shared(x)))


_residual.data = models.mlp.data


@pytest.mark.parametrize(
    ("build", "functions"),
    [
        (models.mlp, None),
        (models.attention, None),
        (models.cnn, 3),
        (models.normalized, 2),
        (models.attention, 2),
        (_masked, 3),
        (_residual, 3),
    ],
)
def test_compiled_gradients_equal_one_process(wire, build, functions):
    keras.utils.set_random_seed(1)
    start, data = build(), build.data(4 * BATCH)
    reference = train_alone(models.copy(build, start), data, sgd())
    model = models.copy(build, start)
    optimizer = distributed(sgd(), "allreduce", xla_segments=functions)
    options = {} if functions else {"jit_compile": True}
    weights = train_together(model, data, optimizer, wire, options)
    same_on_all_ranks([v.numpy() for v in model.trainable_variables], wire)
    # Batch statistics and random flips of a share differ from those of the whole batch.
    if build is not models.normalized:
        check_equal(weights, reference)
    assert f"XLA compiles the gradients in {functions or 1} function(s)" in str(optimizer.plan)


@pytest.mark.parametrize("functions", [0, 1, 3])
def test_segments_run_in_xla(wire, functions):
    model = _watched(models.cnn)
    optimizer = distributed(sgd(), xla_segments=functions or None)
    with LogLines() as lines:
        train_together(model, models.cnn.data(BATCH), optimizer, wire)
    assert (True in SeesXla.seen) is bool(functions)
    assert not model.jit_compile, "evaluation must follow compile"
    said = [line for line in lines if "XLA compiles" in line]
    assert len(said) == (wire.topology.rank == 0 and bool(functions))


@pytest.mark.parametrize(
    ("scheme", "options", "compiles", "functions"),
    [
        (SERVED, {}, {"steps_per_execution": 2}, 3),
        ("hybcomm", {}, {}, 2),
        ("allreduce", {"gradient_accumulation_steps": 2}, {}, 1),
    ],
)
def test_compiled_steps_equal_steps_without_xla(wire, scheme, options, compiles, functions):
    """Unequal batches, accumulation, loss scales and rows of embeddings work as without XLA."""

    def trained(segments):
        keras.utils.set_random_seed(1)
        model = models.embedding()
        optimizer = distributed(sgd(), scheme, xla_segments=segments, **options)
        scaled = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
        model.compile(scaled, models.LOSS, **compiles)
        mine = tp.shard(models.embedding.data(4 * BATCH + 1))
        fit = model.fit(*mine, batch_size=5, epochs=2, shuffle=False, verbose=0)
        same_on_all_ranks(model.get_weights(), wire)
        return [*model.get_weights(), np.asarray(fit.history["loss"])]

    check_equal(trained(functions), trained(None))


def test_segments_train_in_training_mode(wire):
    """Statistics move, `training` is passed, and the static batch of an input is not required."""

    def trained(segments):
        keras.utils.set_random_seed(1)
        model = _dropped()
        _SeesTraining.seen.clear()
        model.compile(tp.DistributedOptimizer(sgd(), xla_segments=segments), models.LOSS)
        x, y = models.mlp.data(2 * BATCH)
        for count in (BATCH, BATCH // 2):
            model.train_on_batch(x[:count], y[:count])
        assert _SeesTraining.seen
        assert {bool(one) for one in _SeesTraining.seen[-2:]} == {True}
        return model.get_weights()

    check_equal(trained(3), trained(None))


class _Subclass(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(8, activation="silu")
        self.dense = keras.layers.Dense(models.CLASSES)

    def call(self, inputs):
        return self.dense(self.hidden(inputs["x"]) * keras.ops.mean(inputs["factor"]))


def _with_penalty():
    inputs = keras.Input((20,))
    x = keras.layers.Dense(8, activity_regularizer="l2")(inputs)
    return keras.Model(inputs, keras.layers.Dense(models.CLASSES)(x))


def _looped():
    layers = keras.layers
    stack = layers.Embedding(11, 8, mask_zero=True), layers.Dense(8), layers.GRU(8)
    return keras.Sequential([keras.Input((8,), dtype="int32"), *stack, layers.Dense(5)])


@pytest.mark.parametrize("build", [_Subclass, _with_penalty, _looped])
def test_several_functions_train_any_model(wire, build):
    """Custom gradients, nested inputs, losses of layers and loops give the same weights."""
    data = (models.mlp if build in (_Subclass, _with_penalty) else models.embedding).data(BATCH)
    if build is _Subclass:
        # The batch also contains integers, and its names are not in alphabetical order.
        data = {"x": data[0], "factor": np.arange(1, BATCH + 1)}, data[1]

    def trained(segments):
        keras.utils.set_random_seed(1)
        model = build()
        optimizer = tp.DistributedOptimizer(sgd(), "allreduce", xla_segments=segments)
        model.compile(optimizer, models.LOSS, metrics=["accuracy"])
        fit = model.fit(*data, batch_size=BATCH // 2, shuffle=False, verbose=0)
        return [*model.get_weights(), np.asarray(fit.history["loss"])]

    check_equal(trained(2), trained(None))


def test_each_function_computes_a_part_of_the_gradients(wire):
    kinds = []
    run = xla._run_part

    def watched(graph, operations, *rest):
        kinds.append([one.type for one in operations])
        return run(graph, operations, *rest)

    model = keras.Sequential([keras.Input((20,)), *(keras.layers.Dense(20) for _ in range(6))])
    model.compile(tp.DistributedOptimizer(sgd(), xla_segments=3), "mse")
    x, _ = models.mlp.data(BATCH)
    with mock.patch.object(xla, "_run_part", watched):
        model.train_on_batch(x, x)
    # Six layers multiply forward; backward, the first one multiplies once, and the others twice.
    assert [part.count("MatMul") for part in kinds] == [6 + 4, 4, 3]


def test_a_weight_without_gradient_is_allowed(wire):
    inputs = keras.Input((20,))
    unused = keras.layers.Dense(3, name="unused")
    outputs = keras.layers.Dense(models.CLASSES)(inputs)
    model = keras.Model(inputs, [outputs, unused(inputs)])
    model.compile(tp.DistributedOptimizer(sgd(), xla_segments=2), [models.LOSS, None])
    model.train_on_batch(*models.mlp.data(BATCH))


def test_loops_run_after_the_graph_of_the_trace_is_collected(wire):
    model = _looped()
    model.compile(tp.DistributedOptimizer(sgd(), xla_segments=2), models.LOSS)
    for seed in range(2):
        model.train_on_batch(*models.embedding.data(BATCH))
        gc.collect()
        # TensorFlow instantiates its functions again.
        keras.utils.set_random_seed(seed)


def test_an_optional_input_may_be_missing(wire):
    inputs, more = keras.Input((20,), name="x"), keras.Input((20,), name="more", optional=True)

    class Adds(keras.layers.Layer):
        def call(self, x, more=None):
            return x if more is None else x + more

    added = keras.layers.Dense(models.CLASSES)(Adds()(inputs, more))
    model = keras.Model([inputs, more], added)
    model.compile(tp.DistributedOptimizer(sgd(), xla_segments=2), models.LOSS)
    x, y = models.mlp.data(BATCH)
    model.train_on_batch([x, None], y)


def test_another_optimizer_ends_the_use_of_xla(wire):
    model, data = _watched(models.mlp), models.mlp.data(BATCH)
    optimizer = tp.DistributedOptimizer(sgd(), "allreduce", xla_segments=1)
    model.compile(optimizer, models.LOSS)
    own = optimizer.apply = mock.Mock(side_effect=optimizer.apply)
    model.fit(*data, verbose=0)
    assert optimizer.apply is own, "a method that the user replaced must be called"
    assert own.called
    SeesXla.seen.clear()
    model.compile(sgd(), models.LOSS, jit_compile=False)
    model.train_on_batch(*data)
    assert True not in SeesXla.seen


def test_an_optimizer_keeps_its_number_of_compiled_functions(wire):
    model, optimizer = models.mlp(), tp.DistributedOptimizer(sgd())
    model.compile(optimizer, models.LOSS)
    model.fit(*models.mlp.data(BATCH), verbose=0)
    model.compile(optimizer, models.LOSS, jit_compile=True)
    with Raises(ValueError, "same number of functions.*1 instead of 0.*new optimizer"):
        model.fit(*models.mlp.data(BATCH), verbose=0)


def test_collectives_in_compiled_functions_are_refused(wire):
    model = keras.Sequential([models.mlp(), keras.layers.Lambda(lambda x: tp.all_reduce(x))])
    model.compile(tp.DistributedOptimizer(sgd()), models.LOSS, jit_compile=True)
    with Raises(ValueError, "must run without XLA.*tp.all_reduce"):
        model.train_on_batch(*models.mlp.data(BATCH))


def test_factors_name_xla_as_the_reason(wire):
    model = models.mlp()
    model.compile(tp.DistributedOptimizer(sgd(), "factors"), models.LOSS, jit_compile=True)
    with Raises(ValueError, "has no factors.*that XLA compiles"):
        model.fit(*models.mlp.data(BATCH), verbose=0)


def test_local_weights_train_with_compiled_gradients(wire):
    def trained(**options):
        keras.utils.set_random_seed(1)
        model = models.mlp()
        optimizer = tp.LocalUpdates(sgd(), sync_every=2, hierarchical=False)
        model.compile(optimizer, models.LOSS, **options)
        model.fit(*tp.shard(models.mlp.data(48)), batch_size=6, shuffle=False, verbose=0)
        return model.get_weights()

    check_equal(trained(jit_compile=True), trained())


def test_train_on_batch_compiles_a_model_that_is_not_built(wire):
    def trained(**options):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(models.CLASSES)])
        optimizer = tp.DistributedOptimizer(sgd(), "allreduce")
        scaled = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
        model.compile(scaled, models.LOSS, **options)
        for count in (6, 6, 4):
            model.train_on_batch(*models.mlp.data(count))
        return model.get_weights()

    check_equal(trained(jit_compile=True), trained())


class _OwnStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


def _own_step():
    inputs = keras.Input((20,))
    return _OwnStep(inputs, keras.layers.Dense(models.CLASSES)(inputs))


@pytest.mark.parametrize(
    ("build", "segments", "options", "reason"),
    [
        (_own_step, None, {"jit_compile": True}, "own train_step.*_OwnStep.*jit_compile=False"),
        (_own_step, 2, {}, "own train_step.*xla_segments=2.*Leave xla_segments out"),
        (models.mlp, 1, {"run_eagerly": True}, "traced steps.*run_eagerly=True"),
        (models.mlp, 9, {}, "at most the number of gradients.*9 and 4.*xla_segments=1"),
    ],
)
def test_steps_that_xla_cannot_compile_are_refused(wire, build, segments, options, reason):
    model = build()
    model.compile(tp.DistributedOptimizer(sgd(), xla_segments=segments), models.LOSS, **options)
    with Raises(ValueError, reason):
        model.fit(*models.mlp.data(BATCH), verbose=0)


def test_numbers_of_segments_outside_of_the_range_are_refused():
    with Raises(ValueError, "xla_segments.*>= 1.*0"):
        tp.DistributedOptimizer(sgd(), xla_segments=0)


def test_ranks_must_compile_the_same_number_of_functions(wire):
    model = models.mlp()
    segments = 1 + wire.topology.rank
    model.compile(tp.DistributedOptimizer(sgd(), xla_segments=segments), models.LOSS)
    with Raises(RuntimeError, "functions compiled by XLA"):
        model.fit(*models.mlp.data(BATCH), verbose=0)


@pytest.mark.parametrize(("asked", "segments"), [(True, None), ("auto", None), ("auto", 1)])
def test_only_the_optimizer_enables_xla_if_there_is_a_gpu(wire, asked, segments):
    """With a GPU, Keras stores `jit_compile="auto"` as True."""
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    with (
        mock.patch.object(tf.config, "list_physical_devices", return_value=[gpu]),
        LogLines() as lines,
    ):
        model = models.mlp()
        optimizer = tp.DistributedOptimizer(sgd(), xla_segments=segments)
        model.compile(optimizer, models.LOSS, jit_compile=asked)
        model.fit(*models.mlp.data(8), verbose=0)
        assert model.jit_compile is True, "evaluation must use XLA"
    said = [line for line in lines if "XLA compiles no part" in line]
    assert len(said) == (wire.topology.rank == 0 and segments is None)
    assert ("XLA compiles" in str(optimizer.plan)) is bool(segments)

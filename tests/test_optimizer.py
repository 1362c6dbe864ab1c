"""Tests the optimizer on one rank without a launcher."""

import copy
import json
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_callbacks
import tfposeidon as tp
from tests.helpers import models
from tfposeidon import native, policies, schemes
from tfposeidon.communication import runtime
from tfposeidon.exchange.means import Means
from tfposeidon.training import entries
from tfposeidon.training.session import optimizers_of

SGD = keras.optimizers.SGD


def trained(optimizer, **options):
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    model = models.mlp()
    model.compile(optimizer=optimizer, loss=models.LOSS, **options)
    model.fit(*models.mlp.data(32), batch_size=8, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize(
    "options", [{}, {"run_eagerly": True}, {"steps_per_execution": 2}, {"jit_compile": True}]
)
def test_one_rank_trains_as_keras_does(options):
    plain = trained(SGD(0.1, momentum=0.9), **options)
    ours = trained(tp.DistributedOptimizer(SGD(0.1, momentum=0.9)), **options)
    for a, b in zip(plain.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert "one rank: no data is sent" in str(ours.optimizer.plan)


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}, {"steps_per_execution": 2}])
def test_one_rank_applies_the_momentum_of_sparse_schemes(options):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.1, 0.03])
    plain = trained(SGD(schedule, momentum=0.9), **options)
    ours = trained(tp.DistributedOptimizer(SGD(schedule), schemes.HiTopK(momentum=0.9)), **options)
    for a, b in zip(plain.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_accumulation_equals_keras():
    plain = trained(SGD(0.1, momentum=0.9, gradient_accumulation_steps=2))
    ours = trained(tp.DistributedOptimizer(SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)))
    for a, b in zip(plain.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_an_empty_list_of_gradients_changes_nothing():
    optimizer = tp.DistributedOptimizer(SGD(0.1))
    optimizer.apply([])
    optimizer.apply_gradients([])
    assert int(optimizer.iterations) == 0


def test_learning_rate_and_iterations_are_those_of_the_inner_optimizer():
    model = trained(tp.DistributedOptimizer(SGD(0.1)))
    model.optimizer.learning_rate = 0.25
    assert float(model.optimizer.inner_optimizer.learning_rate) == 0.25
    assert int(model.optimizer.iterations) == 4
    assert model.optimizer.variables == model.optimizer.inner_optimizer.variables


def test_fractions_of_an_epoch_are_those_of_each_fit():
    model = models.mlp()
    model.compile(optimizer=tp.DistributedOptimizer(SGD(1.0)), loss=models.LOSS)
    schedule = keras_callbacks.LearningRateSchedule(
        1.0, lambda epoch: 1.0 + epoch, end_epoch=1, staircase=False
    )
    rates = []
    seen = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: rates.append(float(model.optimizer.learning_rate))
    )
    for samples in (32, 16):
        data = models.mlp.data(samples)
        model.fit(*data, batch_size=8, epochs=2, verbose=0, callbacks=[schedule, seen])
    # From `end_epoch` on, the last rate remains.
    assert rates == pytest.approx([1.0, 1.25, 1.5, 1.75, *[1.75] * 4, 1.0, 1.5, *[1.5] * 2])


def test_schedules_determine_the_learning_rate():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    model = trained(tp.DistributedOptimizer(SGD(schedule)))
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1 * 0.5**2)


@pytest.mark.parametrize("accumulation", [None, 3])
def test_saved_models_load_and_continue_training(tmp_path, accumulation):
    inner = keras.optimizers.Adam(0.01, gradient_accumulation_steps=accumulation)
    model = trained(
        tp.DistributedOptimizer(
            inner, scheme=schemes.AllToAll(wire_dtype="bfloat16"), bucket_bytes=77
        )
    )
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    assert loaded.optimizer.gradient_accumulation_steps == accumulation
    assert loaded.optimizer.exchange.plans.bucket_bytes == 77
    for a, b in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    loaded.fit(*models.mlp.data(16), verbose=0)


@pytest.mark.parametrize("variables", [{"RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "2"}])
def test_loading_needs_no_complete_variables_of_a_platform(tmp_path, monkeypatch, variables):
    """Loading starts no ranks; the first call that needs ranks does."""
    model = trained(tp.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    model.save(tmp_path / "model.keras")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name in ("init", "wire"):
        monkeypatch.setattr(runtime, name, mock.Mock(side_effect=AssertionError(name)))
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, tp.DistributedOptimizer)
    assert int(loaded.optimizer.iterations) == 4
    x, y = models.mlp.data(8)
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    assert loaded.evaluate(x, y, verbose=0) > 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "compression",
            """Horovod's.. Received: compression=4: the scheme.*AllToAll.wire_dtype="float16\"""",
        ),
        ("backward_passes_per_step", "use gradient_accumulation_steps for 2 or more"),
        ("num_groups", "use bucket_bytes"),
        ("shceme", "Received: shceme=4: DistributedOptimizer has no argument `shceme`"),
    ],
)
def test_unknown_arguments_are_refused(name, message):
    with pytest.raises(TypeError, match=message):
        tp.DistributedOptimizer(SGD(0.1), **{name: 4})


def test_all_wrong_arguments_are_named_at_once():
    with pytest.raises(TypeError, match=r"op=1: leave it out.*; groups=2: use bucket_bytes"):
        tp.DistributedOptimizer(SGD(0.1), op=1, groups=2)
    with pytest.raises(TypeError, match=r"initial_lr=0.1: use initial_.*; verbose=1: leave it"):
        keras_callbacks.LearningRateWarmup(initial_lr=0.1, warmup_epochs=5, verbose=1)
    with pytest.raises(TypeError, match=r"initial_lr=0.1: use initial_learning_rate"):
        keras_callbacks.LearningRateSchedule(initial_lr=0.1, multiplier=0.5)
    with pytest.raises(TypeError, match="`multiplier` must be a number or a function"):
        keras_callbacks.LearningRateSchedule(0.1)


def test_from_config_does_not_change_the_config():
    config = tp.DistributedOptimizer(SGD(0.3), scheme="alltoall").get_config()
    before = copy.deepcopy(config)
    for _ in range(2):
        made = tp.DistributedOptimizer.from_config(config)
        assert config == before
        assert float(made.learning_rate) == pytest.approx(0.3)


def test_set_weights_assigns_the_inner_variables():
    model = trained(tp.DistributedOptimizer(SGD(0.1, momentum=0.9)))
    values = [variable.numpy() for variable in model.optimizer.variables]
    other = trained(tp.DistributedOptimizer(SGD(0.5, momentum=0.5)))
    other.optimizer.set_weights(values)
    for variable, value in zip(other.optimizer.inner_optimizer.variables, values, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    with pytest.raises(
        ValueError, match=r"one array for each of the optimizer's variables.*Received: shapes \[\]"
    ):
        other.optimizer.set_weights([])
    with pytest.raises(ValueError, match=r"must be built before its weights are set"):
        tp.DistributedOptimizer(SGD(0.1)).set_weights(values)


def test_optimizer_state_is_saved_once(tmp_path):
    model = trained(tp.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    model.save(tmp_path / "ours.keras")
    model.compile(optimizer=model.optimizer.inner_optimizer, loss=models.LOSS)
    model.save(tmp_path / "plain.keras")
    ours, plain = ((tmp_path / name).stat().st_size for name in ("ours.keras", "plain.keras"))
    assert ours < 1.2 * plain


@pytest.fixture
def mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.usefixtures("mixed_float16")
def test_auto_scale_loss_false_is_respected():
    model = models.mlp()
    model.compile(
        optimizer=tp.DistributedOptimizer(SGD(0.1)), loss=models.LOSS, auto_scale_loss=False
    )
    model.fit(*models.mlp.data(8), verbose=0)
    assert type(model.optimizer.inner_optimizer) is SGD


@pytest.mark.usefixtures("mixed_float16")
@pytest.mark.parametrize("swap_on_epoch", [False, True])
def test_validation_uses_swapped_averages_under_a_loss_scale(swap_on_epoch):
    start, (x, y) = models.mlp(), models.mlp.data(16)
    losses = []
    for wrap in (tp.DistributedOptimizer, lambda optimizer: optimizer):
        model = models.copy(models.mlp, start)
        model.compile(optimizer=wrap(SGD(0.5, use_ema=True, ema_momentum=0.5)), loss=models.LOSS)
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch)
        fit = model.fit(
            x,
            y,
            batch_size=4,
            epochs=2,
            shuffle=False,
            verbose=0,
            validation_data=(x, y),
            callbacks=[swap],
        )
        losses.append(fit.history["val_loss"])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)
    assert len(model.optimizer.variables) < 30, "each average must be saved once"


class _SeesXla(keras.layers.Layer):
    """Records for each traced step whether XLA compiles it."""

    def __init__(self):
        super().__init__(name="sees_xla")
        self.seen = []

    def call(self, inputs):
        if isinstance(inputs, tf.Tensor) and not tf.executing_eagerly():
            self.seen.append(native.in_xla())
        return inputs


@pytest.mark.parametrize("asked", [True, "auto", False])
@pytest.mark.parametrize(
    ("scheme", "suits"),
    [("allreduce", True), ("hitopk", False), ([("x", "topk")], False)],
)
def test_one_rank_leaves_xla_to_keras_unless_schemes_have_state(scheme, suits, asked):
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    noting = _SeesXla()
    model = keras.Sequential([models.mlp(), noting])
    with mock.patch.object(tf.config, "list_physical_devices", return_value=[gpu]):
        optimizer = tp.DistributedOptimizer(SGD(0.1), scheme=scheme)
        model.compile(optimizer=optimizer, loss=models.LOSS, jit_compile=asked)
        noting.seen.clear()
        model.train_on_batch(*models.mlp.data(4))
    assert set(noting.seen) == {bool(asked) and suits}
    noting.seen.clear()
    model.test_on_batch(*models.mlp.data(4))
    assert set(noting.seen) == {bool(asked)}, "evaluation must use XLA"
    assert model.jit_compile is bool(asked)


class _CompilesItself(keras.Model):
    """Model that sets its optimizers after Keras's `compile`, like the GANs of keras.io."""

    def __init__(self):
        super().__init__()
        self.inside, self.noting = models.mlp(), _SeesXla()

    def compile(self, own):
        super().compile()
        self.own = own

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = models.LOSS(data[1], self.noting(self.inside(data[0])))
        weights = self.inside.trainable_variables
        self.own.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@pytest.mark.parametrize(("scheme", "wanted"), [("allreduce", True), ("hitopk", False)])
def test_xla_depends_on_the_scheme_of_optimizers_assigned_after_compile(scheme, wanted):
    model = _CompilesItself()
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    with mock.patch.object(tf.config, "list_physical_devices", return_value=[gpu]):
        model.compile(tp.DistributedOptimizer(SGD(0.1), scheme=scheme))
        assert model.jit_compile
        model.train_on_batch(*models.mlp.data(4))
    assert set(model.noting.seen) == {wanted}


def test_a_compiled_inner_model_keeps_its_optimizer():
    encoder = models.mlp()
    encoder.compile(tp.DistributedOptimizer(SGD(0.1)), models.LOSS)
    probe = keras.Sequential([encoder, keras.layers.Dense(2)])
    probe.compile("sgd", "mse")
    assert optimizers_of(probe) == []
    assert optimizers_of(encoder) == [encoder.optimizer]


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_accumulation_of_missing_gradients_equals_keras():
    """A variable without a gradient in the last call of an update is not updated, and is reset."""
    present = [(1, 1), (1, 0), (0, 1), (1, 1), (1, 1), (1, 0), (0, 1), (1, 1)]
    ends = []
    for wrap in (tp.DistributedOptimizer, lambda optimizer: optimizer):
        optimizer = wrap(SGD(0.1, momentum=0.9, gradient_accumulation_steps=2))
        variables = [keras.Variable([1.0], name="a"), keras.Variable([2.0], name="b")]
        optimizer.build(variables)
        for step, flags in enumerate(present):
            grads = [
                tf.constant([step + 1.0 + 10 * i]) if flag else None for i, flag in enumerate(flags)
            ]
            optimizer.apply(grads, variables)
        ends.append([float(v.numpy()[0]) for v in variables])
    np.testing.assert_allclose(*ends, rtol=1e-6)


def test_partially_missing_groups_of_gradients_are_refused():
    """Other ranks would update some of the group's variables, but this rank all or none."""
    there = tf.constant([True, True, False])
    means = Means([tf.zeros(2)] * 3, missing=([1, 2],), present=there, expected=there)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Received: gradients for only some"):
        means.update(lambda found: None)


def test_unbuilt_layers_have_no_assets():
    model = models.mlp()
    model.back = keras.layers.Normalization(mean=[1.0], variance=[2.0], invert=True)
    assert entries.read_layers(model) == {}


def _forever():
    x, y = models.mlp.data(8)
    while True:
        yield x, y


class _NoCall(keras.Model):
    def train_step(self, data):
        return {"parts": tf.cast(len(data), tf.float32)}


@pytest.mark.filterwarnings("ignore")
def test_one_rank_trains_on_all_kinds_of_data():
    model = trained(tp.DistributedOptimizer(SGD(0.1)))
    model.fit(_forever(), steps_per_epoch=2, verbose=0)
    data = tf.data.Dataset.from_tensor_slices(models.mlp.data(16)).batch(4)
    model.fit(data.filter(lambda *_: True), epochs=2, verbose=0)
    model.fit(data, steps_per_epoch=3, epochs=2, verbose=0)
    model.fit(*models.mlp.data(8), verbose=0, callbacks=[keras.callbacks.TerminateOnNaN()])
    assert int(model.optimizer.iterations) == 4 + 2 + 8 + 6 + 1
    parts = _NoCall()
    parts.compile(optimizer=tp.DistributedOptimizer(SGD(0.1)))
    four = tf.data.Dataset.from_tensors(tuple(tf.zeros([2, 1]) for _ in range(4)))
    assert parts.fit(four, verbose=0).history["parts"] == [4.0]


def test_exclusions_from_weight_decay_reach_the_inner_optimizer():
    optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.1, weight_decay=0.5))
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    kernel, bias = keras.Variable([1.0], name="kernel"), keras.Variable([1.0], name="bias")
    optimizer.apply([tf.constant([0.0])] * 2, [kernel, bias])
    np.testing.assert_allclose([kernel.numpy()[0], bias.numpy()[0]], [0.95, 1.0])


def test_rules_select_variables_by_path():
    policy = policies.parse(
        [("bias", "allreduce"), ("kernel", tp.schemes.AllToAll(wire_dtype="float16"))]
    )
    optimizer = tp.DistributedOptimizer(SGD(), scheme=policy)
    optimizer.build(models.mlp().trainable_variables)
    chosen = {
        d.path.rpartition("/")[2]: str(b.scheme)
        for b in optimizer.plan.buckets
        for d in b.descriptions
    }
    assert chosen == {"bias": "allreduce", "kernel": "alltoall(wire_dtype=float16)"}
    assert "rule 'kernel'" in str(optimizer.plan)


@keras.saving.register_keras_serializable("test_optimizer")
def _count_labels(data):
    return tf.size(data[1])


COUNTS = {None: 4, tp.sample_counts.weights: 4.0, tp.sample_counts.equal: 1.0, _count_labels: 8}
COUNTS[tp.sample_counts.Unmasked(padding=-1)] = 7


@pytest.mark.parametrize("sample_count", COUNTS)
def test_sample_count_is_saved(sample_count):
    optimizer = tp.DistributedOptimizer(SGD(0.1), sample_count=sample_count)
    config = json.loads(json.dumps(optimizer.get_config()))
    again = tp.DistributedOptimizer.from_config(config)
    assert again.get_config() == optimizer.get_config()
    labels = tf.constant([[-1, 0], [1, 2], [3, 4], [0, 0]])
    with again.exchange.batch.counting(
        (tf.zeros([4, 3]), labels, tf.constant([0.5, 1.0, 1.0, 1.5]))
    ):
        assert float(again.exchange.batch.current) == COUNTS[sample_count]


def test_sample_counts_refuse_uncountable_batches():
    with pytest.raises(
        TypeError, match=r"`sample_count` must be a function.*Received: sample_count=8.*to `apply`"
    ):
        tp.DistributedOptimizer(SGD(0.1), sample_count=8)
    with pytest.raises(ValueError, match=r"`of` must be \"x\" or \"y\"\. Received: of='z'"):
        tp.sample_counts.Unmasked(of="z")
    pair = (tf.zeros([2]), tf.zeros([2]))
    with pytest.raises(ValueError, match=r"requires batches \(x, y, sample_weight\)"):
        tp.sample_counts.weights(pair)
    with pytest.raises(ValueError, match=r"'x' must be a single tensor, .* Received: 2 tensors"):
        tp.sample_counts.Unmasked(of="x")((pair, tf.zeros([2])))

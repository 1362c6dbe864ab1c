"""Compares Keras's loss scale around our optimizers with training by Keras alone."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_callbacks
import tfposeidon as tp
from tests.helpers import models
from tests.helpers.callbacks import shared_folder
from tests.helpers.checkpoints import BETWEEN_AND_WITHIN, check_resumes
from tests.helpers.checks import LogLines, Raises
from tests.helpers.models import rank_variables, same_on_all_ranks
from tests.helpers.several_optimizers import Gan, gan_data
from tests.helpers.training import BATCH, check_close, train_alone, train_together
from tfposeidon.training import session

Adam, SGD, Scaled = keras.optimizers.Adam, keras.optimizers.SGD, keras.optimizers.LossScaleOptimizer
ours = tp.DistributedOptimizer
DATA = models.mlp.data(16)


@pytest.fixture(autouse=True)
def _mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


def _mlp():
    # Set the policy here, too, because `clear_session` resets it.
    keras.config.set_dtype_policy("mixed_float16")
    return models.mlp()


def _compiled(optimizer, **options):
    model = _mlp()
    model.compile(optimizer, models.LOSS, **options)
    return model


def _fit(model, data=DATA, **options):
    model.fit(*data, **{"batch_size": 4, "shuffle": False, "verbose": 0} | options)
    return model


def _state(model):
    return [v.numpy() for v in (*model.variables, *model.optimizer.variables)]


def _check_same(model, other):
    for one, value in zip(_state(model), _state(other), strict=True):
        np.testing.assert_array_equal(one, value)


# ------------------------------------------------------------------ on one rank


def test_compile_wraps_our_optimizer_in_a_loss_scale():
    model = _fit(_compiled(ours(SGD(0.1))))
    assert type(model.optimizer) is Scaled
    assert type(tp.unwrap(model.optimizer)) is ours
    assert int(model.optimizer.step_counter) == int(model.optimizer.iterations) == 4
    assert tp.unwrap(tp.unwrap(model.optimizer)) is model.optimizer.inner_optimizer


def test_loss_scales_of_other_optimizers_do_not_change():
    ours(SGD(0.1))
    weight, scaled = keras.Variable([1.0]), Scaled(SGD(0.5), initial_scale=4.0)
    scaled.apply([tf.constant([4.0])], [weight])
    scaled.apply_gradients([(tf.constant([np.inf]), weight)])
    assert float(weight[0]) == 0.5
    assert float(scaled.dynamic_scale) == 2.0
    with pytest.raises(TypeError, match="sample_count"):
        scaled.apply([tf.constant([4.0])], [weight], sample_count=2)


@pytest.mark.parametrize("auto", [True, False])
def test_an_inner_loss_scale_factor_acts_as_in_keras(auto):
    start, trained = models.mlp(), []
    for wrap in (ours, lambda optimizer: optimizer):
        model = models.copy(models.mlp, start)
        optimizer = wrap(SGD(0.1, loss_scale_factor=64.0))
        model.compile(optimizer, models.LOSS, auto_scale_loss=auto)
        trained.append(_fit(model).get_weights())
    for one, other in zip(*trained, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_an_already_built_optimizer_is_wrapped():
    model, optimizer = models.mlp(), ours(Adam())
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, models.LOSS)
    assert int(_fit(model).optimizer.step_counter) == 4


def test_variables_have_the_names_and_shapes_of_keras():
    found = []
    for optimizer in (ours(Adam()), Adam()):
        keras.utils.clear_session(free_memory=False)
        found.append([(v.name, v.shape) for v in _fit(_compiled(optimizer)).optimizer.variables])
    assert found[0] == found[1]


def test_the_learning_rate_is_set_through_the_loss_scale():
    model = _compiled(ours(SGD(0.1)))
    model.optimizer.learning_rate = 0.05
    assert float(tp.unwrap(model.optimizer).learning_rate) == pytest.approx(0.05)
    halves = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.1, patience=0, min_delta=100.0)
    _fit(model, epochs=2, callbacks=[halves, plateau])
    assert float(model.optimizer.learning_rate) == pytest.approx(0.05 / 40)
    _fit(model, callbacks=[keras_callbacks.LearningRateSchedule(0.3, 1.0)])
    assert float(model.optimizer.learning_rate) == pytest.approx(0.3)


def _wrapped(around):
    return {
        "by compile": lambda: ours(Adam(0.01)),
        "by hand": lambda: Scaled(ours(Adam(0.01)), initial_scale=8.0),
        "accumulating": lambda: ours(Adam(0.01), gradient_accumulation_steps=2),
        "local": lambda: tp.LocalUpdates(Adam(0.01), 2, "outer"),
    }[around]()


# Keras alone also warns if the saved optimizer was not built.
@pytest.mark.filterwarnings("ignore:Skipping variable loading")
@pytest.mark.parametrize(
    ("around", "steps"),
    [
        *((around, "built") for around in ("by compile", "by hand", "accumulating", "local")),
        ("by compile", "never trained"),
        ("accumulating", "trained"),
    ],
)
def test_a_saved_model_continues_training(tmp_path, around, steps):
    model = _compiled(_wrapped(around))
    if steps == "built":
        model.optimizer.build(model.trainable_variables)
    elif steps == "trained":
        _fit(model)
    path = tmp_path / "model.keras"
    for _ in range(2):
        model.save(path)
        loaded = keras.models.load_model(path)
        assert type(loaded.optimizer) is Scaled
        assert tp.unwrap(loaded.optimizer).get_config() == tp.unwrap(model.optimizer).get_config()
        assert loaded.optimizer.initial_scale == model.optimizer.initial_scale
        if steps != "never trained":
            _check_same(loaded, model)
        _check_same(_fit(loaded), _fit(model))
        model, steps = loaded, "trained"


@pytest.mark.parametrize("into", ["trained", "never trained"])
def test_saved_weights_continue_training(tmp_path, into):
    model, other = _fit(_compiled(ours(Adam(0.01)))), _compiled(ours(Adam(0.01)))
    if into == "trained":
        _fit(other, models.mlp.data(8), epochs=3)
    else:
        other.optimizer.build(other.trainable_variables)
    for saved, loaded in ((model, other), (other, model)):
        saved.save_weights(tmp_path / "model.weights.h5")
        loaded.load_weights(tmp_path / "model.weights.h5")
        _check_same(loaded, saved)
        _check_same(_fit(loaded), _fit(saved))


def test_clones_configs_and_tensorflow_checkpoints_restore_the_state(tmp_path):
    model = _fit(_compiled(ours(Adam(0.01))))
    scaled = model.optimizer
    again = Scaled.from_config(scaled.get_config())
    assert again.get_config() == scaled.get_config()
    assert type(tp.unwrap(again)) is ours
    clone = keras.models.clone_model(model)
    assert tp.unwrap(clone.optimizer) is not tp.unwrap(scaled)
    assert int(_fit(clone).optimizer.iterations) == 4
    assert type(tp.unwrap(clone.optimizer).inner_optimizer) is Adam
    checkpoint = tf.train.Checkpoint(model=model, optimizer=scaled)
    path, before = checkpoint.save(tmp_path / "checkpoint"), _state(model)
    _fit(model)
    checkpoint.restore(path).assert_consumed()
    for value, now in zip(before, _state(model), strict=True):
        np.testing.assert_array_equal(value, now)
    model.export(tmp_path / "exported", verbose=False)
    tree = model.get_state_tree("numpy_array")
    _fit(model)
    model.set_state_tree(tree)
    for value, now in zip(before, _state(model), strict=True):
        np.testing.assert_array_equal(value, now)


def test_recompiling_retains_the_state_of_the_given_optimizer():
    optimizer = ours(Adam(0.01))
    model = _fit(_compiled(optimizer))
    first = model.optimizer
    model.compile(first, models.LOSS)
    assert int(_fit(model).optimizer.step_counter) == 8
    assert model.optimizer is first
    model.compile(optimizer, models.LOSS)
    assert int(_fit(model).optimizer.step_counter) == 4
    assert model.optimizer is not first
    model.compile(optimizer, models.LOSS, auto_scale_loss=False)
    assert _fit(model).optimizer is optimizer
    assert int(optimizer.iterations) == 16


# ------------------------------------------------------------------ on several ranks


CASES = {
    "several steps": ({"steps_per_execution": 3}, lambda: SGD(0.05, momentum=0.9)),
    "eager": ({"run_eagerly": True}, lambda: SGD(0.05)),
    "xla requested": ({"jit_compile": True}, lambda: SGD(0.05)),
    "without": ({"auto_scale_loss": False}, lambda: SGD(0.05)),
    "accumulating": ({}, lambda: SGD(0.05, gradient_accumulation_steps=2)),
    "clipping and averages": (
        {},
        lambda: SGD(0.5, global_clipnorm=0.1, use_ema=True, ema_momentum=0.5),
    ),
    "inner factor": ({}, lambda: SGD(0.05, loss_scale_factor=64.0)),
    "layer-wise": ({}, lambda: tp.optimizers.LARS(0.05)),
}


@pytest.mark.parametrize("wrap", [lambda inner: inner, tp.DistributedOptimizer, tp.LocalUpdates])
def test_a_loss_is_scaled_before_the_first_step_builds_the_optimizer(wrap):
    """The update is divided by the scale that multiplied the loss, and overflows are skipped."""
    weight = keras.Variable([1.0], name="weight")
    optimizer = keras.optimizers.LossScaleOptimizer(wrap(keras.optimizers.SGD(1.0)))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(weight.value * x))
        optimizer.apply(tape.gradient(loss, [weight.value]), [weight])

    for value, expected in ((1.0, 0.0), (np.inf, 0.0), (1.0, -1.0)):
        step(tf.constant([value], "float32"))
        assert weight.numpy() == expected


@pytest.mark.ranks("2", core=True)
@pytest.mark.parametrize("case", CASES)
def test_ranks_train_as_one_process_of_keras(wire, case):
    options, make = CASES[case]
    start, data = models.mlp(), models.mlp.data(6 * BATCH)
    reference = train_alone(models.copy(models.mlp, start), data, make())
    model = models.copy(models.mlp, start)
    weights = train_together(model, data, ours(make()), wire, options)
    check_close(weights, reference, start.get_weights(), 0.02)
    same_on_all_ranks(_state(model), wire)
    assert isinstance(model.optimizer, Scaled) == options.get("auto_scale_loss", True)


def _step(model, optimizer):
    variables = model.trainable_variables

    @tf.function
    def step(x, y, count):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(models.LOSS(y, model(x, training=True)))
        optimizer.apply(tape.gradient(loss, variables), variables, sample_count=count)

    return step


@pytest.mark.ranks("2", core=True)
@pytest.mark.parametrize(
    "scheme", ["allreduce", tp.schemes.AllToAll(wire_dtype="float16"), "hitopk", "hybcomm"]
)
def test_an_overflow_in_a_custom_loop_is_skipped_on_all_ranks(wire, scheme):
    """The skipped step changes no state."""
    model = models.mlp()
    optimizer = ours(SGD(0.05, momentum=0.9), scheme)
    scaled = Scaled(optimizer, initial_scale=64.0)
    step, (x, y) = _step(model, scaled), models.mlp.data(4)
    step(x, y, 4.0)

    def state():
        everything = (*model.variables, *optimizer.variables, *rank_variables(optimizer))
        return [v.numpy() for v in everything]

    before = state()
    step(x * np.float32(1e30 if wire.topology.rank else 1.0), y, 4.0)
    for value, now in zip(before, state(), strict=True):
        np.testing.assert_array_equal(value, now)
    assert float(scaled.dynamic_scale) == 32.0
    assert int(scaled.iterations) == 1
    step(x, y, 4.0)
    assert int(scaled.iterations) == 2
    same_on_all_ranks([*model.get_weights(), *(v.numpy() for v in scaled.variables)], wire)


@pytest.mark.ranks("2")
def test_sample_counts_weight_ranks_under_a_loss_scale(wire):
    weight, scaled = keras.Variable([0.0]), Scaled(ours(SGD(1.0)), initial_scale=2.0)
    rank = wire.topology.rank
    scaled.apply([tf.constant([2.0 * rank])], [weight], sample_count=1.0 + 2.0 * rank)
    np.testing.assert_allclose(weight.numpy(), [-0.75])


class _ScaledGan(Gan):
    """GAN in which each optimizer scales the losses of its gradients."""

    def train_step(self, data):
        noise, real = data
        generator = self.optimizers["generator"]
        for optimizer, part in (
            (self.d_optimizer, self.discriminator),
            (generator, self.generator),
        ):
            with tf.GradientTape() as tape:
                made = self.discriminator(self.generator(noise))
                score = tf.cast(made - self.discriminator(real), tf.float32)
                loss = optimizer.scale_loss(tf.reduce_mean(score**2))
            weights = part.trainable_weights
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


@pytest.mark.ranks("2", core=True)
def test_two_optimizers_of_a_model_have_separate_loss_scales(wire):
    """An overflow on one rank is skipped on both ranks."""
    gan = _ScaledGan()
    made = [Scaled(ours(Adam(0.01)), initial_scale=scale) for scale in (64.0, 16.0)]
    gan.compile(*made)
    assert session.optimizers_of(gan) == [tp.unwrap(one) for one in made]
    noise, real = gan_data(16)
    _fit(gan, (noise, real))

    def state():
        return [v.numpy() for v in (*gan.variables, *made[0].variables, *made[1].variables)]

    same_on_all_ranks(state(), wire)
    weights = gan.get_weights()
    poison = np.float32(1e30 if wire.topology.rank else 1.0)
    _fit(gan, (noise[:4], real[:4] * poison))
    for one, before in zip(gan.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(one, before)
    assert [float(one.dynamic_scale) for one in made] == [32.0, 8.0]
    assert [int(one.iterations) for one in made] == [4, 4]
    # The epochs of the ranks end after different numbers of steps.
    batches = tf.data.Dataset.from_tensor_slices(gan_data(4 * (3 + wire.topology.rank))).batch(4)
    gan.fit(batches.filter(lambda *_: True), verbose=0)
    assert [int(one.iterations) for one in made] == [7, 7]
    same_on_all_ranks(state(), wire)


@pytest.mark.ranks("2")
def test_a_deeply_nested_loss_scale_is_refused(wire):
    gan = _ScaledGan()
    gan.compile(Scaled(ours(Adam(0.01))), None)
    gan.optimizers = types.MappingProxyType({"generator": Scaled(ours(Adam(0.02)))})
    with Raises(ValueError, r"must be an attribute of its model.*Assign it"):
        _fit(gan, gan_data(16))


@pytest.mark.ranks("2")
def test_a_custom_step_with_a_loss_scale_equals_one_process(wire):
    class Own(keras.Sequential):
        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=data[1], y_pred=self(data[0], training=True))
                loss = self.optimizer.scale_loss(loss)
            weights = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    start, data = models.mlp(), models.mlp.data(6 * BATCH)
    reference = train_alone(models.copy(models.mlp, start), data, SGD(0.05))
    model = Own([models.copy(models.mlp, start)])
    weights = train_together(model, data, ours(SGD(0.05)), wire)
    check_close(weights, reference, start.get_weights(), 0.02)
    assert int(model.optimizer.step_counter) == 6


@pytest.mark.ranks("2")
def test_the_loss_scale_grows_and_the_step_is_traced_once(wire):
    scaled = Scaled(ours(SGD(0.01)), initial_scale=2.0, dynamic_growth_steps=2)
    model, traces = _compiled(scaled), []
    step = model.train_step
    model.train_step = lambda data: traces.append(1) or step(data)
    _fit(_fit(model))
    assert float(scaled.dynamic_scale) == 2.0 * 2**4
    assert len(traces) == 1


@pytest.mark.ranks("2")
def test_the_state_of_the_loss_scale_is_saved_restored_and_equal(wire):
    folder = shared_folder(wire)
    x, y = models.mlp.data(16)
    broken = x.copy()
    broken[:4] *= 1e30 if wire.topology.rank else 1.0

    def trained(data):
        keras.utils.clear_session(free_memory=False)
        model = _compiled(ours(Adam(0.01)))
        return _fit(model, data, callbacks=[keras_callbacks.Checkpoint(folder)])

    saved, restored = trained((broken, y)), trained((x, y))
    assert float(saved.optimizer.dynamic_scale) == 2.0**14
    assert int(saved.optimizer.step_counter) == 3
    _check_same(restored, saved)
    restored.optimizer.dynamic_scale.assign(2.0 ** (4 + wire.topology.rank))
    with LogLines() as lines:
        _fit(restored, callbacks=[keras_callbacks.ReplicaCheck()])
    assert any("dynamic_scale" in line for line in lines) == (wire.topology.rank == 0), lines
    assert float(restored.optimizer.dynamic_scale) == 2.0**4
    restored.optimizer.dynamic_scale.assign(2.0 ** (4 + wire.topology.rank))
    _fit(restored, callbacks=[keras_callbacks.BroadcastVariables(root_rank=1)])
    assert float(restored.optimizer.dynamic_scale) == 2.0**5


@pytest.mark.ranks("2")
def test_ranks_with_local_weights_have_their_own_loss_scale(wire):
    folder, rank = shared_folder(wire), wire.topology.rank
    x, y = models.mlp.data(16)
    x[4:8] *= 1e30 if rank else 1.0

    def trained():
        keras.utils.clear_session(free_memory=False)
        model = _compiled(tp.LocalUpdates(Adam(0.01), 2))
        return _fit(model, (x, y), callbacks=[keras_callbacks.Checkpoint(folder)])

    for model in (trained(), trained()):
        assert float(model.optimizer.dynamic_scale) == 2.0 ** (15 - rank)
        assert int(model.optimizer.step_counter) == (2 if rank else 4)
        assert int(model.optimizer.iterations) == (3 if rank else 4)
        same_on_all_ranks(model.get_weights(), wire)


@pytest.mark.ranks("2")
def test_interrupted_runs_resume(wire):
    def accumulating():
        return SGD(0.05, momentum=0.9, gradient_accumulation_steps=2)

    check_resumes(wire, _mlp, accumulating, "hitopk", batches=3, stops=BETWEEN_AND_WITHIN)

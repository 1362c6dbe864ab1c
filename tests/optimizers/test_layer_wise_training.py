"""Tests LARS and LAMB in `fit`, in files, in mixed precision, and in configurations."""

import inspect
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.optimizers.layer_wise import (
    BOTH,
    SHAPES,
    apply,
    assert_close,
    assert_same,
    gradients,
    one,
    trained,
    variables,
)
from tfposeidon.optimizers import LAMB, LARS
from tfposeidon.optimizers.schedules import PolynomialDecayWithWarmup

X = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
Y = np.argmax(X[:, :3], axis=1)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(optimizer, **options):
    keras.utils.set_random_seed(3)
    hidden = keras.layers.Dense(16, activation="relu")
    model = keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(3, dtype="float32")])
    model.compile(optimizer, LOSS, **options)
    return model


def learns(model):
    losses = model.fit(X, Y, batch_size=16, epochs=12, shuffle=False, verbose=0).history["loss"]
    return losses[-1] < 0.7 * losses[0]


@BOTH
def test_compiled_traced_and_eager_steps_agree(make):
    results = []
    for how in ({"jit_compile": True}, {"jit_compile": False}, None):
        optimizer, made = make(weight_decay=0.1), variables()
        optimizer.build(made)
        call = optimizer.apply if how is None else tf.function(optimizer.apply, **how)
        for step in range(3):
            call([tf.constant(g, "float32") for g in gradients(step).values()])
        results.append([variable.numpy() for variable in made])
    assert_close(results[0], results[2], 1e-5, 1e-6)
    assert_close(results[1], results[2], 1e-5, 1e-6)


@BOTH
@pytest.mark.slow
def test_layer_wise_optimizers_reduce_the_loss(make):
    assert learns(compiled(make(), jit_compile=True))


@BOTH
@pytest.mark.slow
def test_resuming_at_every_step_equals_the_uninterrupted_run(make, tmp_path):
    def fresh():
        optimizer = make(weight_decay=0.1, exclude=["bias"], use_ema=True)
        optimizer.learning_rate = PolynomialDecayWithWarmup(1.0, 1, 2, initial_learning_rate=0.1)
        return compiled(optimizer)

    def step(model, number):
        model.train_on_batch(X[16 * number : 16 * number + 16], Y[16 * number : 16 * number + 16])

    whole, saved = fresh(), fresh()
    for number in range(3):
        step(whole, number)
        step(saved, number)
        saved.save(tmp_path / "model.keras")
        saved = keras.models.load_model(tmp_path / "model.keras")
        assert type(saved.optimizer) is type(whole.optimizer)
        assert_same(saved.get_weights(), whole.get_weights())
        assert_same(
            [v.numpy() for v in saved.optimizer.variables],
            [v.numpy() for v in whole.optimizer.variables],
        )


@pytest.fixture
def mixed_float16():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy(before)


@pytest.mark.usefixtures("mixed_float16")
@BOTH
def test_models_train_and_load_in_mixed_float16(make, tmp_path):
    model = compiled(make(weight_decay=0.01), jit_compile=False)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert learns(model)
    assert {variable.dtype for variable in model.trainable_variables} == {"float32"}
    model.save(tmp_path / "model.keras")
    restored = keras.models.load_model(tmp_path / "model.keras")
    assert_same(
        [v.numpy() for v in restored.optimizer.variables],
        [v.numpy() for v in model.optimizer.variables],
    )


@BOTH
def test_a_non_finite_step_changes_nothing_under_a_loss_scale(make):
    optimizer, w = keras.optimizers.LossScaleOptimizer(make()), one(np.ones((2, 2)))
    optimizer.apply([tf.fill([2, 2], float("inf"))], [w])
    np.testing.assert_array_equal(w, np.ones((2, 2)))
    # The scale is a power of two, so it does not change the bits of the step.
    v = one(np.ones((2, 2)))
    make().apply([tf.ones([2, 2])], [v])
    optimizer.apply([optimizer.scale_loss(tf.ones([2, 2]))], [w])
    np.testing.assert_array_equal(w, v)


@BOTH
def test_accumulation_equals_steps_of_means(make):
    accumulating, w, v = (
        make(weight_decay=0.1, gradient_accumulation_steps=4),
        variables(),
        variables(),
    )
    plain = make(weight_decay=0.1)
    for update in range(3):
        steps = range(4 * update, 4 * update + 4)
        for step in steps:
            apply(accumulating, w, step)
        means = [np.mean([gradients(s)[path] for s in steps], axis=0) for path in SHAPES]
        plain.apply([tf.constant(mean, "float32") for mean in means], v)
    assert_close([x.numpy() for x in w], [x.numpy() for x in v], 1e-5, 1e-6)


@pytest.mark.parametrize(
    "options", [{"clipnorm": 0.3}, {"global_clipnorm": 0.5}, {"clipvalue": 0.2}]
)
@BOTH
def test_gradients_are_clipped_before_the_update(make, options):
    def clipped(grads):
        if "clipnorm" in options:
            return [g * min(1.0, 0.3 / np.linalg.norm(g)) for g in grads]
        if "clipvalue" in options:
            return [np.clip(g, -0.2, 0.2) for g in grads]
        return [g * min(1.0, 0.5 / np.sqrt(sum((x * x).sum() for x in grads))) for g in grads]

    clipping, plain, w, v = (
        make(weight_decay=0.1, **options),
        make(weight_decay=0.1),
        variables(),
        variables(),
    )
    for step in range(3):
        apply(clipping, w, step)
        plain.apply([tf.constant(g, "float32") for g in clipped(list(gradients(step).values()))], v)
    assert_close([x.numpy() for x in w], [x.numpy() for x in v], 1e-5, 1e-6)


@BOTH
def test_ema_averages_the_updated_weights(make):
    optimizer, w = make(use_ema=True, ema_momentum=0.5), variables()
    expected = None
    for step in range(4):
        apply(optimizer, w, step)
        values = [x.numpy() for x in w]
        expected = (
            values
            if expected is None
            else [0.5 * a + 0.5 * b for a, b in zip(expected, values, strict=True)]
        )
    optimizer.finalize_variable_values(w)
    assert_close([x.numpy() for x in w], expected, 1e-6, 1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@BOTH
def test_state_of_16_bit_variables_is_float32(make, dtype):
    optimizer = make(weight_decay=0.1)
    low = trained(optimizer, 5, dtype)
    kinds = {v.dtype for v in optimizer.variables if v.name.endswith(("momentum", "velocity"))}
    assert kinds == {"float32"}
    assert_close(low, trained(make(weight_decay=0.1), 5), 0.06, 0.06)


@BOTH
def test_norms_may_exceed_float16(make):
    # Even 300^2 alone exceeds the largest float16.
    low, high = (one(np.full((50, 50), 300.0), dtype=dtype) for dtype in ("float16", "float32"))
    for w in (low, high):
        make().apply([tf.fill([50, 50], tf.constant(6e4, w.dtype))], [w])
    assert high.numpy()[0, 0] < 300.0
    np.testing.assert_allclose(low.numpy().astype("float32"), high.numpy(), rtol=1e-3)


def test_second_moments_of_small_float16_gradients_do_not_vanish():
    low, high = (one(np.ones((2, 2)), "bias", dtype) for dtype in ("float16", "float32"))
    for w in (low, high):
        LAMB(0.1).apply([tf.fill([2, 2], tf.constant(2e-4, w.dtype))], [w])
    np.testing.assert_allclose(low.numpy().astype("float32"), high.numpy(), rtol=2e-3)


@BOTH
def test_rows_of_equal_index_are_summed(make):
    rows = tf.IndexedSlices(
        tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), tf.constant([2, 0, 2]), [4, 2]
    )
    full = tf.constant([[3.0, 4.0], [0.0, 0.0], [6.0, 8.0], [0.0, 0.0]])
    sparse, dense = one(np.ones((4, 2))), one(np.ones((4, 2)))
    make(weight_decay=0.1).apply([rows], [sparse])
    make(weight_decay=0.1).apply([full], [dense])
    np.testing.assert_array_equal(sparse, dense)


@BOTH
def test_state_is_created_in_a_traced_loop(make):
    optimizer, w = make(), one(np.ones((2, 2)))
    step = tf.function(lambda: optimizer.apply([tf.ones([2, 2])], [w]))
    step()
    step()
    eager, v = make(), one(np.ones((2, 2)))
    for _ in range(2):
        eager.apply([tf.ones([2, 2])], [v])
    np.testing.assert_allclose(w, v, rtol=1e-6)


def test_constraints_apply_if_gradients_are_missing():
    w, v = one(np.ones((2, 2))), one(np.ones((2, 2)))
    w.constraint = keras.constraints.MaxNorm(0.5)
    optimizer = LARS(0.5)
    optimizer.build([w, v])
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([tf.ones([2, 2]), None], [w, v])
    assert np.linalg.norm(w.numpy(), axis=0).max() < 0.51
    np.testing.assert_array_equal(v, np.ones((2, 2)))


# ------------------------------------------------------------------ configuration


@pytest.mark.parametrize(
    "optimizer",
    [
        LARS(
            2,
            0.8,
            True,
            trust_coefficient=0.01,
            weight_decay=1e-4,
            exclude=("b", "g"),
            ratio="norm_of_sum",
            epsilon=1,
        ),
        LARS(
            PolynomialDecayWithWarmup(2.0, 5, 9, power=1), exclude=[], clipnorm=1.0, name="layers"
        ),
        LAMB(0.01, 0.8, 0.9, 1e-3, weight_decay=0.01, use_ema=True, gradient_accumulation_steps=2),
        keras.optimizers.LossScaleOptimizer(LAMB(exclude=["bias"])),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_configs_round_trip(optimizer):
    config = keras.optimizers.serialize(optimizer)
    restored = keras.optimizers.deserialize(json.loads(json.dumps(config)))
    assert type(restored) is type(optimizer)
    assert restored.get_config() == optimizer.get_config()


@BOTH
def test_configs_have_all_arguments(make):
    """A loaded optimizer would reset a missing argument to its default."""
    optimizer = make()
    arguments = inspect.signature(type(optimizer).__init__).parameters.keys()
    assert arguments - {"self", "options"} <= optimizer.get_config().keys()


NUMBER = r"must be a finite number >= 0\. Received: {}={}\. "
BAD_LARS = [
    ({"learning_rate": -0.1}, NUMBER.format("learning_rate", "-0.1") + "Use a number"),
    ({"learning_rate": float("nan")}, NUMBER.format("learning_rate", "nan")),
    (
        {"momentum": 1.0},
        r"`momentum` must be a number in \[0, 1\)\. Received: momentum=1\.0\. Use 0\.9",
    ),
    ({"momentum": -0.1}, r"Received: momentum=-0\.1"),
    ({"nesterov": 1}, "`nesterov` must be True or False. Received: nesterov=1. Leave it out"),
    (
        {"nesterov": True, "momentum": 0.0},
        "`nesterov` requires momentum. Received: nesterov=True, momentum=0.0",
    ),
    (
        {"trust_coefficient": 0.0},
        "`trust_coefficient` must be a finite number > 0. Received: trust_coefficient=0.0",
    ),
    ({"weight_decay": -1e-4}, NUMBER.format("weight_decay", "-0.0001") + "Use 0.0"),
    ({"weight_decay": None}, NUMBER.format("weight_decay", "None")),
    ({"epsilon": float("inf")}, NUMBER.format("epsilon", "inf")),
    (
        {"ratio": "optax"},
        '`ratio` must be "sum_of_norms" or "norm_of_sum". Received: ratio=\'optax\'. Leave it out',
    ),
    (
        {"exclude": "bias"},
        r"`exclude` must be None, or a list .*Received: exclude='bias'\. Use for example",
    ),
    ({"exclude": lambda variable: True}, r"Received: exclude=<function .*Use for example"),
    ({"exclude": [3]}, r"Received: exclude=\[3\]"),
    (
        {"exclude": ["("]},
        r"`exclude` must be a list of valid patterns\. Received: exclude=\['\('\].* Escape it",
    ),
]
BAD_LAMB = [
    ({"beta_1": 1}, r"`beta_1` must be a number in \[0, 1\)\. Received: beta_1=1\. Use 0\.9"),
    ({"beta_2": -0.5}, r"`beta_2` must be .* Received: beta_2=-0\.5"),
    ({"beta_2": "0.9"}, r"Received: beta_2='0\.9'"),
    (
        {"epsilon": 0.0},
        r"`epsilon` must be a finite number > 0\. Received: epsilon=0\.0\. Use 1e-6",
    ),
    ({"weight_decay": True}, r"Received: weight_decay=True"),
    ({"learning_rate": -1}, r"Received: learning_rate=-1"),
]


@pytest.mark.parametrize(("options", "message"), BAD_LARS)
def test_lars_refuses_invalid_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        LARS(**{"learning_rate": 1.0, **options})


@pytest.mark.parametrize(("options", "message"), BAD_LAMB)
def test_lamb_refuses_invalid_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        LAMB(**options)

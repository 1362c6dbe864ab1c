"""Compares updates of LARS and LAMB with NumPy and Keras, and tests laws that they obey."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.optimizers.layer_wise import (
    BOTH,
    BY_DEFAULT,
    STEPS,
    Named,
    NumpyLAMB,
    NumpyLARS,
    assert_close,
    assert_same,
    gradients,
    one,
    starts,
    trained,
    trained_by_numpy,
    variables,
)
from tfposeidon.optimizers import LAMB, LARS

# ------------------------------------------------------------------ trajectories


@pytest.mark.parametrize("ratio", ["sum_of_norms", "norm_of_sum"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_lars_follows_numpy(ratio, nesterov, decay):
    ours = LARS(
        3.0, 0.9, nesterov, trust_coefficient=0.02, weight_decay=decay, ratio=ratio, epsilon=1e-3
    )
    rule = NumpyLARS(3.0, 0.9, nesterov, 0.02, decay, ratio, 1e-3)
    assert_close(trained(ours), trained_by_numpy(rule))


def test_the_two_ratios_differ_only_with_decay():
    for decay, equal in ((0.0, True), (0.5, False)):
        a, b = (
            trained(LARS(3.0, weight_decay=decay, ratio=ratio), 3)
            for ratio in ("sum_of_norms", "norm_of_sum")
        )
        assert np.array_equal(a[0], b[0]) == equal


def test_lars_without_momentum_has_no_state():
    optimizer = LARS(3.0, momentum=0.0, weight_decay=0.1)
    assert_close(trained(optimizer), trained_by_numpy(NumpyLARS(3.0, 0.0, decay=0.1)))
    assert [variable.name for variable in optimizer.variables] == ["iteration", "learning_rate"]


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_lamb_follows_numpy(decay):
    assert_close(
        trained(LAMB(0.02, weight_decay=decay)), trained_by_numpy(NumpyLAMB(0.02, decay=decay))
    )


def test_lamb_with_other_betas_follows_numpy():
    ours = LAMB(0.02, beta_1=0.0, beta_2=0.5, epsilon=0.1, weight_decay=0.3)
    assert_close(trained(ours), trained_by_numpy(NumpyLAMB(0.02, 0.0, 0.5, 0.1, 0.3)))


def test_lamb_without_exclusion_and_decay_equals_that_of_keras():
    ours = LAMB(0.02, epsilon=1e-6, exclude=[])
    theirs = keras.optimizers.Lamb(0.02, epsilon=1e-6)
    assert_close(trained(ours), trained(theirs), rtol=2e-4, atol=1e-5)
    names = [[v.name for v in optimizer.variables][2:] for optimizer in (ours, theirs)]
    assert names[0] == names[1]


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_that_excludes_everything_equals_sgd_bit_by_bit(nesterov):
    excluded = LARS(0.1, 0.9, nesterov, weight_decay=0.5, exclude=[""])
    assert_same(trained(excluded), trained(keras.optimizers.SGD(0.1, 0.9, nesterov)))


def test_lamb_that_excludes_everything_equals_adam():
    # Keras adds epsilon at another place, so it must be negligible.
    excluded = LAMB(0.1, epsilon=1e-12, weight_decay=0.5, exclude=[""])
    assert_close(
        trained(excluded), trained(keras.optimizers.Adam(0.1, epsilon=1e-12)), rtol=2e-4, atol=1e-4
    )


def test_float64_variables_are_updated_in_float64():
    def exact(optimizer):
        made = [Named(value, path, "float64") for path, value in starts().items()]
        for step in range(STEPS):
            optimizer.apply([tf.constant(g) for g in gradients(step).values()], made)
        return [variable.numpy() for variable in made]

    # The learning rate is a float32 variable, so use a rate that float32 represents exactly.
    assert_close(
        exact(LARS(2.0, weight_decay=0.1)),
        trained_by_numpy(NumpyLARS(2.0, decay=0.1)),
        1e-12,
        1e-13,
    )
    assert_close(
        exact(LAMB(0.125, weight_decay=0.1)),
        trained_by_numpy(NumpyLAMB(0.125, decay=0.1)),
        1e-9,
        1e-11,
    )


# ------------------------------------------------------------------ laws


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**30])
@BOTH
def test_without_decay_the_scale_of_gradients_has_no_effect(make, scale):
    options = {"epsilon": 1e-30} if isinstance(make(), LAMB) else {}
    assert_close(
        trained(make(exclude=[], **options), scale=scale),
        trained(make(exclude=[], **options)),
        1e-6,
        1e-7,
    )


@pytest.mark.parametrize("ratio", ["sum_of_norms", "norm_of_sum"])
def test_the_relative_length_of_a_step_is_rate_times_coefficient(ratio):
    w = one(np.random.default_rng(1).normal(size=(7, 3)))
    before = w.numpy()
    LARS(4.0, trust_coefficient=0.01, ratio=ratio).apply([tf.random.normal([7, 3], seed=1)], [w])
    moved = np.linalg.norm(w.numpy() - before) / np.linalg.norm(before)
    np.testing.assert_allclose(moved, 4.0 * 0.01, rtol=1e-5)


@BOTH
def test_scaling_the_weights_scales_their_steps(make):
    steps = []
    for factor in (1.0, 8.0):
        w = one(np.full((2, 3), factor))
        make().apply([tf.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])], [w])
        steps.append(w.numpy() - factor)
    np.testing.assert_allclose(steps[1], 8.0 * steps[0], rtol=1e-5)


@pytest.mark.parametrize("ratio", ["sum_of_norms", "norm_of_sum"])
def test_lars_decays_once(ratio):
    w = one(np.full((2, 2), 2.0))
    LARS(0.1, weight_decay=0.5, ratio=ratio, trust_coefficient=1.0).apply([tf.ones([2, 2])], [w])
    # |w| = 4, |g| = 2, and the gradient with decay is 2 per element with norm 4, so both ratios are
    # 1.
    np.testing.assert_allclose(w.numpy(), np.full((2, 2), 2.0 - 0.1 * 2.0), rtol=1e-6)


# ------------------------------------------------------------------ zeros


@pytest.mark.parametrize("ratio", ["sum_of_norms", "norm_of_sum"])
def test_lars_uses_ratio_1_if_a_norm_is_0(ratio):
    zero_weight, zero_gradient, both = (
        one(np.zeros((2, 2))),
        one(np.ones((2, 2))),
        one(np.zeros((2, 2))),
    )
    made = [zero_weight, zero_gradient, both]
    LARS(0.5, ratio=ratio).apply([tf.ones([2, 2]), tf.zeros([2, 2]), tf.zeros([2, 2])], made)
    np.testing.assert_array_equal(zero_weight, np.full((2, 2), -0.5))
    np.testing.assert_array_equal(zero_gradient, np.ones((2, 2)))
    np.testing.assert_array_equal(both, np.zeros((2, 2)))


def test_lars_decays_at_ratio_1_if_the_gradient_is_0():
    w = one(np.ones((2, 2)))
    LARS(0.5, weight_decay=0.1).apply([tf.zeros([2, 2])], [w])
    np.testing.assert_allclose(w.numpy(), np.full((2, 2), 0.95), rtol=1e-6)
    v = one(np.ones((2, 2)))
    # The decay cancels the gradient, so the step is zero.
    LARS(0.5, weight_decay=0.5, ratio="norm_of_sum").apply([tf.fill([2, 2], -0.5)], [v])
    np.testing.assert_array_equal(v, np.ones((2, 2)))


def test_lamb_uses_ratio_1_if_a_norm_is_0():
    zero_weight, zero_gradient = one(np.zeros((2, 2))), one(np.ones((2, 2)))
    LAMB(0.5).apply([tf.ones([2, 2]), tf.zeros([2, 2])], [zero_weight, zero_gradient])
    np.testing.assert_allclose(zero_weight, np.full((2, 2), -0.5), rtol=1e-5)
    np.testing.assert_array_equal(zero_gradient, np.ones((2, 2)))


# ------------------------------------------------------------------ exclusion


@pytest.mark.parametrize(
    ("exclude", "excluded"),
    [
        (None, BY_DEFAULT),
        ([], set()),
        (["^dense/", "gamma"], {"dense/kernel", "norm/gamma"}),
        (["kernel"], {"conv/kernel", "dense/kernel"}),
    ],
)
def test_exclude_selects_variables_by_patterns(exclude, excluded):
    lars = LARS(3.0, weight_decay=0.1, exclude=exclude)
    assert_close(trained(lars, 5), trained_by_numpy(NumpyLARS(3.0, decay=0.1), excluded, 5))
    lamb = LAMB(0.02, weight_decay=0.1, exclude=exclude)
    assert_close(trained(lamb, 5), trained_by_numpy(NumpyLAMB(0.02, decay=0.1), excluded, 5))


def test_normalizations_and_biases_of_keras_are_excluded_by_default():
    keras.utils.clear_session()
    layers = [
        keras.layers.Embedding(5, 4),
        keras.layers.GRU(3, return_sequences=True, name="unbiased_gamma"),
        keras.layers.MultiHeadAttention(2, 3),
        keras.layers.LayerNormalization(axis=[1, 2]),
    ]
    tokens = keras.Input((6,))
    x = layers[1](layers[0](tokens))
    model = keras.Model(tokens, layers[3](layers[2](x, x)))
    optimizer = LARS(1.0)
    optimizer.build(model.trainable_variables)
    kept = {v.path for i, v in enumerate(model.trainable_variables) if i not in optimizer._excluded}
    scales = {v.path for v in model.trainable_variables if v.name in ("bias", "gamma", "beta")}
    assert kept == {v.path for v in model.trainable_variables} - scales
    assert any(len(v.shape) > 1 for v in model.trainable_variables if v.path in scales)


def test_variables_of_tensorflow_are_excluded_by_name():
    kernel, bias = (
        tf.Variable(tf.ones([2, 2]), name="kernel"),
        tf.Variable(tf.ones([2, 2]), name="bias"),
    )
    LARS(0.5, trust_coefficient=0.1).apply([tf.ones([2, 2])] * 2, [kernel, bias])
    np.testing.assert_allclose(kernel.numpy(), np.full((2, 2), 0.95), rtol=1e-6)
    np.testing.assert_allclose(bias.numpy(), np.full((2, 2), 0.5), rtol=1e-6)


@BOTH
def test_patterns_without_a_match_cause_a_warning(make):
    with pytest.warns(
        UserWarning, match=r"no variable's path: 'batchnorm', 'alpha'\. .*'conv/kernel'"
    ):
        make(exclude=["gamma", "batchnorm", "alpha"]).build(variables())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(exclude=[]).build(variables())


@BOTH
def test_an_optimizer_may_have_no_variables(make):
    optimizer = make()
    optimizer.build([])
    assert [variable.name for variable in optimizer.variables] == ["iteration", "learning_rate"]


@BOTH
def test_keras_exclusion_from_decay_retains_the_ratio(make):
    plain, decayed = make(exclude=[]), make(exclude=[], weight_decay=0.5)
    decayed.exclude_from_weight_decay(var_names=["kernel", "bias", "gamma", "scale"])
    assert_same(trained(decayed, 3), trained(plain, 3))


@BOTH
@pytest.mark.parametrize("builds_in_scope", [True, False])
def test_copies_of_a_distributed_variable_share_its_state(make, builds_in_scope):
    """Under `tf.distribute`, a step receives copies of a variable."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        copied, optimizer = tf.Variable([[1.0, 2.0], [3.0, 4.0]]), make(exclude=[])
    with strategy.scope() if builds_in_scope else contextlib.nullcontext():
        optimizer.build([copied])
    strategy.run(lambda: optimizer.apply([tf.ones([2, 2])], [copied]))
    plain, alone = tf.Variable([[1.0, 2.0], [3.0, 4.0]]), make(exclude=[])
    alone.apply([tf.ones([2, 2])], [plain])
    assert_same([copied.numpy()], [plain.numpy()])

"""LARS and LAMB against NumPy, against Keras, and by laws."""

import json
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfposeidon.optimizers import LAMB, LARS
from tfposeidon.optimizers.schedules import PolynomialDecayWithWarmup

SHAPES = {
    "conv/kernel": (3, 3, 2, 4),
    "dense/kernel": (5, 4),
    "gru/bias": (2, 6),
    "norm/gamma": (4,),
    "scale": (),
}
BY_DEFAULT = {"gru/bias", "norm/gamma", "scale"}
STEPS = 20
BOTH = pytest.mark.parametrize(
    "make", [lambda **o: LARS(1.0, **o), lambda **o: LAMB(0.05, **o)], ids=["LARS", "LAMB"]
)


# ------------------------------------------------------------------ the rules once more, in NumPy


class NumpyLARS:
    def __init__(
        self,
        rate,
        momentum=0.9,
        nesterov=False,
        trust=0.001,
        decay=0.0,
        ratio="sum_of_norms",
        epsilon=0.0,
    ):
        self.rate, self.momentum, self.nesterov, self.trust = rate, momentum, nesterov, trust
        self.decay, self.ratio, self.epsilon, self.velocity = decay, ratio, epsilon, {}

    def __call__(self, path, w, g, excluded):
        step = g if excluded else g + self.decay * w
        local = 1.0
        if not excluded:
            length = np.sqrt((w * w).sum())
            norm = (
                np.sqrt((g * g).sum())
                if self.ratio == "sum_of_norms"
                else np.sqrt((step * step).sum())
            )
            if length > 0 and norm > 0:
                below = norm + self.decay * length if self.ratio == "sum_of_norms" else norm
                local = self.trust * length / (below + self.epsilon)
        step = self.rate * local * step
        # With the sign of the paper, unlike the code.
        self.velocity[path] = self.momentum * self.velocity.get(path, 0.0) + step
        return w - (
            self.momentum * self.velocity[path] + step if self.nesterov else self.velocity[path]
        )


class NumpyLAMB:
    def __init__(self, rate, beta_1=0.9, beta_2=0.999, epsilon=1e-6, decay=0.0):
        self.rate, self.betas, self.epsilon, self.decay = rate, (beta_1, beta_2), epsilon, decay
        self.moments = {}

    def __call__(self, path, w, g, excluded):
        m, v, t = self.moments.get(path, (0.0, 0.0, 0))
        t += 1
        m, v = (
            b * old + (1 - b) * new
            for b, old, new in zip(self.betas, (m, v), (g, g * g), strict=True)
        )
        self.moments[path] = m, v, t
        unbiased_m, unbiased_v = (x / (1 - b**t) for x, b in zip((m, v), self.betas, strict=True))
        r = unbiased_m / (np.sqrt(unbiased_v) + self.epsilon)
        if excluded:
            return w - self.rate * r
        r = r + self.decay * w
        lengths = np.linalg.norm(w), np.linalg.norm(r)
        return w - self.rate * (lengths[0] / lengths[1] if min(lengths) > 0 else 1.0) * r


# ------------------------------------------------------------------ helpers


class Named(keras.Variable):
    """A variable that says it is in a layer."""

    def __init__(self, value, path, dtype="float32"):
        super().__init__(value, dtype=dtype, trainable=True, name=path.rpartition("/")[2])
        self._where = path

    @property
    def path(self):
        return self._where


def starts(seed=0):
    generator = np.random.default_rng(seed)
    return {path: generator.normal(size=shape) for path, shape in SHAPES.items()}


def gradients(step):
    return starts(100 + step)


def variables(dtype="float32"):
    return [Named(value.astype("float32"), path, dtype) for path, value in starts().items()]


def apply(optimizer, made, step, scale=1.0):
    optimizer.apply([tf.constant(g * scale, "float32") for g in gradients(step).values()], made)


def trained(optimizer, steps=STEPS, dtype="float32", scale=1.0):
    made = variables(dtype)
    for step in range(steps):
        apply(optimizer, made, step, scale)
    return [variable.numpy() for variable in made]


def trained_by_numpy(rule, excluded=frozenset(BY_DEFAULT), steps=STEPS):
    weights = starts()
    for step in range(steps):
        weights = {
            path: rule(path, w, gradients(step)[path], path in excluded)
            for path, w in weights.items()
        }
    return list(weights.values())


def assert_close(actual, expected, rtol=2e-5, atol=2e-6):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(a, "float64"), np.asarray(b, "float64"), rtol=rtol, atol=atol
        )


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def one(value, path="layer/kernel", dtype="float32"):
    return Named(np.asarray(value, "float32"), path, dtype)


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


def test_the_two_ratios_differ_with_decay_and_only_then():
    for decay, equal in ((0.0, True), (0.5, False)):
        a, b = (
            trained(LARS(3.0, weight_decay=decay, ratio=ratio), 3)
            for ratio in ("sum_of_norms", "norm_of_sum")
        )
        assert np.array_equal(a[0], b[0]) == equal


def test_lars_without_momentum_keeps_no_state():
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


def test_lamb_without_exclusion_and_decay_is_that_of_keras():
    ours = LAMB(0.02, epsilon=1e-6, exclude=[])
    theirs = keras.optimizers.Lamb(0.02, epsilon=1e-6)
    assert_close(trained(ours), trained(theirs), rtol=2e-4, atol=1e-5)
    names = [[v.name for v in optimizer.variables][2:] for optimizer in (ours, theirs)]
    assert names[0] == names[1]


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_that_excludes_everything_is_sgd_bit_by_bit(nesterov):
    excluded = LARS(0.1, 0.9, nesterov, weight_decay=0.5, exclude=lambda variable: True)
    assert_same(trained(excluded), trained(keras.optimizers.SGD(0.1, 0.9, nesterov)))


def test_lamb_that_excludes_everything_is_adam():
    # Keras adds epsilon elsewhere, so that it must not count.
    excluded = LAMB(0.1, epsilon=1e-12, weight_decay=0.5, exclude=[""])
    assert_close(
        trained(excluded), trained(keras.optimizers.Adam(0.1, epsilon=1e-12)), rtol=2e-4, atol=1e-4
    )


def test_float64_is_calculated_in_float64():
    def exact(optimizer):
        made = [Named(value, path, "float64") for path, value in starts().items()]
        for step in range(STEPS):
            optimizer.apply([tf.constant(g) for g in gradients(step).values()], made)
        return [variable.numpy() for variable in made]

    # The learning rate is a float32 variable: take one that it holds exactly.
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
def test_without_decay_the_scale_of_gradients_does_not_matter(make, scale):
    options = {"epsilon": 1e-30} if isinstance(make(), LAMB) else {}
    assert_close(
        trained(make(exclude=[], **options), scale=scale),
        trained(make(exclude=[], **options)),
        1e-6,
        1e-7,
    )


@pytest.mark.parametrize("ratio", ["sum_of_norms", "norm_of_sum"])
def test_a_step_is_as_long_as_rate_and_coefficient_say(ratio):
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
    # |w| = 4, |g| = 2, decayed gradient 2 of norm 4: both ratios are 1.
    np.testing.assert_allclose(w.numpy(), np.full((2, 2), 2.0 - 0.1 * 2.0), rtol=1e-6)


# ------------------------------------------------------------------ zeros


@pytest.mark.parametrize("ratio", ["sum_of_norms", "norm_of_sum"])
def test_lars_takes_ratio_1_where_a_norm_is_0(ratio):
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


def test_lars_decays_at_ratio_1_where_the_gradient_is_0():
    w = one(np.ones((2, 2)))
    LARS(0.5, weight_decay=0.1).apply([tf.zeros([2, 2])], [w])
    np.testing.assert_allclose(w.numpy(), np.full((2, 2), 0.95), rtol=1e-6)
    v = one(np.ones((2, 2)))
    # Decay takes the gradient away: nothing is left to scale.
    LARS(0.5, weight_decay=0.5, ratio="norm_of_sum").apply([tf.fill([2, 2], -0.5)], [v])
    np.testing.assert_array_equal(v, np.ones((2, 2)))


def test_lamb_takes_ratio_1_where_a_norm_is_0():
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
        (lambda variable: "kernel" in variable.path, {"conv/kernel", "dense/kernel"}),
    ],
)
def test_exclusion(exclude, excluded):
    lars = LARS(3.0, weight_decay=0.1, exclude=exclude)
    assert_close(trained(lars, 5), trained_by_numpy(NumpyLARS(3.0, decay=0.1), excluded, 5))
    lamb = LAMB(0.02, weight_decay=0.1, exclude=exclude)
    assert_close(trained(lamb, 5), trained_by_numpy(NumpyLAMB(0.02, decay=0.1), excluded, 5))


def test_default_exclusion_of_layers_of_keras():
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
def test_patterns_that_match_nothing_are_a_warning(make):
    with pytest.warns(
        UserWarning, match=r"no variable's path: 'batchnorm', 'alpha'\. .*'conv/kernel'"
    ):
        make(exclude=["gamma", "batchnorm", "alpha"]).build(variables())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(exclude=[]).build(variables())


@BOTH
def test_functions_that_exclude_nothing_are_a_warning(make):
    with pytest.warns(
        UserWarning, match=r"function that excludes no variable: .*lambda.*'conv/kernel'"
    ):
        make(exclude=lambda variable: "batchnorm" in variable.path).build(variables())


@BOTH
def test_nothing_to_train(make):
    optimizer = make()
    optimizer.build([])
    assert [variable.name for variable in optimizer.variables] == ["iteration", "learning_rate"]


@BOTH
def test_keras_exclusion_from_decay_leaves_the_ratio(make):
    plain, decayed = make(exclude=[]), make(exclude=[], weight_decay=0.5)
    decayed.exclude_from_weight_decay(var_names=["kernel", "bias", "gamma", "scale"])
    assert_same(trained(decayed, 3), trained(plain, 3))


# ------------------------------------------------------------------ what Keras's optimizers can do


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
def test_it_learns(make):
    assert learns(compiled(make(), jit_compile=True))


@BOTH
@pytest.mark.slow
def test_saving_at_every_step_and_going_on_equals_the_whole_run(make, tmp_path):
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
def test_mixed_float16(make, tmp_path):
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
def test_a_step_that_is_not_finite_changes_nothing_under_a_loss_scale(make):
    optimizer, w = keras.optimizers.LossScaleOptimizer(make()), one(np.ones((2, 2)))
    optimizer.apply([tf.fill([2, 2], float("inf"))], [w])
    np.testing.assert_array_equal(w, np.ones((2, 2)))
    # The scale is a power of two: with it the step is the same to the last bit.
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
def test_clipping_comes_before_the_rule(make, options):
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
def test_ema_averages_what_the_rule_made(make):
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
def test_state_of_16_bit_variables_is_wide(make, dtype):
    optimizer = make(weight_decay=0.1)
    low = trained(optimizer, 5, dtype)
    kinds = {v.dtype for v in optimizer.variables if v.name.endswith(("momentum", "velocity"))}
    assert kinds == {"float32"}
    assert_close(low, trained(make(weight_decay=0.1), 5), 0.06, 0.06)


@BOTH
def test_norms_beyond_float16(make):
    # 300^2 alone is more than float16 holds.
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
def test_state_is_made_in_a_traced_loop(make):
    optimizer, w = make(), one(np.ones((2, 2)))
    step = tf.function(lambda: optimizer.apply([tf.ones([2, 2])], [w]))
    step()
    step()
    eager, v = make(), one(np.ones((2, 2)))
    for _ in range(2):
        eager.apply([tf.ones([2, 2])], [v])
    np.testing.assert_allclose(w, v, rtol=1e-6)


def test_constraints_and_missing_gradients():
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
def test_predicates_refuse_to_be_saved(make, tmp_path):
    def heads(variable):
        return "head" in variable.path

    model = compiled(make(exclude=heads))
    with pytest.raises(
        ValueError,
        match=r"`exclude` must be None or patterns.* the function .*heads, .*Give patterns",
    ):
        model.save(tmp_path / "model.keras")


NUMBER = r"must be a finite number from 0\. Received: {}={}\. "
BAD_LARS = [
    ({"learning_rate": -0.1}, NUMBER.format("learning_rate", "-0.1") + "Give a number"),
    ({"learning_rate": float("nan")}, NUMBER.format("learning_rate", "nan")),
    (
        {"momentum": 1.0},
        r"`momentum` must be a number in \[0, 1\)\. Received: momentum=1\.0\. Use 0\.9",
    ),
    ({"momentum": -0.1}, r"Received: momentum=-0\.1"),
    ({"nesterov": 1}, "`nesterov` must be True or False. Received: nesterov=1. Leave it out"),
    (
        {"nesterov": True, "momentum": 0.0},
        "`nesterov` needs momentum. Received: nesterov=True, momentum=0.0",
    ),
    (
        {"trust_coefficient": 0.0},
        "`trust_coefficient` must be a finite number above 0. Received: trust_coefficient=0.0",
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
        r"`exclude` must be None, a list .*Received: exclude='bias'\. Give for example",
    ),
    ({"exclude": [3]}, r"Received: exclude=\[3\]"),
    (
        {"exclude": ["("]},
        r"`exclude` must hold regular expressions\. Received: exclude=\['\('\].* Escape it",
    ),
]
BAD_LAMB = [
    ({"beta_1": 1}, r"`beta_1` must be a number in \[0, 1\)\. Received: beta_1=1\. Use 0\.9"),
    ({"beta_2": -0.5}, r"`beta_2` must be .* Received: beta_2=-0\.5"),
    ({"beta_2": "0.9"}, r"Received: beta_2='0\.9'"),
    (
        {"epsilon": 0.0},
        r"`epsilon` must be a finite number above 0\. Received: epsilon=0\.0\. Use 1e-6",
    ),
    ({"weight_decay": True}, r"Received: weight_decay=True"),
    ({"learning_rate": -1}, r"Received: learning_rate=-1"),
]


@pytest.mark.parametrize(("options", "message"), BAD_LARS)
def test_lars_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        LARS(**{"learning_rate": 1.0, **options})


@pytest.mark.parametrize(("options", "message"), BAD_LAMB)
def test_lamb_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        LAMB(**options)

"""The product of the factors that are found in the graph is the gradient, for all Keras layers."""

import contextlib
import dataclasses
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import keras_layers
from tfposeidon.factors import pairs, reader
from tfposeidon.factors.pairs import FactorPair, FactorShape, NoFactorsError
from tfposeidon.factors.reader import FactorReader
from tfposeidon.gradients import Description

L = keras.layers


def _tied(x):
    dense = L.Dense(6)
    return dense(dense(x))


class Tied(L.Layer):
    """Model whose embeddings are also the kernel of its classifier."""

    def build(self, shape):
        self.embeddings = self.add_weight(shape=(11, 6))

    def call(self, x):
        pooled = keras.ops.mean(keras.ops.take(self.embeddings, x, axis=0), 1)
        return keras.ops.matmul(pooled, keras.ops.transpose(self.embeddings))


class Transposed(L.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(5, shape[-1]))

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(self.kernel))


REGULARIZED = {"kernel_regularizer": keras.regularizers.L1L2(0.01, 0.02)}
# Each entry has the input shape, the layers, and the shapes of variables that have factors.
MODELS = {
    "two dense": ((6,), lambda x: L.Dense(3)(L.Dense(5, activation="tanh")(x)), [(6, 5), (5, 3)]),
    "regularized": ((6,), lambda x: L.Dense(5, **REGULARIZED)(x), [(6, 5)]),
    "orthogonal": (
        (6,),
        lambda x: L.Dense(5, kernel_regularizer="orthogonal_regularizer")(x),
        [(6, 5)],
    ),
    "activity regularized": ((6,), lambda x: L.Dense(5, activity_regularizer="l2")(x), [(6, 5)]),
    "sequence": ((7, 6), lambda x: L.Dense(5)(x), [(6, 5)]),
    "einsum heads": (
        (7, 6),
        lambda x: L.EinsumDense("abc,cde->abde", (None, 2, 5))(x),
        [(6, 2, 5)],
    ),
    "used twice": ((6,), _tied, [(6, 6)]),
    "dropout": ((6,), lambda x: L.Dense(5)(L.Dropout(0.5, seed=1)(x)), [(6, 5)]),
    "normalized": ((6,), lambda x: L.BatchNormalization()(L.Dense(5)(x)), [(6, 5)]),
    "convolution": ((8, 8, 3), lambda x: L.Dense(5)(L.Flatten()(L.Conv2D(4, 3)(x))), [(144, 5)]),
    "lstm": ((7, 6), lambda x: L.Dense(5)(L.LSTM(4)(x)), [(4, 5)]),
    "embedding": (
        (7,),
        lambda x: L.Dense(5)(L.Flatten()(L.Embedding(11, 3)(x))),
        [(11, 3), (21, 5)],
    ),
    "transposed": ((6,), lambda x: Transposed()(x), [(5, 6)]),
    "tied embedding": ((7,), lambda x: Tied()(x), []),
}


def _model(name, policy="float32"):
    shape, layers, _ = MODELS[name]
    keras.utils.set_random_seed(1)
    whole = "embedding" in name
    with _under(policy):
        x = keras.Input(shape, dtype="int32" if whole else None)
        return keras.Model(x, layers(x))


@contextlib.contextmanager
def _under(policy):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    yield
    keras.config.set_dtype_policy(before)


def _read_all(model, shape, whole, batch):
    """Returns gradients with their products, the traced step, and reasons for missing factors."""
    variables = [v.value for v in model.trainable_variables]
    why = {}

    @tf.function(
        input_signature=[tf.TensorSpec([batch, *shape], tf.int32 if whole else tf.float32)],
        autograph=False,
    )
    def step(x):
        with tf.GradientTape() as tape:
            y = tf.cast(model(x, training=True), tf.float32)
            loss = tf.add_n(
                [
                    tf.reduce_mean(tf.square(y - 1.0)),
                    *(tf.cast(part, tf.float32) for part in model.losses),
                ]
            )
        found = []
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            try:
                f = _factors(gradient, variable, model)
            except NoFactorsError as error:
                why[variable.name, len(why)] = str(error)
                continue
            product = tf.reshape(f.product(f.packed), variable.shape)
            found.append(
                (tf.convert_to_tensor(gradient), product if f.local is None else product + f.local)
            )
        return found

    draw = np.random.default_rng(0)
    x = (
        draw.integers(0, 11, (4, *shape))
        if whole
        else draw.normal(size=(4, *shape)).astype("float32")
    )
    return step(tf.constant(x, tf.int32 if whole else tf.float32)), step, why


def _factors(gradient, variable, model):
    if isinstance(gradient, tf.IndexedSlices):
        return pairs.rows_of(gradient, variable.shape)
    return reader.factors_of(gradient, variable.shape, "float32", model.trainable_variables)


def test_every_keras_layer_has_a_case():
    """A new layer of Keras must be added to the table."""
    assert keras_layers.with_weights() == {*keras_layers.CASES, *keras_layers.NOT_TRAINED}


@pytest.mark.parametrize("name", keras_layers.CASES)
def test_every_keras_layer_has_factors_or_a_reason(name):
    """The product of the factors equals the gradient."""
    case = keras_layers.CASES[name]
    keras.utils.set_random_seed(1)
    model = case.model()
    found, _, why = _read_all(model, case.shape, case.dtype == "int32", None)
    assert tuple(tuple(gradient.shape) for gradient, _ in found) == case.factors, why
    for gradient, product in found:
        assert np.abs(gradient).max() > 1e-6, "the gradient must not be zero"
        np.testing.assert_allclose(product, gradient, rtol=1e-4, atol=1e-6)
    assert len(found) + len(why) == len(model.trainable_variables)
    assert all(why.values())


@pytest.mark.parametrize("batch", [None, 4])
@pytest.mark.parametrize("name", MODELS)
def test_the_product_is_the_gradient(name, batch):
    shape, _, expected = MODELS[name]
    found, _, why = _read_all(_model(name), shape, "embedding" in name, batch)
    assert [tuple(gradient.shape) for gradient, _ in found] == expected, why
    for gradient, product in found:
        np.testing.assert_allclose(product, gradient, rtol=1e-4, atol=1e-6)


def test_factors_in_float16_are_multiplied_in_float32():
    shape, _, expected = MODELS["regularized"]
    found, _, why = _read_all(_model("regularized", "mixed_float16"), shape, False, None)
    assert [tuple(gradient.shape) for gradient, _ in found] == expected, why
    for gradient, product in found:
        np.testing.assert_allclose(product, gradient, rtol=2e-3, atol=1e-3)


def _why_not(step, variables, *inputs):
    """Returns the reason why a step's first gradient has no factors, or its factors."""
    found = []

    @tf.function(autograph=False)
    def traced(*inputs):
        with tf.GradientTape() as tape:
            loss = step(*inputs)
        (gradient, *_) = tape.gradient(loss, variables)
        try:
            found.append(reader.factors_of(gradient, variables[0].shape, "float32", variables))
        except NoFactorsError as error:
            found.append(str(error))
        return gradient

    traced.get_concrete_function(*inputs)
    return found[0]


def test_sums_over_other_dimensions_are_not_products():
    """The number of positions equals that of heads, so that all sizes match those of a product."""
    batch, heads, size = 3, 4, 5
    vector = tf.Variable(tf.ones([heads, 1, size]))
    shape = [batch, heads, heads, size]

    def step(q, k):
        return tf.reduce_sum(
            tf.matmul(q + tf.broadcast_to(vector, shape), k, transpose_b=True) ** 2
        )

    assert "not a product" in _why_not(step, [vector], tf.zeros(shape), tf.zeros(shape))


def test_a_transposed_reshape_is_not_a_transposed_product():
    @tf.custom_gradient
    def reordered(kernel):
        return tf.identity(kernel), lambda dy: tf.transpose(
            tf.reshape(tf.reshape(dy, [6, 4]), [3, 8])
        )

    kernel = tf.Variable(tf.ones([8, 3]))
    step = lambda x: tf.reduce_sum(tf.matmul(x, tf.reshape(reordered(kernel), [6, 4])) ** 2)  # noqa: E731
    assert "not a product" in _why_not(step, [kernel], tf.zeros([2, 6]))


def test_terms_that_may_differ_between_ranks_prevent_factors():
    kernel, other = tf.Variable(tf.ones([6, 4])), tf.Variable(2.0)
    product = lambda x: tf.reduce_sum(tf.matmul(x, kernel) ** 2)  # noqa: E731
    x = tf.zeros([2, 6])
    for extra in (
        lambda x: other * tf.reduce_sum(kernel),  # a variable that need not be equal on all ranks
        lambda x: x[0, 0] * tf.reduce_sum(kernel),  # data of one rank
        lambda x: tf.reduce_sum(kernel * tf.random.normal([6, 4])),
    ):
        assert "may differ between ranks" in _why_not(
            lambda x, extra=extra: product(x) + extra(x), [kernel], x
        )

    def decay(rate):
        return _why_not(lambda x: product(x) + rate * tf.reduce_sum(kernel**2), [kernel], x)

    assert decay(0.1).local is not None
    assert decay(0.1).constants == decay(0.1).constants != decay(0.2).constants
    found = [
        [{**dataclasses.asdict(one.shape), "constants": one.constants}]
        for one in map(decay, (0.1, 0.1, 0.2))
    ]
    description = Description("kernel", (6, 4), "float32")
    (alike,) = FactorReader().describe([description], found[:2])
    assert alike.structure == FactorShape(None, 6, 4, "float32", has_local=True)
    (apart,) = FactorReader().describe([description], found)
    assert apart.structure is None
    assert "differ between ranks" in apart.why_no_structure


def test_any_gradient_is_a_product_with_the_unit_matrix():
    for shape in ((2, 3, 5), (5, 2, 3)):
        gradient = np.random.default_rng(0).normal(size=shape).astype("float32")
        like = FactorShape(None, math.prod(shape[:-1]), shape[-1], "float32")
        factors = pairs.as_product(gradient, like)
        np.testing.assert_array_equal(factors.product(factors.packed), gradient.ravel())
        np.testing.assert_array_equal(factors.own_product, gradient.ravel())
        assert factors.packed.shape[0] == min(like.left, like.right)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_are_not_rounded(dtype):
    draw = np.random.default_rng(0)
    left, right = (tf.cast(draw.normal(size=(4, n)), dtype) for n in (3, 5))
    for weight in (0.0, 1.0, 1.0234375001, 3.14159):
        factors = FactorPair(left, right).weighted(tf.constant(weight))
        expected = weight * tf.matmul(
            tf.cast(left, "float64"), tf.cast(right, "float64"), transpose_a=True
        )
        for product in (factors.product(factors.packed), factors.own_product):
            np.testing.assert_allclose(tf.reshape(product, [3, 5]), expected, atol=2e-4)
    nothing = FactorPair(left / 0, right / 0).weighted(tf.constant(0.0))
    assert not nothing.product(nothing.packed).numpy().any()

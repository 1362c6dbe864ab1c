"""Factors read off the graph: multiplied again they are the gradient, for every layer of Keras that has kernels."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfposeidon import sufficient_factors
from tfposeidon.sufficient_factors import NoFactorsError

L = keras.layers


def _attention(x):
    return L.MultiHeadAttention(2, 4)(x, x)


def _tied(x):
    dense = L.Dense(6)
    return dense(dense(x))


class Tied(L.Layer):
    """Embeddings that are also the classifier's kernel."""

    def build(self, shape):
        self.embeddings = self.add_weight(shape=(11, 6))

    def call(self, x):
        pooled = keras.ops.mean(keras.ops.take(self.embeddings, x, axis=0), 1)
        return keras.ops.matmul(pooled, keras.ops.transpose(self.embeddings))


REGULARISED = {"kernel_regularizer": keras.regularizers.L1L2(0.01, 0.02)}
# Input shape, layers, and the shapes of variables that have factors.
MODELS = {
    "dense": ((6,), lambda x: L.Dense(5, activation="relu")(x), [(6, 5)]),
    "two dense": ((6,), lambda x: L.Dense(3)(L.Dense(5, activation="tanh")(x)), [(6, 5), (5, 3)]),
    "regularised": ((6,), lambda x: L.Dense(5, **REGULARISED)(x), [(6, 5)]),
    "orthogonal": ((6,), lambda x: L.Dense(5, kernel_regularizer="orthogonal_regularizer")(x), [(6, 5)]),
    "activity regularised": ((6,), lambda x: L.Dense(5, activity_regularizer="l2")(x), [(6, 5)]),
    "sequence": ((7, 6), lambda x: L.Dense(5)(x), [(6, 5)]),
    "time distributed": ((7, 6), lambda x: L.TimeDistributed(L.Dense(5))(x), [(6, 5)]),
    "einsum": ((7, 6), lambda x: L.EinsumDense("abc,cd->abd", (None, 5), bias_axes="d")(x), [(6, 5)]),
    "einsum heads": ((7, 6), lambda x: L.EinsumDense("abc,cde->abde", (None, 2, 5))(x), [(6, 2, 5)]),
    "attention": ((7, 8), _attention, [(8, 2, 4), (8, 2, 4), (8, 2, 4), (2, 4, 8)]),
    "used twice": ((6,), _tied, [(6, 6)]),
    "dropout": ((6,), lambda x: L.Dense(5)(L.Dropout(0.5, seed=1)(x)), [(6, 5)]),
    "normalised": ((6,), lambda x: L.BatchNormalization()(L.Dense(5)(x)), [(6, 5)]),
    "convolution": ((8, 8, 3), lambda x: L.Dense(5)(L.Flatten()(L.Conv2D(4, 3)(x))), [(144, 5)]),
    "separable": ((8, 8, 3), lambda x: L.SeparableConv2D(4, 3)(x), []),
    "lstm": ((7, 6), lambda x: L.Dense(5)(L.LSTM(4)(x)), [(4, 5)]),
    "gru": ((7, 6), lambda x: L.GRU(4)(x), []),
    "spectral": ((6,), lambda x: L.SpectralNormalization(L.Dense(5))(x), [(6, 5)]),
    "embedding": ((7,), lambda x: L.Dense(5)(L.Flatten()(L.Embedding(11, 3)(x))), [(21, 5)]),
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
    """Gradients of one traced step, and what multiplies out of those that have factors."""
    variables = [v.value for v in model.trainable_variables]
    why = {}

    @tf.function(input_signature=[tf.TensorSpec([batch, *shape], tf.int32 if whole else tf.float32)], autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            y = tf.cast(model(x, training=True), tf.float32)
            loss = tf.add_n([tf.reduce_mean(tf.square(y - 1.0)), *(tf.cast(part, tf.float32) for part in model.losses)])
        found = []
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            try:
                f = sufficient_factors.read(gradient, variable.shape, "float32", model.trainable_variables)
            except NoFactorsError as error:
                why[variable.name] = str(error)
                continue
            product = tf.reshape(f.product(f.packed), variable.shape)
            found.append((tf.convert_to_tensor(gradient), product if f.local is None else product + f.local))
        return found

    draw = np.random.default_rng(0)
    x = draw.integers(0, 11, (4, *shape)) if whole else draw.normal(size=(4, *shape)).astype("float32")
    return step(tf.constant(x, tf.int32 if whole else tf.float32)), step, why


@pytest.mark.parametrize("batch", [None, 4])
@pytest.mark.parametrize("name", MODELS)
def test_the_product_is_the_gradient(name, batch):
    shape, _, expected = MODELS[name]
    found, _, why = _read_all(_model(name), shape, "embedding" in name, batch)
    assert [tuple(gradient.shape) for gradient, _ in found] == expected, why
    for gradient, product in found:
        np.testing.assert_allclose(product, gradient, rtol=1e-4, atol=1e-6)


def test_half_precision_and_a_loss_scale():
    """Factors stay in 16 bits, and are multiplied in 32: nearer to the gradient than the local product."""
    shape, _, expected = MODELS["regularised"]
    found, _, why = _read_all(_model("regularised", "mixed_float16"), shape, False, None)
    assert [tuple(gradient.shape) for gradient, _ in found] == expected, why
    for gradient, product in found:
        np.testing.assert_allclose(product, gradient, rtol=2e-3, atol=1e-3)

"""Sums of factors stand for the sum of the matrices, in every dtype and mixture."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfposeidon.gradients.accumulation import Accumulation, Call
from tfposeidon.gradients.embedding_rows import Rows
from tfposeidon.gradients.factors import FactorPair

M, N = 7, 5
# Values are of the order of 1.
ROUNDING = {"float16": 1e-5, "bfloat16": 2e-4, "float32": 1e-5, "float64": 1e-12}


def _factors(draw, rows, dtype, kind, local):
    right = tf.cast(draw.normal(size=(rows, N)), dtype)
    if kind is Rows:
        return Rows(tf.constant(draw.integers(0, M, rows), tf.int32), right, table=M)
    return FactorPair(tf.cast(draw.normal(size=(rows, M)), dtype), right, local)


def _matrix(factors):
    left = factors.left.numpy()
    left = np.eye(M)[left] if left.ndim == 1 else left.astype("float64")
    product = left.T @ factors.right.numpy().astype("float64")
    return product if factors.local is None else product + factors.local.numpy()


class _Calls:
    """Calls of one accumulation, which share a trace where their gradients are of one kind.

    Attributes:
      means: What updates were given, as matrices.
    """

    def __init__(self, accumulation, like, steps):
        self.accumulation, self.like, self.means = accumulation, like, []
        self._steps, self._done = steps, 0
        self._by_factors = tf.function(self._add_factors, reduce_retracing=True)
        self._by_matrix = tf.function(self._add)

    def add(self, gradient, count):
        self._done += 1
        about = tf.constant(count), tf.constant(self._done % self._steps == 0)
        if isinstance(gradient, FactorPair):
            self._by_factors(gradient.left, gradient.right, *about)
        else:
            self._by_matrix(gradient, *about)

    def _add_factors(self, left, right, *about):
        self._add(dataclasses.replace(self.like, left=left, right=right), *about)

    def _add(self, gradient, count, is_due):
        call = Call(weight=count, is_due=is_due)
        self.accumulation.add([0], [gradient], call, self._update, lambda: None)

    def _update(self, mean, total, calls):
        mean = mean[0]
        if isinstance(mean, FactorPair):
            product = tf.reshape(mean.product(mean.packed), [M, N])
            mean = product if mean.local is None else product + tf.cast(mean.local, product.dtype)
        tf.py_function(lambda m: self.means.append(m.numpy()), [tf.cast(mean, tf.float64)], [])


MIXTURES = [
    *(("float32", kinds) for kinds in ("ff", "fffff", "mf", "fm", "mfmf", "fmfm", "mm")),
    *(
        (dtype, kinds)
        for dtype in ("float16", "bfloat16", "float64")
        for kinds in ("fffff", "mfmf")
    ),
]


@pytest.mark.parametrize(("dtype", "kinds"), MIXTURES)
@pytest.mark.parametrize("kind", [FactorPair, Rows])
def test_means_of_factors_are_those_of_matrices(kinds, kind, dtype):
    """Makes calls with factors (f) and with matrices (m), of one sample, two, none and so on."""
    draw = np.random.default_rng(0)
    wide = "float64" if dtype == "float64" else "float32"
    variable = keras.Variable(np.zeros((M, N)), dtype=wide, name="kernel")
    local = tf.cast(draw.normal(size=(M, N)), wide) if kind is FactorPair else None
    accumulation = Accumulation(keras.optimizers.SGD(), [variable], len(kinds))
    calls = _Calls(accumulation, _factors(draw, 1, dtype, kind, local), len(kinds))
    counts = [float((i + 1) % 3) for i in range(len(kinds))]
    for _ in range(2):
        matrices = []
        for i, how in enumerate(kinds):
            factors = _factors(draw, i + 1, dtype, kind, local)
            matrices.append(_matrix(factors))
            calls.add(factors if how == "f" else tf.constant(matrices[-1], wide), counts[i])
        (mean,) = calls.means
        calls.means.clear()
        expected = np.average(matrices, axis=0, weights=counts)
        # Factors of 16 bits are exact, and weights have two parts of 16 bits.
        np.testing.assert_allclose(mean, expected, rtol=0, atol=ROUNDING[dtype])
        assert not any(np.any(v.numpy()) for v, _ in accumulation.rank_state(0, 1)), (
            "nothing is left"
        )


def test_what_comes_from_no_samples_need_not_be_a_number():
    variable = keras.Variable(np.zeros((M, N), "float32"), name="kernel")
    accumulation = Accumulation(keras.optimizers.SGD(), [variable], 2)
    draw = np.random.default_rng(0)
    good = _factors(draw, 3, "float32", FactorPair, None)
    bad = FactorPair(good.left * np.nan, good.right * np.nan)
    calls = _Calls(accumulation, good, 2)
    calls.add(good, 4.0)
    calls.add(bad, 0.0)
    (mean,) = calls.means
    np.testing.assert_allclose(mean, _matrix(good), atol=1e-5)


def test_dropped_rows_are_gone():
    variable = keras.Variable(np.zeros((M, N), "float32"), name="kernel")
    accumulation = Accumulation(keras.optimizers.SGD(), [variable], 2)
    draw = np.random.default_rng(0)
    factors = _factors(draw, 3, "float32", FactorPair, None)
    calls = _Calls(accumulation, factors, 2)
    calls.add(factors, 1.0)
    assert calls.means == []
    assert sum(v.numpy().size for v, _ in accumulation.rank_state(0, 1)) > 3 * (M + N)
    accumulation.reset()
    assert not any(np.any(v.numpy()) for v, _ in accumulation.rank_state(0, 1))

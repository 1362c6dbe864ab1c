"""Accumulated gradients are the weighted means of all calls."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfposeidon.gradients import Accumulation

SHAPE = (7, 5)


class _Calls:
    """Calls of one accumulation with a common trace; `means` holds the gradients of updates."""

    def __init__(self, steps, dtype="float32"):
        variable = keras.Variable(np.zeros(SHAPE), dtype=dtype, name="kernel")
        self.accumulation, self.means = Accumulation(keras.optimizers.SGD(), [variable]), []
        self._steps, self._done = steps, 0
        self._add = tf.function(self._traced, reduce_retracing=True)

    def add(self, gradient, count):
        self._done += 1
        self._add(gradient, tf.constant(count), tf.constant(self._done % self._steps == 0))

    def _traced(self, gradient, count, is_due):
        self.accumulation.add(
            [0], [gradient], self._update, lambda: None, weight=count, is_due=is_due
        )

    def _update(self, means, total, calls):
        tf.py_function(lambda m: self.means.append(m.numpy()), means, [])

    @property
    def left(self):
        return [v.numpy() for v, _ in self.accumulation.rank_state(1)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_means_are_weighted_by_the_samples_of_calls(dtype):
    """Calls have one, two or no samples, and every second gradient consists of embedding rows."""
    draw = np.random.default_rng(0)
    calls, counts = _Calls(5, dtype), [1.0, 2.0, 0.0, 1.0, 2.0]
    for _ in range(2):
        matrices = []
        for call, count in enumerate(counts):
            matrix = draw.normal(size=SHAPE).astype(dtype)
            matrices.append(matrix)
            rows = tf.IndexedSlices(tf.constant(matrix), tf.range(SHAPE[0]), tf.constant(SHAPE))
            calls.add(rows if call % 2 else tf.constant(matrix), count)
        (mean,) = calls.means
        calls.means.clear()
        np.testing.assert_allclose(mean, np.average(matrices, axis=0, weights=counts), atol=1e-6)
        assert not any(np.any(array) for array in calls.left), "the accumulator must be zero"


def test_gradients_of_empty_batches_may_be_nan():
    calls = _Calls(2)
    calls.add(tf.ones(SHAPE), 4.0)
    calls.add(tf.fill(SHAPE, np.nan), 0.0)
    (mean,) = calls.means
    np.testing.assert_allclose(mean, np.ones(SHAPE), atol=1e-5)


def test_a_reset_discards_accumulated_gradients():
    calls = _Calls(2)
    calls.add(tf.ones(SHAPE), 1.0)
    assert calls.means == []
    assert any(np.any(array) for array in calls.left)
    calls.accumulation.reset()
    assert not any(np.any(array) for array in calls.left)

"""Tests times that are measured within a step."""

import time

import tensorflow as tf

from tfposeidon.exchange.observer import time_after

SLEEP_S = 0.2


def _sleep(value):
    time.sleep(SLEEP_S)
    return value


@tf.function
def _times(x):
    early = [x + 1.0, None, tf.IndexedSlices(x * 2.0, tf.constant([0]))]
    # This function is stateful, so that a later stateful op would wait for it.
    late = tf.ensure_shape(tf.numpy_function(_sleep, [x], x.dtype), x.shape)
    return time_after(early), time_after([*early, late])


def test_available_gradients_do_not_wait_for_python_functions():
    before_s = time.time()
    first_s, last_s = (float(t) for t in _times(tf.ones([1, 3])))
    assert before_s <= first_s <= last_s <= time.time()
    assert last_s - first_s > SLEEP_S / 2


def test_without_gradients_the_current_time_is_returned():
    before_s = time.time()
    assert before_s <= float(time_after([None])) <= time.time()

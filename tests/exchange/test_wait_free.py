"""The exchange of the top layers overlaps the backward pass of the lower layers."""

import json
import tempfile
import time
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfposeidon as tp
from tests import contract
from tests.helpers import models
from tests.helpers.training import sgd
from tests.helpers.wait_free import check_independent, traced

pytestmark = pytest.mark.ranks(
    "2", environment={"HOROVOD_TIMELINE": "DYNAMIC", "HOROVOD_CYCLE_TIME": None}
)

EXCHANGE_S = 1.0
"""Seconds of a delayed exchange."""


def test_no_collective_waits_for_another_bucket(wire):
    for scheme in contract.OF_EACH_CLASS:
        optimizer = tp.DistributedOptimizer(
            keras.optimizers.SGD(0.1), scheme=scheme, bucket_bytes=0
        )
        check_independent(traced(models.mlp(), optimizer, models.mlp.data(4)), 4)


def test_no_collective_waits_with_loss_scaling_and_clipping(wire):
    keras.config.set_dtype_policy("mixed_float16")
    optimizer = tp.DistributedOptimizer(
        keras.optimizers.SGD(0.1, global_clipnorm=1.0), bucket_bytes=0
    )
    check_independent(traced(models.mlp(), optimizer, models.mlp.data(4)), 4)


class Slow(keras.layers.Layer):
    """Dense layer whose backward pass sleeps for a while."""

    def __init__(self, pause_s):
        super().__init__()
        self.dense = keras.layers.Dense(512)
        self.pause_s = pause_s

    def call(self, inputs):
        return self.dense(_pause_backward(inputs, self.pause_s))


def _pause_backward(tensor, pause_s):
    @tf.custom_gradient
    def identity(x):
        return tf.identity(x), lambda gradient: tf.ensure_shape(
            _delayed(gradient, pause_s), x.shape
        )

    return identity(tensor)


def _delayed(tensor, pause_s):
    """Returns the tensor after a pause, in which the processor is free."""

    def sleep(values):
        time.sleep(pause_s)
        return values

    later = tf.numpy_function(sleep, [tensor], tensor.dtype, stateful=False)
    return tf.ensure_shape(later, tensor.shape)


def test_timeline_shows_the_overlap(wire):
    pause_s, layers = 0.3, 4
    model = keras.Sequential(
        [
            keras.Input((512,)),
            *(Slow(pause_s) for _ in range(layers)),
            keras.layers.Dense(models.CLASSES),
        ]
    )
    model.compile(optimizer=tp.DistributedOptimizer(sgd(), bucket_bytes=2**20), loss=models.LOSS)
    batch = models.floats(4, 512)
    model.train_on_batch(*batch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.json"
        hvd.start_timeline(str(path))
        model.train_on_batch(*batch)
        hvd.stop_timeline()
        time.sleep(1.0)
        done = _completions(path.read_text()) if wire.topology.rank == 0 else {}
    if wire.topology.rank == 0:
        order = sorted(done, key=done.get)
        # Omit the last two, the first layer's kernel and the bucket of all small variables, which
        # are complete at the same time.
        assert order[:-2] == sorted(order, key=lambda name: int(name.rpartition("_")[2]))[:-2], (
            order
        )
        # The top bucket is exchanged before the backward pass of the lower layers ends.
        ahead = done[order[-1]] - done[order[0]]
        assert ahead > (layers - 2) * pause_s * 1e6, (
            f"{ahead / 1e6:.2f} s between first and last exchange: {done}"
        )


def _completions(text):
    """Returns the end of each bucket's exchange in microseconds, from Horovod's timeline."""
    events = json.loads(text.rstrip().rstrip(",") + ("" if text.rstrip().endswith("]") else "]"))
    names = {
        e["pid"]: e["args"]["name"]
        for e in events
        if e.get("name") == "process_name" and "name" in e["args"]
    }
    done = {}
    for event in events:
        name = names.get(event.get("pid"), "")
        if "bucket" in name and "ts" in event:
            done[name] = max(done.get(name, 0), event["ts"])
    assert len(done) > 1, f"no buckets in the timeline: {sorted(names.values())}"
    return done


class Delayed(tp.schemes.AllReduce):
    """All-reduce that starts after a pause."""

    def exchange(self, gradient, state, wire, name):
        return super().exchange(_delayed(gradient, EXCHANGE_S), state, wire, name)


def test_exposed_communication_is_the_time_not_overlapped(wire):
    """Only the exchange of the last gradients is exposed; the backward pass hides the others."""
    shown_s = _exposed_s("slow/dense.*/kernel", backward_s=2 * EXCHANGE_S)
    assert shown_s >= EXCHANGE_S
    # Compare both exposed times, because load on the machine lengthens both.
    assert 0 < _exposed_s("slow_1/dense.*/kernel", backward_s=2 * EXCHANGE_S) < shown_s


def _exposed_s(delayed, backward_s):
    """Returns the exposed seconds of a step of two layers, whose gradients are `backward_s` apart.

    Args:
      delayed: Pattern of the variables whose exchange takes `EXCHANGE_S`.
    """
    keras.utils.clear_session(free_memory=False)
    model = keras.Sequential([keras.Input((512,)), Slow(0.0), Slow(backward_s)])
    optimizer = tp.DistributedOptimizer(
        sgd(), scheme=[(delayed, Delayed()), (".*", "allreduce")], bucket_bytes=0
    )
    optimizer.exchange.is_timed = True
    model.compile(optimizer=optimizer, loss="mse")
    batch = np.ones((4, 512), "float32")
    model.train_on_batch(batch, batch)
    return optimizer.exposed_s

"""Communication of the top layers overlaps the backward pass of the bottom ones."""

import json
import tempfile
import time
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import tfposeidon as tp
from tests import contract
from tests.on_ranks import models
from tests.on_ranks.training import sgd

EXCHANGE_S = 1.0
"""What a delayed exchange takes."""


def traced(model, optimizer, batch):
    """The train step as `fit` traces it."""
    model.compile(optimizer=optimizer, loss=models.LOSS)
    x, _ = batch
    step = tf.function(model.train_step, reduce_retracing=True)
    return step.get_concrete_function(
        (tf.TensorSpec([None, *x.shape[1:]], x.dtype), tf.TensorSpec([None], "int64"))
    ).graph


def _ancestors(op):
    seen, left = set(), [op]
    while left:
        current = left.pop()
        for parent in [tensor.op for tensor in current.inputs] + list(current.control_inputs):
            if parent not in seen:
                seen.add(parent)
                left.append(parent)
    return seen


def _bucket_of(op, graph):
    """The bucket that an op exchanges: itself, or in a branch."""
    if op.type.startswith("Horovod"):
        return op.name.split(".")[1] if "bucket" in op.name else None
    if op.type not in ("If", "StatelessIf"):
        return None
    branch = graph._get_function(op.get_attr("then_branch").name).graph
    return next(
        (name for inner in branch.get_operations() if (name := _bucket_of(inner, branch))), None
    )


def check_independent(graph, buckets):
    bucket = {op: name for op in graph.get_operations() if (name := _bucket_of(op, graph))}
    collectives = list(bucket)
    assert len(set(bucket.values())) == buckets > 1, sorted(set(bucket.values()))
    for op in collectives:
        above = {bucket[a] for a in _ancestors(op) if a in bucket}
        assert above <= {bucket[op]}, f"{op.name} waits for {above}"


def case_no_collective_waits_for_another_bucket(wire):
    for scheme, _ in contract.SCHEMES.values():
        optimizer = tp.DistributedOptimizer(
            keras.optimizers.SGD(0.1), scheme=scheme, bucket_bytes=0
        )
        check_independent(traced(models.mlp(), optimizer, models.mlp.data(4)), 6)


def case_nor_with_loss_scaling_and_clipping(wire):
    keras.config.set_dtype_policy("mixed_float16")
    optimizer = tp.DistributedOptimizer(
        keras.optimizers.SGD(0.1, global_clipnorm=1.0), bucket_bytes=0
    )
    check_independent(traced(models.mlp(), optimizer, models.mlp.data(4)), 6)


class Slow(keras.layers.Layer):
    """A dense layer whose backward pass takes a while without using the processor."""

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
    """The same so much later, without the processor."""

    def sleep(values):
        time.sleep(pause_s)
        return values

    later = tf.numpy_function(sleep, [tensor], tensor.dtype, stateful=False)
    return tf.ensure_shape(later, tensor.shape)


def case_timeline_shows_the_overlap(wire):
    pause_s, layers = 0.3, 4
    model = keras.Sequential(
        [
            keras.Input((512,)),
            *(Slow(pause_s) for _ in range(layers)),
            keras.layers.Dense(models.CLASSES),
        ]
    )
    model.compile(optimizer=tp.DistributedOptimizer(sgd(), bucket_bytes=2**20), loss=models.LOSS)
    batch = models._floats(4, 512)
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
        # The last two are the first layer's kernel and the bucket of its bias and all small
        # variables: they become ready together.
        assert order[:-2] == sorted(order, key=lambda name: int(name.rpartition("_")[2]))[:-2], (
            order
        )
        # The top bucket is through the wire while the layers below are still computing.
        ahead = done[order[-1]] - done[order[0]]
        assert ahead > (layers - 2) * pause_s * 1e6, (
            f"{ahead / 1e6:.2f} s between first and last exchange: {done}"
        )


def _completions(text):
    """When each bucket's exchange ended, in microseconds, from Horovod's timeline."""
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
    """An all-reduce that takes a while longer."""

    def exchange(self, gradient, state, wire, name):
        return super().exchange(_delayed(gradient, EXCHANGE_S), state, wire, name)


def case_exposed_communication_is_what_computation_does_not_hide(wire):
    """Only the exchange of the last gradients counts, not those hidden by the backward pass."""
    assert _exposed_s("slow/dense.*/kernel", backward_s=2 * EXCHANGE_S) >= EXCHANGE_S
    assert 0 < _exposed_s("slow_1/dense.*/kernel", backward_s=2 * EXCHANGE_S) < EXCHANGE_S


def _exposed_s(delayed, backward_s):
    """Of one step of two layers, the upper one's gradients so long before the lower one's.

    Args:
      delayed: Pattern of the variables whose exchange takes `EXCHANGE_S`.
    """
    keras.utils.clear_session(free_memory=False)
    model = keras.Sequential([keras.Input((512,)), Slow(0.0), Slow(backward_s)])
    optimizer = tp.DistributedOptimizer(
        sgd(), scheme=[(delayed, Delayed()), (".*", "allreduce")], bucket_bytes=0
    )
    model.compile(optimizer=optimizer, loss="mse")
    batch = np.ones((4, 512), "float32")
    model.train_on_batch(batch, batch)
    return optimizer.exposed_s

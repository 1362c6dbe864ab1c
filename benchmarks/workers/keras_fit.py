"""Measures our schemes under `fit`, and Horovod's all-reduce, on the emulated Keras model.

Systems: a scheme's name ("torus2d:float16" has that `wire_dtype`), "ps-late" (the parameter server,
after the whole backward pass), "ps-adam" (the parameter server, with factors of each dense layer
sent to one server), "factors" (sufficient factors of dense layers, all-reduce of the others),
"auto" ("auto:fp16" may compress to 16 bits, "auto:topk" may also send the top 1 %), "horovod" and
"horovod-fp16" (one named all-reduce per gradient, fused by Horovod), and "alone" (no
communication).
"""

import math
import os
import time

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

import keras_callbacks
import tfposeidon as tp
from benchmarks.exchanges import one_server_each, scheme_named
from benchmarks.workers.task import Task
from tfposeidon.autotune import comparison, search
from tfposeidon.autotune.simulation import FUSION_BYTES, FUSION_THRESHOLD
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.exchange import plan as plans
from tfposeidon.lab.accelerator import emulated_model
from tfposeidon.lab.network import payload_bytes

COMPRESSION = {"horovod": "none", "horovod-fp16": "fp16"}
# These systems have options, rules or other names; "dense..." are the dense layers of the models.
SCHEMES = {
    "hybcomm": "hybcomm",
    "ps-late": "ps",
    "factors": [("dense[0-9]+/kernel", "factors"), (".*", "allreduce")],
    "auto": tp.policies.Auto(),
    "auto:fp16": tp.policies.Auto(compression=("fp16",)),
    "auto:topk": tp.policies.Auto(compression=("fp16", "topk"), density=0.01),
}
STEPS_OF_AUTO = comparison.UNTIMED_STEPS + comparison.TIMED_STEPS
"""Steps whose times `auto` uses at the start of the next epoch."""


class StepTimer(keras.callbacks.Callback):
    """Times each step of `fit` on every rank, and counts the bytes that the node sends.

    All ranks begin each step together.

    Args:
      wire: The collectives.
      warm_up: Number of steps of an epoch that are not timed.
      last_epoch: Index of the only timed epoch, after which training stops. Defaults to the first.
    """

    def __init__(self, wire, warm_up, last_epoch=0):
        super().__init__()
        self.wire, self.warm_up, self.last_epoch, self.times = wire, warm_up, last_epoch, []

    @override
    def on_epoch_begin(self, epoch, logs=None):
        # Only the last epoch is timed.
        self.times = []

    @override
    def on_train_batch_begin(self, batch, logs=None):
        exchange_objects(None, self.wire, "bench.begin")
        if batch == self.warm_up:
            self.before = self._node_bytes()
        self.begin = time.perf_counter()

    @override
    def on_train_batch_end(self, batch, logs=None):
        own = time.perf_counter() - self.begin
        everybody = exchange_objects(own, self.wire, "bench.end")
        if batch >= self.warm_up:
            self.times.append(everybody)
            # Count here, not at the end of the epoch: there, ranks exchange zeros once more,
            # because this callback may stop training.
            self.after = self._node_bytes()

    @override
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch == self.last_epoch

    @override
    def on_train_end(self, logs=None):
        # These are the bytes that each rank's node has sent and received.
        self.node_bytes = exchange_objects(
            (self.after - self.before).tolist(), self.wire, "bench.bytes"
        )

    @staticmethod
    def _node_bytes():
        return np.array([payload_bytes(direction=direction) for direction in ("tx", "rx")])


class Late(tp.DistributedOptimizer):
    """Wrapper that starts the exchange after the last gradient."""

    @override
    def apply(self, grads, trainable_variables=None, sample_count=None):
        super().apply(tf.tuple(list(grads)), trainable_variables, sample_count)


def ours(task, system, model, wire):
    """Measures steps of `fit` with the wrapper."""
    wrapper = Late if system.endswith("-late") else tp.DistributedOptimizer
    scheme = SCHEMES.get(system)
    if system == "ps-adam":
        lengths = {v.path: math.prod(v.shape) for v in model.trainable_variables}
        scheme = one_server_each(lengths, wire.topology.size)
    scheme = scheme or scheme_named(system)
    optimizer = wrapper(keras.optimizers.SGD(0.01), scheme=scheme)
    model.compile(optimizer=optimizer, loss="mse")
    fit(task, system, model, wire)


def is_auto(system):
    """Returns whether a system is `auto`."""
    return system.partition(":")[0] == "auto"


def choice_of(plan):
    """Returns the plan, the network profile and the predictions of `auto`."""
    (forecast,) = plan.forecasts
    return {
        "chose": str(forecast.chosen),
        "predicted_s": forecast.chosen.step_s,
        "links": str(forecast.links),
        "plan": str(plan),
    }


def alone(task, system, model, wire):
    """Measures steps of `fit` without any exchange."""
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    fit(task, system, model, wire)


def fit(task, system, model, wire):
    """Trains a compiled model, and records times and bytes of its steps."""
    plans_again = is_auto(system)
    is_late = plans_again or task.options.get("late", False)
    per_epoch = max(task.warm_up + task.steps, STEPS_OF_AUTO if is_late else 0)
    # `auto` compares plans in the second and third epoch, and retains one of them. If schemes have
    # state, each change takes another epoch.
    last_epoch = 6 if system == "auto:topk" else 3 if is_late else 0
    timer = StepTimer(wire, per_epoch - task.steps, last_epoch)
    batch = model.inputs[0].shape[0]
    data = np.ones((batch * per_epoch, 1), "float32")
    callbacks = [timer] if system == "alone" else [keras_callbacks.BroadcastVariables(), timer]
    # The number of epochs is that of long training, so that `auto` amortizes its measurements.
    model.fit(data, data, batch_size=batch, epochs=1000, verbose=0, callbacks=callbacks)
    steps = [[part / task.steps for part in node] for node in timer.node_bytes]
    chosen = choice_of(model.optimizer.plan) if plans_again else {}
    sent_bytes = timer.node_bytes[wire.topology.rank][0]
    task.note_times(system, timer.times, sent_bytes, node_bytes=steps, **chosen)


def horovod(task, system, model, wire):
    """Measures a custom step: one all-reduce per gradient, which Horovod fuses."""
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    compression = getattr(hvd.Compression, COMPRESSION[system])
    data = tf.Variable(tf.ones((model.inputs[0].shape[0], 1)))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(data) - 0.5))
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        means = [
            hvd.allreduce(g, name=f"{system}.{i}", compression=compression)
            for i, g in enumerate(gradients)
        ]
        optimizer.apply(means, model.trainable_variables)
        return loss

    task.measure(
        system, lambda: float(step()), lambda seconds: exchange_objects(seconds, wire, "bench.step")
    )


def main():
    task = Task.from_argument()
    # Like a real accelerator, the emulated one must not block the threads that exchange.
    tf.config.threading.set_inter_op_parallelism_threads(4)
    # Scale the sizes of buckets and of Horovod's fusion like a shrunk model, so that buckets
    # contain the same parts of the model.
    os.environ[FUSION_THRESHOLD] = str(round(FUSION_BYTES / task.shrink**2))
    size = round(plans.DEFAULT_BUCKET_BYTES / task.shrink**2)
    plans.DEFAULT_BUCKET_BYTES = search.DEFAULT_BUCKET_BYTES = size
    topology = tp.init()
    dilation = task.dilation * (1.0 if topology.rank else task.options.get("uneven", 1.0))
    model = emulated_model(task.emulated(), dilation=dilation, seed=topology.rank)
    for system in task.systems:
        run = horovod if system in COMPRESSION else alone if system == "alone" else ours
        run(task, system, model, runtime.wire())


if __name__ == "__main__":
    main()

"""Times steps of the wrapper and of a baseline, alternately.

Systems: "fit" compares one rank with plain Keras. A scheme with the MiB of its buckets, such as
"alltoall 4", exchanges a model's gradients; its baseline is Horovod's `grouped_allreduce` with the
plain optimizer. Steps of the wrapper include its work in `fit`. "synchronization" is the work that
`fit` adds to an epoch, and "start" its work at the start, each compared with a step. "small 10"
compares ten steps per execution of `fit` with a train step that calls Horovod. "small auto 10"
compares ten steps under "auto", after its decision, with ten steps under the scheme that it chose.
"""

import time

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import tfposeidon as tp
from benchmarks.workers.exchange import slowest
from benchmarks.workers.task import Task
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.state.placement import Placement
from tfposeidon.training import entries, global_metrics
from tfposeidon.training.global_metrics import GlobalMetrics

BATCH, STEPS = 64, 10
SMALL_BATCH, SMALL_STEPS = 32, 500


def in_turn(ours, theirs, pairs, measure=slowest):
    """Times two functions alternately.

    Args:
      ours: Function that runs a step with the wrapper.
      theirs: Function that runs a step of the baseline.
      pairs: Number of pairs; the order in each is A B B A.
      measure: Function that takes the wire and one of the two functions, and returns seconds on the
        slowest rank.

    Returns:
      Seconds of the slowest rank, each the mean of two calls, for each pair.
    """
    order, wire = (ours, theirs, theirs, ours), runtime.wire()
    # The first calls trace.
    for function in order:
        function()
    turns = [[measure(wire, function) for function in order] for _ in range(pairs)]
    return {
        "ours_s": [(first + last) / 2 for first, _, _, last in turns],
        "theirs_s": [(second + third) / 2 for _, second, third, _ in turns],
    }


def _as_measured(wire, function):
    return max(exchange_objects(function(), wire, "seconds"))


# ------------------------------------------------------------------ exchanges


def gradients(model):
    """Returns a model's gradients, in the order of the forward pass.

    They are variables, because TensorFlow would fold constants.
    """
    shapes = [
        shape
        for layer in model.layers
        for shape in (layer.kernel, *((length,) for length in layer.vectors))
    ]
    return [tf.Variable(tf.fill(shape, 1e-3), name=f"g{i}") for i, shape in enumerate(shapes)]


def _trained(given):
    return [
        keras.Variable(tf.zeros_like(gradient), name=f"w{i}") for i, gradient in enumerate(given)
    ]


def wrapped(model, scheme, bucket_mib):
    """Returns a function that exchanges and updates with the wrapper."""
    given = gradients(model)
    trained = _trained(given)
    optimizer = tp.DistributedOptimizer(_sgd(), scheme=scheme, bucket_bytes=int(bucket_mib * 2**20))
    # While tracing, the wrapper must assume that the batches of ranks differ in size.
    batch = tf.Variable(BATCH)

    @tf.function
    def step():
        optimizer.apply([v.read_value() for v in given], trained, sample_count=batch.read_value())

    return step


def horovods(model):
    """Returns a function that exchanges by `grouped_allreduce`, and updates without the wrapper."""
    given = gradients(model)
    trained, optimizer = _trained(given), _sgd()
    optimizer.build(trained)

    @tf.function
    def step():
        means = hvd.grouped_allreduce(
            [v.read_value() for v in given], op=hvd.Average, name="grouped"
        )
        optimizer.apply(means, trained)

    return step


# ------------------------------------------------------------------------ fit


def _sgd():
    return keras.optimizers.SGD(0.01, momentum=0.9)


def _fit(optimizer):
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            *(layers.Conv2D(32, 3, strides=2, activation="relu") for _ in range(3)),
            layers.Flatten(),
            layers.Dense(2048, activation="relu"),
            layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    x = np.random.default_rng(0).normal(size=(BATCH, 32, 32, 3)).astype("float32")
    y = np.random.default_rng(1).integers(0, 10, BATCH)
    data = tf.data.Dataset.from_tensors((x, y)).repeat()
    return lambda: model.fit(data, steps_per_epoch=STEPS, verbose=0)


class _ByHand(keras.Sequential):
    """Model whose train step exchanges gradients by Horovod's op."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self._loss_tracker.update_state(loss, sample_weight=tf.shape(x)[0])
        gradients = tape.gradient(loss, self.trainable_weights)
        means = hvd.grouped_allreduce(gradients, op=hvd.Average, name="by_hand")
        self.optimizer.apply(means, self.trainable_weights)
        return {metric.name: metric.result() for metric in self.metrics}


class _Clock(keras.callbacks.Callback):
    """Times epochs without batch hooks, which would make ranks check at each step for a stop."""

    def on_epoch_begin(self, epoch, logs=None):
        self._begin_s = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.step_s = (time.perf_counter() - self._begin_s) / SMALL_STEPS


class _InTurn(keras.callbacks.Callback):
    """Makes Keras call hooks synchronously, which is faster. Horovod's callbacks do so, too."""

    def on_train_batch_end(self, batch, logs=None):
        pass


def _small(kind, optimizer, steps_per_execution):
    """Returns a function that trains a small model and returns the seconds of a step."""
    layers = keras.layers
    hidden = [layers.Dense(64, activation="relu") for _ in range(3)]
    # By default Keras derives the name from the class, and a scope must not begin with "_".
    model = kind([keras.Input((64,)), *hidden, layers.Dense(64)], name="small")
    model.compile(optimizer, "mse", steps_per_execution=steps_per_execution)
    x = np.random.default_rng(0).normal(size=(SMALL_BATCH * SMALL_STEPS, 64)).astype("float32")

    def timed():
        clock = _Clock()
        others = [_InTurn()] if kind is _ByHand else []
        model.fit(x, x, SMALL_BATCH, verbose=0, callbacks=[clock, *others])
        return clock.step_s

    return timed


def _synchronized(at_start):
    """Returns functions for the work that `fit` adds to an epoch of ResNet-50, and for a step.

    With `at_start`, the first function does the work at the start of a model's first `fit` instead:
    ranks with different weights receive those of rank 0.
    """
    keras.utils.set_random_seed(0)
    model = keras.applications.ResNet50(weights=None)
    optimizer = tp.DistributedOptimizer(_sgd())
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    images, labels = np.zeros((8, 224, 224, 3), "float32"), np.zeros(8, "int32")
    model.train_on_batch(images, labels)
    wire, metrics = runtime.wire(), GlobalMetrics()
    metrics.set_model(model)

    def synchronize():
        for _ in range(2):
            entries.difference(model, wire, with_layers=True)
        # Make statistics differ between ranks, as training steps do.
        for variable in entries.variables_of(model, Placement.AVERAGED):
            variable.assign_add(tf.fill(variable.shape, 1e-3 * tp.rank()))
        global_metrics.average_layer_state(model)
        metrics.on_epoch_begin(0)
        metrics.on_epoch_end(0, model.get_metrics_result())

    def start():
        for variable in model.trainable_variables:
            variable.assign_add(tf.fill(variable.shape, 1e-3 * tp.rank()))
        entries.synchronize_start(model, wire)

    return start if at_start else synchronize, lambda: model.train_on_batch(images, labels)


def sides(system, model):
    """Returns functions of the wrapper and of the baseline, which run one step or ten."""
    if system in ("synchronization", "start"):
        return _synchronized(system == "start")
    if system.startswith("small auto"):
        steps = int(system.split()[2])
        ours, theirs = (tp.DistributedOptimizer(_sgd(), scheme=s) for s in ("auto", "allreduce"))
        return _small(keras.Sequential, ours, steps), _small(keras.Sequential, theirs, steps)
    if system.startswith("small"):
        steps = int(system.split()[1])
        ours = tp.DistributedOptimizer(_sgd(), scheme="allreduce")
        return _small(keras.Sequential, ours, steps), _small(_ByHand, _sgd(), steps)
    if system == "fit":
        return _fit(tp.DistributedOptimizer(_sgd())), _fit(_sgd())
    scheme, bucket_mib = system.rsplit(" ", 1)
    return wrapped(model, scheme, float(bucket_mib)), horovods(model)


def main():
    task = Task.from_argument()
    tp.init()
    for system in task.systems:
        measure = _as_measured if system.startswith("small") else slowest
        task.note(system, in_turn(*sides(system, task.emulated()), task.pairs, measure))


if __name__ == "__main__":
    main()

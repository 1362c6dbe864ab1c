"""Trains small models by seed, with local updates or with an exchange in each step.

With the same seed, all systems have the same initial weights, order of samples and schedule.
"""

import dataclasses
import os
import sys
import time
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from typing_extensions import override

import keras_callbacks
import tfposeidon as tp
from benchmarks.exchanges import scheme_named
from benchmarks.harness import ROOT
from benchmarks.local_accuracy import LOCAL_BY_ADAMW
from benchmarks.workers.task import Task
from tfposeidon.schemes.sparse import SparseScheme

BATCH_PER_RANK = 16
EPOCH_STEPS = 64
"""Steps between evaluations, a multiple of the steps between synchronizations. One call of
TensorFlow executes up to this number, because ranks on few cores would wait for Python."""
MOMENTUM = 0.9
DIGITS_FOR_TEST = 360
IMAGES, IMAGES_FOR_TEST, SIDE = 12_000, 2_000, 24


class Samples(NamedTuple):
    """Training and test samples with their classes."""

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


class DataSet(NamedTuple):
    """Samples, a model for them, and learning rates.

    Attributes:
      samples: Function of the seed that returns `Samples` of all ranks.
      layers: Function that returns the model's layers.
      sgd_rate: Initial learning rate of SGD.
      adamw_rate: Initial learning rate of AdamW.
    """

    samples: object
    layers: object
    sgd_rate: float
    adamw_rate: float


class Images:
    """Images drawn by examples/data/draw_shapes.py, the same for all seeds.

    Args:
      scale: Fraction of the images to draw.
    """

    def __init__(self, scale=1.0):
        sys.path.insert(0, str(ROOT / "examples"))
        from data import draw_shapes

        self._drawn = Samples(
            *self._part(draw_shapes, int(scale * IMAGES), 0),
            *self._part(draw_shapes, int(scale * IMAGES_FOR_TEST), 1),
        )

    def _part(self, draw_shapes, count, seed):
        rng = np.random.default_rng(seed)
        labels = rng.permutation(np.arange(count) % len(draw_shapes.CLASSES))
        return np.stack([draw_shapes.image(label, SIDE, rng) for label in labels]), labels

    def __call__(self, seed):
        """Returns `Samples`."""
        return self._drawn


def digits(seed):
    """Returns scikit-learn's digits; the seed selects the test samples."""
    found = load_digits()
    order = np.random.default_rng(seed).permutation(len(found.target))
    x, y = (found.data[order] / 16).astype("float32"), found.target[order]
    test, train = slice(DIGITS_FOR_TEST), slice(DIGITS_FOR_TEST, None)
    return Samples(x[train], y[train], x[test], y[test])


def perceptron():
    """Returns the layers of an MLP with 9,610 parameters."""
    layers = keras.layers
    return [keras.Input((64,)), layers.Dense(128, activation="relu"), layers.Dense(10)]


def convolutions():
    """Returns the layers of a CNN with batch normalization and 42,174 parameters."""
    layers = keras.layers
    found = [keras.Input((SIDE, SIDE, 3)), layers.Rescaling(1 / 64, offset=-2.0)]
    for channels in (12, 24, 48, 64):
        found += [
            layers.Conv2D(channels, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.MaxPooling2D(2),
        ]
    # Replace the last pooling by a mean over the whole image.
    return [*found[:-1], layers.GlobalAveragePooling2D(), layers.Dense(10)]


def data_set(name, scale):
    """Returns a data set by its name.

    Args:
      name: "digits", or another name for drawn images.
      scale: Fraction of the images to draw.
    """
    if name == "digits":
        return DataSet(digits, perceptron, sgd_rate=0.1, adamw_rate=0.003)
    return DataSet(Images(scale), convolutions, sgd_rate=0.1, adamw_rate=0.003)


def part_of(samples, shares, rank, size):
    """Returns the samples of a rank; all ranks have equally many.

    Args:
      samples: `Samples` of all ranks.
      shares: "alike", or "own classes": sorted by class, and cut into as many parts as ranks.
      rank: The rank.
      size: Number of ranks.
    """
    count, test = len(samples.y) // size, slice(rank, None, size)
    if shares == "alike":
        order = np.arange(rank, count * size, size)
    else:
        order = np.argsort(samples.y, kind="stable")[rank * count : (rank + 1) * count]
    return Samples(samples.x[order], samples.y[order], samples.test_x[test], samples.test_y[test])


def batches(own, steps, seed, rank):
    """Returns a dataset of a rank's batches, with the samples in another order in each pass."""
    rng, wanted = np.random.default_rng([seed, rank]), steps * BATCH_PER_RANK
    passes = -(-wanted // len(own.y))
    order = np.concatenate([rng.permutation(len(own.y)) for _ in range(passes)])[:wanted]
    order = order.reshape(steps, BATCH_PER_RANK)
    return tf.data.Dataset.from_tensor_slices((own.x[order], own.y[order]))


def inner_optimizer(data, rule, scheme, steps):
    """Returns the usual inner optimizer of a rule, with a learning rate that decays to 0."""
    if rule == "adamw" or rule in LOCAL_BY_ADAMW:
        rate = keras.optimizers.schedules.CosineDecay(data.adamw_rate, steps)
        return keras.optimizers.AdamW(rate)
    rate = keras.optimizers.schedules.CosineDecay(data.sgd_rate, steps)
    # A sparse scheme that exchanges in each step applies the momentum, before its selection.
    momentum = 0.0 if rule == "sgd" and isinstance(scheme, SparseScheme) else MOMENTUM
    return keras.optimizers.SGD(rate, momentum=momentum, nesterov=rule == "elastic")


def optimizer_of(data, rule, every, scheme, steps):
    """Returns the optimizer of a system.

    Args:
      data: The `DataSet`.
      rule: Outer optimizer of `LocalUpdates`, name in `LOCAL_BY_ADAMW`, or "sgd" or "adamw", which
        exchange gradients in each step.
      every: Steps between synchronizations.
      scheme: Name of a scheme.
      steps: Steps in which the learning rate decays to 0.
    """
    scheme = scheme_named(scheme)
    inner = inner_optimizer(data, rule, scheme, steps)
    if rule not in ("sgd", "adamw"):
        return tp.LocalUpdates(inner, every, LOCAL_BY_ADAMW.get(rule, rule), scheme)
    if isinstance(scheme, SparseScheme):
        scheme = dataclasses.replace(scheme, momentum=MOMENTUM)
    return tp.DistributedOptimizer(inner, scheme)


class Seconds(keras.callbacks.Callback):
    """Records the time of the steps of each epoch."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    @override
    def on_epoch_begin(self, epoch, logs=None):
        tp.barrier()
        self._begin = time.perf_counter()

    @override
    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(time.perf_counter() - self._begin)


class Trainer:
    """Trains a system from several seeds, one after another, with steps that are traced once.

    Args:
      data: The `DataSet`.
      optimizer: Function that returns the optimizer, whose learning rate decays to 0 in the given
        number of steps.
      epochs: Number of epochs of `EPOCH_STEPS` steps.
    """

    def __init__(self, data, optimizer, epochs):
        keras.utils.clear_session()
        self._data, self._epochs, self._steps = data, epochs, epochs * EPOCH_STEPS
        self.optimizer = optimizer(self._steps)
        self._model = keras.Sequential(data.layers())
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        is_local = isinstance(self.optimizer, tp.LocalUpdates)
        # An execution must end at each synchronization.
        steps = self.optimizer.get_config()["sync_every"] if is_local else EPOCH_STEPS
        self._model.compile(self.optimizer, loss, metrics=["accuracy"], steps_per_execution=steps)
        self.optimizer.build(self._model.trainable_variables)
        self._at_first = {id(v): tf.convert_to_tensor(v) for v in self._state()}

    def _state(self):
        optimizer = self.optimizer
        inner = optimizer.inner_optimizer.variables
        return [*optimizer.variables, *(variable for variable, _ in optimizer.rank_state), *inner]

    def _begin(self, seed):
        """Resets the weights to those of a seed, and the optimizer to its initial state."""
        for variable in self._state():
            # State that the first step created was initially 0.
            value = self._at_first.get(id(variable))
            variable.assign(
                tf.zeros_like(tf.convert_to_tensor(variable)) if value is None else value
            )
        keras.utils.set_random_seed(seed)
        self._model.set_weights(keras.Sequential(self._data.layers()).get_weights())

    def train(self, seed, shares, callbacks, validates=True):
        """Trains from a seed, and returns Keras's history.

        Args:
          seed: Seed of weights and order.
          shares: Which samples a rank has; see `part_of`.
          callbacks: Callbacks of `fit`.
          validates: False to omit the validation.
        """
        self._begin(seed)
        # A server has no samples of its own, but needs their shapes.
        workers = tp.workers()
        index = workers.index(tp.rank()) if tp.rank() in workers.ranks else 0
        own = part_of(self._data.samples(seed), shares, index, workers.size)
        return self._model.fit(
            batches(own, self._steps, seed, index),
            epochs=self._epochs,
            steps_per_epoch=EPOCH_STEPS,
            validation_data=(own.test_x, own.test_y) if validates else None,
            validation_batch_size=len(own.test_y),
            callbacks=callbacks,
            verbose=0,
        ).history

    def accuracy(self, seed):
        """Returns the accuracy on all test samples of a seed."""
        samples = self._data.samples(seed)
        size = len(samples.test_y)
        return self._model.evaluate(
            samples.test_x, samples.test_y, batch_size=size, verbose=0, return_dict=True
        )["accuracy"]


def trainer_of(data, system, epochs):
    """Returns the `Trainer` of a system.

    Args:
      data: The `DataSet`.
      system: Arguments of `optimizer_of`, by name.
      epochs: Number of epochs of `EPOCH_STEPS` steps.
    """
    return Trainer(data, lambda steps: optimizer_of(data, **system, steps=steps), epochs)


def accuracies(task, data, system):
    """Returns test accuracies and losses after each epoch, for each seed."""
    trainer = trainer_of(data, system, task.epochs)
    callbacks = [keras_callbacks.MetricAverage()]
    if not isinstance(trainer.optimizer, tp.LocalUpdates):
        callbacks.insert(0, keras_callbacks.AverageBatchNorm())
    runs = [trainer.train(seed, task.shares, callbacks) for seed in task.seeds]
    steps = [EPOCH_STEPS * (epoch + 1) for epoch in range(task.epochs)]
    return {
        "accuracies": [run["val_accuracy"] for run in runs],
        "losses": [run["val_loss"] for run in runs],
        "steps": steps,
        "rounds": [count // system["every"] for count in steps],
        "round_bytes": trainer.optimizer.plan.cost.bytes,
    }


def times(task, data, system):
    """Returns the mean seconds of a step in each epoch but the first."""
    seconds = Seconds()
    trainer = trainer_of(data, system, task.epochs)
    trainer.train(task.seeds[0], task.shares, [seconds], validates=False)
    return {"step_s": [s / EPOCH_STEPS for s in seconds.seconds[1:]]}


def main():
    task = Task.from_argument()
    # All ranks share a few cores, and these models do not benefit from more threads.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    if task.part == "accuracy" and all(one["every"] > 1 for one in task.systems.values()):
        # Polling each millisecond, the default, would take half of the CPU time.
        os.environ["HOROVOD_CYCLE_TIME"] = "3"
    tp.init(network="unknown")
    data = data_set(task.data, task.scale)
    measure = {"accuracy": accuracies, "time": times}[task.part]
    for name, system in task.systems.items():
        begin = time.perf_counter()
        found = measure(task, data, system)
        task.note(name, found | {"wall_s": time.perf_counter() - begin})


if __name__ == "__main__":
    main()

"""Trains a CNN on scikit-learn's digits with each scheme until an accuracy is reached."""

import dataclasses
import time

import keras
import numpy as np
from sklearn.datasets import load_digits
from typing_extensions import override

import keras_callbacks
import tfposeidon as tp
from benchmarks.exchanges import scheme_named
from benchmarks.workers.task import Task
from tfposeidon.schemes.sparse import SparseScheme

BATCH_PER_RANK = 16
TRAINING_SAMPLES = 1437
RATE, MOMENTUM = 0.05, 0.9


class Reached(keras.callbacks.Callback):
    """Records accuracy, loss and training time after each epoch; optionally stops at the target.

    Args:
      target: Validation accuracy to reach, from 0 to 1.
      goes_on: True to train all epochs even if the target is reached.
    """

    def __init__(self, target, goes_on):
        super().__init__()
        self.target, self.goes_on = target, goes_on
        self.figures = {name: [] for name in ("accuracies", "losses", "iterations", "seconds")}
        self.figures |= {"reached_steps": None, "reached_s": None}
        self.seconds = 0.0

    @override
    def on_epoch_begin(self, epoch, logs=None):
        self.begin = time.perf_counter()

    @override
    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations == 1:
            # The first step is not timed, because it traces and compiles.
            self.begin = time.perf_counter()

    @override
    def on_test_begin(self, logs=None):
        self.seconds += time.perf_counter() - self.begin

    @override
    def on_epoch_end(self, epoch, logs=None):
        accuracy = logs["val_accuracy"]
        self.figures["accuracies"].append(float(accuracy))
        self.figures["losses"].append(float(logs["loss"]))
        self.figures["iterations"].append(int(self.model.optimizer.iterations))
        self.figures["seconds"].append(self.seconds)
        if accuracy >= self.target and self.figures["reached_steps"] is None:
            self.figures |= {
                "reached_steps": int(self.model.optimizer.iterations),
                "reached_s": self.seconds,
            }
            self.model.stop_training = not self.goes_on


def data(rank, size):
    """Returns this rank's training samples, and all validation samples.

    Args:
      rank: This rank.
      size: Number of ranks.
    """
    digits = load_digits()
    # Shuffle, because the writers of the last digits differ from those of the first.
    order = np.random.default_rng(0).permutation(len(digits.target))
    x, y = (digits.images[order, ..., None] / 16).astype("float32"), digits.target[order]
    train = slice(rank, TRAINING_SAMPLES - TRAINING_SAMPLES % size, size)
    return (x[train], y[train]), (x[TRAINING_SAMPLES:], y[TRAINING_SAMPLES:])


def model():
    """Returns a CNN with 0.09 M parameters."""
    layers = keras.layers
    stack = [
        layers.Conv2D(32, 3, activation="relu"),
        layers.Conv2D(64, 3, activation="relu"),
        layers.Flatten(),
    ]
    return keras.Sequential(
        [keras.Input((8, 8, 1)), *stack, layers.Dense(64, activation="relu"), layers.Dense(10)]
    )


def optimizer_and_scheme(system):
    """Returns arguments of `DistributedOptimizer` for a system.

    SGD applies the momentum; with a sparse scheme, the scheme applies it before the selection.
    """
    scheme = system if system == "hybcomm" else scheme_named(system)
    if not isinstance(scheme, SparseScheme):
        return {"inner_optimizer": keras.optimizers.SGD(RATE, momentum=MOMENTUM), "scheme": scheme}
    return {
        "inner_optimizer": keras.optimizers.SGD(RATE),
        "scheme": dataclasses.replace(scheme, momentum=MOMENTUM),
    }


def main():
    task = Task.from_argument()
    tp.init()
    train, validation = data(tp.rank(), tp.size())
    for system in task.systems:
        keras.utils.clear_session()
        keras.utils.set_random_seed(task.seed)
        network = model()
        optimizer = tp.DistributedOptimizer(**optimizer_and_scheme(system))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        network.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
        reached = Reached(task.target, task.goes_on)
        callbacks = [keras_callbacks.BroadcastVariables(), keras_callbacks.MetricAverage(), reached]
        options = {
            "batch_size": BATCH_PER_RANK,
            "epochs": task.epochs,
            "verbose": 0,
            "callbacks": callbacks,
        }
        network.fit(*train, validation_data=validation, **options)
        task.note(system, reached.figures)


if __name__ == "__main__":
    main()

"""Provides outer optimizers of `LocalUpdates` in NumPy, and resumes runs."""

import contextlib
import os
import shutil

import keras
import numpy as np

import keras_callbacks
import tfposeidon as tp
from tests.helpers import models
from tests.helpers.callbacks import shared_folder
from tests.helpers.models import rank_variables
from tests.helpers.over_ranks import exchange_objects
from tests.helpers.training import BATCH

STEPS, EVERY = 11, 3
RULES = {
    "average": tp.local.Average,
    "elastic": lambda: tp.local.Elastic(beta=0.8),
    "outer": lambda: tp.local.Outer(keras.optimizers.SGD(0.7, momentum=0.5, nesterov=True)),
    "slow_momentum": lambda: tp.local.SlowMomentum(0.6, rate=0.9),
}


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.5)


class Reference:
    """Outer optimizers in NumPy, applied to replicas in one process.

    Args:
      rule: Name of an outer optimizer.
      replicas: Models that train independently.
      weights: Weight of each replica in the mean, `[replicas]`.
    """

    def __init__(self, rule, replicas, weights=None):
        self.rule, self.replicas = rule, replicas
        self.global_weights = [np.array(w) for w in replicas[0].get_weights()]
        self.velocity = [np.zeros_like(w) for w in self.global_weights]
        self.weights = weights

    def sent(self):
        return [
            [w - c for w, c in zip(replica.get_weights(), self.global_weights, strict=True)]
            for replica in self.replicas
        ]

    def apply(self, sent):
        """Applies the pseudo-gradients of all replicas, which may be some steps old."""
        means = [np.average(d, axis=0, weights=self.weights) for d in zip(*sent, strict=True)]
        before, self.global_weights = self.global_weights, self._moved(means)
        for replica, differences in zip(self.replicas, sent, strict=True):
            replica.set_weights(
                [
                    w - 0.8 / len(self.replicas) * d
                    if self.rule == "elastic"
                    else w - d + new - old
                    for w, d, old, new in zip(
                        replica.get_weights(), differences, before, self.global_weights, strict=True
                    )
                ]
            )

    def _moved(self, means):
        if self.rule == "average":
            return [c + m for c, m in zip(self.global_weights, means, strict=True)]
        if self.rule == "elastic":
            return [c + 0.8 * m for c, m in zip(self.global_weights, means, strict=True)]
        rate, momentum = (0.7, 0.5) if self.rule == "outer" else (0.9, 0.6)
        self.velocity = [momentum * v + rate * m for v, m in zip(self.velocity, means, strict=True)]
        if self.rule == "outer":
            moves = [momentum * v + rate * m for v, m in zip(self.velocity, means, strict=True)]
        else:
            moves = self.velocity
        return [c + move for c, move in zip(self.global_weights, moves, strict=True)]


def fitted(build, start, data, wire, optimizer, **fit):
    """Returns a model that was trained on this rank's share of each batch."""
    model = models.copy(build, start)
    model.compile(optimizer, models.LOSS)
    local = BATCH // wire.topology.size
    options = {"batch_size": local, "shuffle": False, "verbose": 0, **fit}
    model.fit(*models.share(data, BATCH, wire.topology), **options)
    return model


def own_weights(model):
    """Returns the local weights of this rank."""
    with hidden(model):
        return model.get_weights()


@contextlib.contextmanager
def hidden(model):
    """Assigns this rank's local weights to the variables within this context."""
    weights = tp.unwrap(model.optimizer)._synchronization.weights
    weights.hide()
    yield
    weights.show()


def batch_norm():
    layer = keras.layers.Dense
    return keras.Sequential(
        [
            keras.Input((20,)),
            layer(16),
            keras.layers.BatchNormalization(),
            layer(models.CLASSES),
        ]
    )


def local_job(folder, make, every_n_steps=None, build=batch_norm, model=None):
    """Runs two epochs of four batches, with the same data in the same order each time.

    Trains a new model or the given model.
    """
    if model is None:
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(5)
        model = build()
        model.compile(make(), models.LOSS)
    data = models.share(models.mlp.data(4 * BATCH), BATCH, tp.init())
    checkpoint = keras_callbacks.Checkpoint(folder, every_n_steps=every_n_steps, keep=100)
    callbacks = [keras_callbacks.BroadcastVariables(), checkpoint]
    options = {"batch_size": BATCH // tp.size(), "shuffle": False, "verbose": 0}
    model.fit(*data, epochs=2, callbacks=callbacks, **options)
    return model


def whole_state(model):
    variables = [*model.variables, *model.optimizer.variables, *rank_variables(model.optimizer)]
    return [v.numpy() for v in variables]


SPARSE = tp.schemes.TopK(density=0.1, min_elements=0)


def check_resumes(wire, make, snapshots, label=""):
    """Resumes a run from some of its steps, and compares bits with the uninterrupted run.

    A new model resumes the first snapshot, and the same model the others, as in
    `checkpoints.check_resumes`.

    Args:
      wire: Collectives that join the ranks.
      make: Function that creates the optimizer.
      snapshots: Slice of the ten snapshots from which runs are resumed.
      label: Text for errors.
    """
    folder = shared_folder(wire)
    whole = local_job(os.path.join(folder, "whole"), make, every_n_steps=1)
    names = sorted(os.listdir(os.path.join(folder, "whole")))
    assert len(names) == 10
    resumed = None
    for snapshot in names[snapshots]:
        target = os.path.join(folder, f"from-{snapshot}")
        if wire.topology.rank == 0:
            source = os.path.join(folder, "whole", snapshot)
            shutil.copytree(source, os.path.join(target, snapshot))
        exchange_objects(None, wire, "copied")
        resumed = local_job(target, make, model=resumed)
        for a, b in zip(whole_state(resumed), whole_state(whole), strict=True):
            np.testing.assert_array_equal(a, b, f"{label}, resumed from {snapshot}")
    exchange_objects(None, wire, "compared")
    if wire.topology.rank == 0:
        shutil.rmtree(folder)


class SpoilsStatistics(keras.callbacks.Callback):
    """Makes moving means of rank 1 infinite, like an overflow in half precision."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 1 and tp.rank() == 1:
            statistic = self.model.layers[1].moving_mean
            # Callbacks see the global statistics, so assign the local ones.
            with hidden(self.model):
                statistic.assign(np.full(statistic.shape, np.inf))

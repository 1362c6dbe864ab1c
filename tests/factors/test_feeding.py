"""In the lab, HybComm chooses its scheme from the rows of each step, for any kind of input."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import datacache
import keras_callbacks
import tfposeidon as tp
from tests.helpers import models
from tests.helpers.caching import make_folder
from tests.helpers.counting import check_carried
from tests.helpers.models import same_on_all_ranks

pytestmark = pytest.mark.ranks("2x2", lab="--inter 200mbit")

TALK = 200_000
"""Bytes of control messages in a step, and of those that `fit` sends before and after the step."""
WIDTH = 500
"""Side of the kernels; on 2 x 2 ranks, factors of up to 125 rows per rank send fewer bytes."""


def _dataset(x, y, rows):
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(rows)


class _Source:
    """Source with `len(x)` samples for each rank."""

    signature = (tf.TensorSpec([WIDTH]),)

    def __init__(self, x):
        self.x, self.identity = x, len(x)

    def __len__(self):
        return len(self.x) * tp.size()

    def name(self, sample):
        return str(sample)

    def read(self, sample):
        return [self.x[sample % len(self.x)]]

    def decode(self, x):
        return x, x


class _ByCache:
    """Feeds a model from a cache with a replica on each node."""

    def __init__(self, wire, folder):
        self.memory = folder / f"memory{wire.topology.node_index}"

    def __call__(self, model, x, y, rows):
        cache = datacache.Cache(_Source(x), memory=self.memory, partition="replicate")
        data = cache.dataset(rows * tp.size(), seed=0)
        return lambda: model.fit(data, verbose=0, callbacks=[keras_callbacks.CachePosition(cache)])


def _by_fit(feed):
    def train(model, x, y, rows):
        data = feed(x, y, rows)
        return lambda: model.fit(data, verbose=0)

    return train


def _by_generator(model, x, y, rows):
    return lambda: model.fit((batch for batch in [(x, y)]), verbose=0)


def _by_arrays(model, x, y, rows):
    return lambda: model.fit(x, y, batch_size=rows, verbose=0)


def _by_train_on_batch(model, x, y, rows):
    return lambda: model.train_on_batch(x, y)


class _HandWritten:
    """Feeds a custom step without sample counts, which has one trace for all batch sizes."""

    def __init__(self):
        self.step = None

    def __call__(self, model, x, y, rows):
        if self.step is None:
            batch = tf.TensorSpec([None, WIDTH])
            self.step = tf.function(
                lambda x, y: self._step(model, x, y), input_signature=[batch, batch]
            )
        return lambda: self.step(x, y)

    def _step(self, model, x, y):
        with tf.GradientTape() as tape:
            loss = model.compute_loss(y=y, y_pred=model(x))
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, variables), variables)


FEEDERS = {
    "arrays": (_by_arrays, 300),
    "tf.data": (_by_fit(_dataset), 300),
    "PyDataset": (_by_fit(models.Batches), 300),
    "generator": (_by_generator, 300),
    "train_on_batch": (_by_train_on_batch, 4096),
    "custom loop": (_HandWritten(), 4096),
}
"""Function that makes a step with this kind of data, and the larger number of rows."""


def test_bytes_follow_the_rows_of_each_step(wire):
    with make_folder(wire) as folder:
        for name, (make, many) in {**FEEDERS, "datacache": (_ByCache(wire, folder), 300)}.items():
            _check(name, make, many, wire)


def _check(name, make, many, wire):
    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH, use_bias=False)])
    model.compile(
        optimizer=tp.DistributedOptimizer(keras.optimizers.SGD(0.01), scheme="hybcomm"), loss="mse"
    )
    sent = []
    for rows, scheme in ((2, "factors"), (many, "ps"), (2, "factors")):
        batch = np.random.default_rng(0).normal(size=(rows, WIDTH)).astype("float32")
        step = make(model, batch, batch, rows)
        # The first call traces the step.
        step()
        (bucket,) = model.optimizer.plan.buckets
        assert bucket.scheme.name == scheme, (name, rows, str(model.optimizer.plan))
        assert f"K={2 * rows}, P=2" in bucket.choices[0].reason
        costs = [bucket.cost(wire.topology.seen_from(rank)) for rank in wire.topology.node.ranks]
        expected = sum(cost.cross_bytes for cost in costs)
        sent.append(check_carried(step, "eth0", wire, expected, f"{rows} rows by {name}", TALK))
    if wire.topology.rank == 0:
        print(f"{name}: {', '.join(f'{size / 1000:.0f} kB' for size in sent)} a step", flush=True)
    same_on_all_ranks(model.get_weights(), wire)

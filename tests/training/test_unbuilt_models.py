"""The first batch builds models, on ranks with different seeds, for every way of training."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfposeidon as tp
from tests.helpers import models
from tests.helpers.models import same_on_all_ranks

pytestmark = pytest.mark.ranks("2")


class Subclass(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.layers.Dense(8, activation="relu")])
        self.outer = keras.layers.Dense(models.CLASSES)

    def call(self, x):
        return self.outer(self.inner(x))


def sequential():
    return keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(models.CLASSES)])


UNBUILT = [Subclass, sequential]


def _generator(x, y):
    for index in range(0, len(x), 4):
        yield x[index : index + 4], y[index : index + 4]


def _by_arrays(model, x, y):
    model.fit(x, y, batch_size=4, epochs=2, verbose=0)


def _by_generator(model, x, y):
    model.fit(_generator(x, y), verbose=0)


def _by_batches(model, x, y):
    for batch in _generator(x, y):
        model.train_on_batch(*batch)


def _by_dataset(model, x, y):
    model.fit(models.Batches(x, y, 4), epochs=2, verbose=0)


def _by_tf_data(model, x, y):
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    model.fit(data, epochs=2, verbose=0)


OPTIMIZERS = {
    "distributed": lambda: tp.DistributedOptimizer(keras.optimizers.Adam(0.01)),
    "local": lambda: tp.LocalUpdates(keras.optimizers.SGD(0.1), sync_every=2),
}


# The cases include every pair of a model, an optimizer and a way of training.
@pytest.mark.parametrize(
    ("make", "optimizer", "train"),
    [
        (Subclass, "distributed", _by_arrays),
        (sequential, "local", _by_arrays),
        (Subclass, "local", _by_generator),
        (sequential, "distributed", _by_generator),
        (Subclass, "distributed", _by_dataset),
        (sequential, "local", _by_dataset),
    ],
)
def test_ranks_end_with_equal_weights(wire, make, optimizer, train):
    keras.utils.set_random_seed(wire.topology.rank)
    model = make()
    model.compile(OPTIMIZERS[optimizer](), models.LOSS)
    train(model, *models.share(models.mlp.data(32), 8, wire.topology))
    # With local updates, Keras also counts the step that finds no data.
    assert int(model.optimizer.iterations) in (4, 5, 8)
    same_on_all_ranks(model.get_weights(), wire)


def test_the_next_fit_continues_a_generator(wire):
    """`fit` reads the first batch to build the model, but must not close the generator."""
    x, y = models.mlp.data(64)
    batches, model = _generator(x, y), Subclass()
    model.compile(OPTIMIZERS["distributed"](), models.LOSS)
    for _ in range(2):
        model.fit(batches, steps_per_epoch=2, verbose=0)
    assert int(model.optimizer.iterations) == 4


class ReadsValues(Subclass):
    """Model that shapes alone cannot build."""

    def call(self, x):
        return super().call(x * float(np.sign(x.numpy()).max()))


@pytest.mark.parametrize("make", [*UNBUILT, ReadsValues], ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    "train", [_by_arrays, _by_generator, _by_tf_data], ids=lambda f: f.__name__
)
def test_eager_steps_keep_ranks_equal(wire, make, train):
    keras.utils.set_random_seed(wire.topology.rank)
    model = make()
    model.compile(OPTIMIZERS["distributed"](), models.LOSS, run_eagerly=True)
    train(model, *models.share(models.mlp.data(16), 8, wire.topology))
    same_on_all_ranks(model.get_weights(), wire)


class Ragged(Subclass):
    def call(self, x):
        return super().call(x.to_tensor(shape=[None, 20]))


def test_ragged_batches_build_the_model(wire):
    """Symbolic tensors, with which models are usually built, have no `to_tensor`."""
    keras.utils.set_random_seed(wire.topology.rank)
    model = Ragged()
    model.compile(OPTIMIZERS["distributed"](), models.LOSS)
    x, y = models.share(models.mlp.data(16), 8, wire.topology)
    _by_tf_data(model, tf.RaggedTensor.from_tensor(x), y)
    same_on_all_ranks(model.get_weights(), wire)


def test_batches_outside_of_fit_build_the_model(wire):
    """Without `fit`, ranks must start with the same seed."""
    model = Subclass()
    model.compile(OPTIMIZERS["distributed"](), models.LOSS)
    _by_batches(model, *models.share(models.mlp.data(32), 8, wire.topology))
    assert np.isfinite(model.get_weights()[0]).all()
    same_on_all_ranks(model.get_weights(), wire)


class _WithUnusedLayer(keras.Model):
    """Model without a `call`, one of whose layers is never called and therefore never built."""

    def __init__(self):
        super().__init__()
        self.inner, self.unused = keras.layers.Dense(models.CLASSES), keras.layers.Dense(3)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = models.LOSS(y, self.inner(x))
        weights = self.inner.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def test_ranks_start_with_equal_weights_although_a_layer_is_never_built(wire):
    keras.utils.set_random_seed(wire.topology.rank)
    model = _WithUnusedLayer()
    model.compile(tp.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    _by_arrays(model, *models.mlp.data(16))
    assert not model.unused.built
    same_on_all_ranks(model.get_weights(), wire)

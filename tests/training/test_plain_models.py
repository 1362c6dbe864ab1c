"""Communicating optimizers do not change plain Keras models in the same process."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfposeidon as tp
from tests.helpers import models
from tfposeidon.training.session import optimizers_of

DATA = models.mlp.data(8)


class Holder(keras.Model):
    """Model with attributes that the search for optimizers must not read."""

    def __init__(self, optimizer=None):
        super().__init__()
        self.dense = keras.layers.Dense(models.CLASSES)
        self.own = lambda: optimizer
        self.computed = 0

    def call(self, x):
        return self.dense(x)

    @property
    def expensive(self):
        self.computed += 1
        raise RuntimeError("this property must not be read")

    def train_step(self, data):
        optimizer = self.own()
        if optimizer is None:
            return super().train_step(data)
        x, y = data
        with tf.GradientTape() as tape:
            loss = models.LOSS(y, self(x))
        optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


class Items(list):
    """List that counts how many of its items are read."""

    seen = 0

    def __iter__(self):
        for item in super().__iter__():
            Items.seen += 1
            yield item


@pytest.mark.parametrize("are_ours_alive", [False, True])
def test_plain_models_are_searched_without_side_effects(are_ours_alive):
    ours = tp.DistributedOptimizer(keras.optimizers.SGD(0.1)) if are_ours_alive else None
    model = Holder()
    model.compile("sgd", models.LOSS)
    model.fit(*DATA, batch_size=4, verbose=0)
    loop = []
    loop.append(loop)
    # Bypass Keras's tracking, as tools of users do.
    vars(model)["loop"], vars(model)["items"] = loop, Items(range(200_000))
    Items.seen = 0
    assert optimizers_of(model) == []
    model.fit(*DATA, batch_size=4, verbose=0)
    model.predict(DATA[0], verbose=0)
    assert model.computed == 0
    assert Items.seen <= 100 * 10
    assert not hasattr(model, "_tfposeidon_session")
    assert not hasattr(model.train_step, "_tfposeidon")
    del ours


def test_optimizers_in_lists_and_dictionaries_are_found_at_depth_1():
    ours = [tp.DistributedOptimizer(keras.optimizers.SGD(0.1)) for _ in range(4)]
    model = models.mlp()
    model.first, model.listed, model.named = ours[0], [ours[1]], {"it": ours[2]}
    model.deeper = {"there": [ours[3]]}
    assert optimizers_of(model) == ours[:3]


def test_an_optimizer_found_only_in_its_first_step_is_refused():
    model = Holder(tp.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    model.compile(loss=models.LOSS)
    with pytest.raises(ValueError, match=r"must be an attribute of its model.*Assign it"):
        model.fit(*DATA, batch_size=4, verbose=0)


def test_a_second_optimizer_found_only_in_its_first_step_is_refused():
    model = Holder(tp.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    model.compile(tp.DistributedOptimizer(keras.optimizers.SGD(0.1)), models.LOSS)
    with pytest.raises(ValueError, match=r"must be an attribute of its model.*Assign it"):
        model.fit(*DATA, batch_size=4, verbose=0)


def test_another_model_can_train_within_a_fit():
    other = models.mlp()
    optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.1))
    before = other.get_weights()

    def train(epoch, logs):
        optimizer.apply(
            [np.ones(v.shape) for v in other.trainable_variables], other.trainable_variables
        )

    model = models.mlp()
    model.compile("sgd", models.LOSS)
    model.fit(*DATA, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=train)])
    assert np.abs(other.get_weights()[0] - before[0]).max() > 0

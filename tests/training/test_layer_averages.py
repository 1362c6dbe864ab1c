"""`fit` averages layer state before validation and before callbacks see the end of an epoch."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_callbacks
import tfposeidon as tp
from tests.helpers import models
from tests.helpers.callbacks import noisy, shared_folder
from tests.helpers.checks import Raises
from tests.helpers.over_ranks import exchange_objects

pytestmark = pytest.mark.ranks("2")


class _Watching(keras.callbacks.Callback):
    """Records the moving mean in each hook."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def _see(self, hook):
        self.seen[hook] = self.model.layers[1].moving_mean.numpy().tolist()

    def on_train_batch_end(self, batch, logs=None):
        self._see("batch")

    def on_test_batch_end(self, batch, logs=None):
        self._see("validation")

    def on_epoch_end(self, epoch, logs=None):
        self._see("epoch")


def _fit(wire, validates=True, frozen=False, callbacks=(), **options):
    keras.utils.set_random_seed(wire.topology.rank)
    model = noisy()
    model.layers[1].trainable = not frozen
    model.layers[1].moving_mean.assign(np.linspace(0.1, 0.9, 16))
    model.compile(tp.DistributedOptimizer(keras.optimizers.SGD(0.1), **options), models.LOSS)
    x, y = models.mlp.data(16)
    mine = slice(wire.topology.rank, None, 2)
    held = (x[mine], y[mine]) if validates else None
    watching = _Watching()
    model.fit(
        x[mine],
        y[mine],
        batch_size=4,
        verbose=0,
        validation_data=held,
        callbacks=[watching, *callbacks],
    )
    return model, exchange_objects(watching.seen, wire, "seen")


@pytest.mark.parametrize("validates", ["all", "some", "none"])
def test_statistics_are_means_over_ranks(wire, validates):
    _, seen = _fit(wire, {"all": True, "some": wire.topology.rank == 1, "none": False}[validates])
    own = [one["batch"] for one in seen]
    assert own[0] != own[1]
    for one in seen:
        np.testing.assert_allclose(one["epoch"], np.mean(own, 0), rtol=1e-6, atol=1e-7)
        assert one.get("validation", one["epoch"]) == one["epoch"]
    assert seen[0]["epoch"] == seen[1]["epoch"]


def test_equal_statistics_are_not_sent(wire):
    """The mean of equal numbers may differ from them by rounding."""
    model, seen = _fit(wire, frozen=True)
    np.testing.assert_array_equal(
        model.layers[1].moving_mean, np.linspace(0.1, 0.9, 16, dtype="float32")
    )
    assert seen[0] == seen[1]


def test_means_have_the_precision_of_their_values(wire):
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.BatchNormalization(dtype="float64", name="norm")]
    )
    mean = model.get_layer("norm").moving_mean
    mean.assign([1 + 1e-12 * wire.topology.rank] * 2)
    callback = keras_callbacks.AverageBatchNorm()
    callback.set_model(model)
    callback.on_test_begin()
    np.testing.assert_allclose(mean, [1 + 5e-13] * 2, rtol=1e-15)


@pytest.mark.parametrize("synchronizes", [True, False])
def test_averaging_callbacks_allow_validation_on_some_ranks(wire, synchronizes):
    callbacks = [keras_callbacks.AverageBatchNorm(), keras_callbacks.MetricAverage()]
    validates = wire.topology.rank == 1
    model, _ = _fit(wire, validates, callbacks=callbacks, synchronize_model=synchronizes)
    mean = exchange_objects(model.layers[1].moving_mean.numpy().tolist(), wire, "mean")
    assert mean[0] == mean[1]


def test_synchronize_model_false_disables_synchronization(wire):
    model, seen = _fit(wire, synchronize_model=False)
    assert seen[0]["epoch"] != seen[1]["epoch"]
    kernels = exchange_objects(model.layers[0].kernel.numpy().tolist(), wire, "kernels")
    assert kernels[0] != kernels[1]
    config = model.optimizer.get_config()
    assert not tp.DistributedOptimizer.from_config(config).synchronize_model


def test_saving_within_an_epoch_is_refused(wire):
    saves = keras.callbacks.ModelCheckpoint(f"{shared_folder(wire)}/{{epoch}}.keras", save_freq=1)
    with Raises(ValueError, r"ModelCheckpoint\(save_freq=1\).*moving_mean.*every_n_steps"):
        _fit(wire, callbacks=[saves])


@pytest.mark.parametrize("make", [tp.DistributedOptimizer, tp.LocalUpdates])
def test_statistics_start_equal_if_weights_are_equal(wire, make):
    model = noisy()
    model.layers[1].moving_mean.assign(np.full(16, 1.0 + wire.topology.rank))
    model.compile(make(keras.optimizers.SGD(0.1)), models.LOSS)
    begin = {}

    class Begin(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            begin["mean"] = self.model.layers[1].moving_mean.numpy().tolist()

    model.fit(*models.mlp.data(8), batch_size=4, verbose=0, callbacks=[Begin()])
    assert exchange_objects(begin["mean"], wire, "begin") == [[1.0] * 16] * 2


def test_models_built_in_their_first_step_stay_equal(wire):
    class Unbuilt(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = keras.layers.Dense(models.CLASSES)

        def build(self, shape):
            raise NotImplementedError

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self.inner(x))
            weights = self.inner.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

        def call(self, x):
            raise NotImplementedError

    keras.utils.set_random_seed(wire.topology.rank)
    model = Unbuilt()
    model.compile(tp.DistributedOptimizer(keras.optimizers.SGD(0.1)), models.LOSS)
    model.fit(*models.mlp.data(8), batch_size=4, verbose=0)
    models.same_on_all_ranks([v.numpy() for v in model.inner.trainable_variables], wire)


def test_adapted_layers_do_not_prevent_saving(wire, tmp_path):
    adapted = keras.layers.Normalization(mean=0.0, variance=1.0)
    fitted = keras.layers.Normalization()
    fitted.adapt(models.mlp.data(8)[0])
    layers = [keras.Input((20,)), adapted, fitted, keras.layers.Dense(models.CLASSES)]
    model = keras.Sequential(layers)
    model.compile(tp.DistributedOptimizer(keras.optimizers.SGD(0.1)), models.LOSS)
    path = tmp_path / "model.keras"
    saves = [keras.callbacks.ModelCheckpoint(path, save_freq=1)]
    model.fit(*models.mlp.data(8), batch_size=4, verbose=0, callbacks=saves)
    assert path.exists()

"""Workers that exchange with a server, each at its own pace; rank 0 serves."""

import os
import shutil
import time

import keras
import numpy as np
import tensorflow as tf

import keras_callbacks
import tfposeidon as tp
from tests.on_ranks import models
from tests.on_ranks.callbacks import shared_folder
from tests.on_ranks.checks import LogLines, Raises
from tests.on_ranks.models import same_on_all_ranks
from tests.on_ranks.several_optimizers import Gan
from tests.on_ranks.several_optimizers import _data as gan_data
from tfposeidon.asynchronous import server
from tfposeidon.asynchronous.worker import Worker
from tfposeidon.communication.wire import exchange_objects

SERVER = 0
ALPHA, SERVER_ALPHA = 0.3, 0.2


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.5)


def _is_server():
    return tp.rank() == SERVER


def _share(data):
    """This worker's part of the data; the server's is not used, but tells shapes."""
    workers = tp.workers()
    first = 0 if _is_server() else workers.index(tp.rank())
    return tuple(part[first :: workers.size] for part in data)


def _fitted(data, optimizer=None, build=models.mlp, **fit):
    # The same names as in the run that is resumed.
    keras.utils.clear_session(free_memory=False)
    model = build()
    optimizer = optimizer or tp.ElasticAveraging(sgd(), every=3, alpha=ALPHA)
    model.compile(optimizer, models.LOSS, metrics=["accuracy"])
    options = {"batch_size": 4, "verbose": 0, "validation_data": data, **fit}
    return model, model.fit(*_share(data), **options).history


class _Recorded:
    """Records what both sides of each exchange know, while it is entered."""

    def __init__(self):
        self.at_worker, self.at_server = [], []

    def __enter__(self):
        self._own = Worker.swap, server.swap_as_server
        worker_swap, server_swap = self._own

        def swap_at_worker(worker, centre, values, counts, steps):
            swapped = worker_swap(worker, centre, values, counts, steps)
            if swapped.counts:
                self.at_worker.append((values.numpy(), swapped.difference.numpy()))
            return swapped

        def swap_at_server(wire, centre, stops):
            swapped = server_swap(wire, centre, stops)
            if swapped.counts:
                self.at_server.append((centre.numpy(), swapped.difference.numpy()))
            return swapped

        Worker.swap, server.swap_as_server = swap_at_worker, swap_at_server
        return self

    def __exit__(self, *_):
        Worker.swap, server.swap_as_server = self._own


def _gradient_steps(optimizer, variable, count):
    @tf.function
    def step(gradient):
        optimizer.apply([gradient], [variable])

    generator = np.random.default_rng(tp.rank())
    for _ in range(count):
        step(tf.constant(generator.normal(size=variable.shape), tf.float32))


def case_what_workers_gave_is_what_the_centre_gained(wire):
    start = np.linspace(-1, 1, 50).astype("float32")
    for server_alpha in (None, SERVER_ALPHA):
        variable = keras.Variable(start)
        optimizer = tp.ElasticAveraging(sgd(), every=2, alpha=ALPHA, server_alpha=server_alpha)
        optimizer.build([variable])
        with _Recorded() as recorded:
            optimizer.run(lambda o=optimizer, v=variable: _gradient_steps(o, v, 7 + 2 * tp.rank()))
        same_on_all_ranks([variable.numpy()], wire)
        given = sum((ALPHA * d for _, d in recorded.at_worker), np.zeros(50))
        everybody = np.sum(exchange_objects(given.tolist(), wire, "given"), axis=0)
        gained = variable.numpy() - start
        share = 1.0 if server_alpha is None else SERVER_ALPHA / ALPHA
        np.testing.assert_allclose(gained, share * everybody, rtol=1e-4, atol=1e-5)
        # The last one is of steps that were left over: 4, and 5 and 1.
        assert len(recorded.at_worker) == (0 if _is_server() else (7 + 2 * tp.rank() + 1) // 2)
        exchanges = exchange_objects(len(recorded.at_worker), wire, "exchanges")
        assert not _is_server() or len(recorded.at_server) == sum(exchanges)


def case_each_worker_sees_the_newest_centre(wire):
    """Both sides know the same bits of a difference from the centre as it is at that moment."""
    variable = keras.Variable(np.zeros(20, "float32"))
    optimizer = tp.ElasticAveraging(sgd(), every=1, alpha=ALPHA)
    optimizer.build([variable])
    with _Recorded() as recorded:
        optimizer.run(lambda: _gradient_steps(optimizer, variable, 9))
    seen = exchange_objects(
        [models.digest([d]) for _, d in recorded.at_worker], wire, "differences"
    )
    if not _is_server():
        return
    at_workers = sorted(digest for worker in seen for digest in worker)
    assert at_workers == sorted(models.digest([d]) for _, d in recorded.at_server)
    centre = np.zeros(20, "float32")
    for before, difference in recorded.at_server:
        np.testing.assert_allclose(before, centre, rtol=1e-5, atol=1e-6)
        centre = before + np.float32(ALPHA) * difference
    np.testing.assert_allclose(variable.numpy(), centre, rtol=1e-5, atol=1e-6)


class _Slow(keras.callbacks.Callback):
    """Makes the last rank's steps take longer than those of the others."""

    def __init__(self, seconds):
        super().__init__()
        self._seconds = seconds

    def on_train_batch_end(self, batch, logs=None):
        if tp.rank() == tp.size() - 1:
            time.sleep(self._seconds)


def case_fit_ends_with_the_centre_everywhere(wire):
    data = models.mlp.data(96)
    with LogLines() as lines:
        model, history = _fitted(data, epochs=3, callbacks=[_Slow(0.01)])
    same_on_all_ranks(model.get_weights(), wire)
    same_on_all_ranks([np.array(model.evaluate(*data, verbose=0))], wire)
    if _is_server():
        # Epochs that end while it evaluates are skipped.
        assert 1 <= len(history["val_loss"]) <= 3
        assert model.history.epoch[-1] == 2
        # 12 steps of each of 2 workers in an epoch, at the end of the last.
        assert history["exchanges"][-1] == 2 * 3 * 12 / 3
        assert any("rank 0 serves 2 worker(s)" in line for line in lines)
        assert int(model.optimizer.iterations) == 36
    else:
        assert len(history["loss"]) == 3
        assert not any(name.startswith("val_") for name in history)


def case_early_stopping_at_the_server_stops_all(wire):
    data = models.mlp.data(48)
    stop = keras.callbacks.EarlyStopping(
        "val_loss", mode="max", patience=1, restore_best_weights=True
    )
    model, history = _fitted(data, epochs=200, callbacks=[stop])
    same_on_all_ranks(model.get_weights(), wire)
    assert len(history["val_loss" if _is_server() else "loss"]) < 200
    # Those of the best epoch, which the server's callback has restored.
    if _is_server():
        found = model.evaluate(*data, verbose=0, return_dict=True)
        np.testing.assert_allclose(found["loss"], max(history["val_loss"]), rtol=1e-5)


def case_files_are_the_servers(wire):
    folder, data = shared_folder(wire), models.mlp.data(48)
    path = os.path.join(folder, "centre.keras")
    _fitted(data, epochs=1, callbacks=[keras.callbacks.ModelCheckpoint(path)])
    exchange_objects(None, wire, "saved")
    loaded = keras.models.load_model(path)
    assert isinstance(loaded.optimizer, tp.ElasticAveraging)
    same_on_all_ranks(loaded.get_weights(), wire)
    exchange_objects(None, wire, "loaded")
    if _is_server():
        shutil.rmtree(folder)


def case_a_resumed_run_begins_at_the_servers_epoch(wire):
    folder, data = shared_folder(wire), models.mlp.data(48)
    _fitted(data, epochs=2, callbacks=[keras_callbacks.Checkpoint(folder)])
    assert os.listdir(folder)
    resumed = keras_callbacks.Checkpoint(folder)
    model, history = _fitted(data, epochs=3, callbacks=[resumed])
    assert len(history["val_loss" if _is_server() else "loss"]) == 1
    # 6 steps in each of three epochs.
    assert int(model.optimizer.iterations) == 18
    again, history = _fitted(data, epochs=3, callbacks=[keras_callbacks.Checkpoint(folder)])
    assert not history.get("val_loss" if _is_server() else "loss")
    same_on_all_ranks(again.get_weights(), wire)
    assert models.digest(again.get_weights()) == models.digest(model.get_weights())
    assert not _is_server() or int(again.optimizer.iterations) == 18
    exchange_objects(None, wire, "done")
    if _is_server():
        shutil.rmtree(folder)


def case_weights_that_are_not_finite_stay_away_from_the_centre(wire):
    variable = keras.Variable(np.ones(4, "float32"))
    optimizer = tp.ElasticAveraging(sgd(), every=2, alpha=ALPHA)
    optimizer.build([variable])

    def train():
        _gradient_steps(optimizer, variable, 3)
        if tp.rank() == 1:
            variable.assign([np.nan] * 4)
        _gradient_steps(optimizer, variable, 1)
        assert np.isfinite(variable.numpy()).all()
        velocity = next(v for v in optimizer.inner_optimizer.variables if "momentum" in v.name)
        assert tp.rank() != 1 or not velocity.numpy().any()
        _gradient_steps(optimizer, variable, 2)

    with LogLines() as lines:
        optimizer.run(train)
    same_on_all_ranks([variable.numpy()], wire)
    assert np.isfinite(variable.numpy()).all()
    if _is_server():
        assert any("weights of worker 1 are not finite" in line for line in lines)


def case_two_optimizers_in_one_train_step(wire):
    gan, made = Gan(), [tp.ElasticAveraging(sgd(), every=2, alpha=ALPHA) for _ in range(2)]
    gan.compile(*made)
    with Raises(ValueError, "optimizer.build"):
        gan.fit(*gan_data(8), verbose=0)
    for optimizer, part in zip(made, (gan.discriminator, gan.generator), strict=True):
        optimizer.build(part.trainable_weights)
    gan.fit(*_share(gan_data(48)), batch_size=4, epochs=2, verbose=0)
    same_on_all_ranks(gan.get_weights(), wire)
    assert [int(optimizer.iterations) for optimizer in made] == [12, 12]


def case_overflow_delays_nobody(wire):
    def build():
        keras.config.set_dtype_policy("mixed_float16")
        return models.mlp()

    model, _ = _fitted(models.mlp.data(48), build=build, epochs=3)
    same_on_all_ranks(model.get_weights(), wire)
    assert isinstance(model.optimizer.inner_optimizer, keras.optimizers.LossScaleOptimizer)
    # The first steps overflow at Keras's initial scale, and count as calls all the same.
    assert np.isfinite(model.get_weights()[0]).all()


def case_epochs_of_different_and_unknown_length(wire):
    x, y = models.mlp.data(40)
    count = 8 * (1 + tp.rank())
    data = tf.data.Dataset.from_tensor_slices((x[:count], y[:count])).batch(4)
    model = models.mlp()
    model.compile(tp.ElasticAveraging(sgd(), every=2), models.LOSS)
    model.fit(data.filter(lambda *_: True), epochs=2, verbose=0)
    same_on_all_ranks(model.get_weights(), wire)
    assert model.optimizer.alpha == 0.9 / 2


def case_statistics_travel(wire):
    def build():
        return keras.Sequential(
            [
                keras.Input((20,)),
                keras.layers.Dense(8),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(models.CLASSES),
            ]
        )

    model, _ = _fitted(models.mlp.data(96), build=build, epochs=3)
    mean = model.layers[1].moving_mean.numpy()
    assert mean.any()
    same_on_all_ranks([mean, model.layers[1].moving_variance.numpy()], wire)


def case_a_second_fit_goes_on(wire):
    data = models.mlp.data(48)
    model, _ = _fitted(data, epochs=1)
    model.fit(*_share(data), batch_size=4, epochs=1, verbose=0)
    same_on_all_ranks(model.get_weights(), wire)
    assert int(model.optimizer.iterations) == 12


def case_the_plan_names_the_server(wire):
    model, _ = _fitted(models.mlp.data(48), epochs=1)
    text = str(model.optimizer.plan)
    assert "server: rank 0" in text
    assert "alpha 0.3, of the server 0.3" in text
    length = 4 * sum(w.size for w in model.get_weights())
    assert model.optimizer.plan.cost.bytes == length


def case_refusals(wire):
    data = models.mlp.data(48)
    with Raises(ValueError, "Give validation_data"):
        _fitted(data, validation_data=None, validation_split=0.5)
    with Raises(ValueError, "Received: ReduceLROnPlateau"):
        _fitted(data, callbacks=[keras.callbacks.ReduceLROnPlateau()])
    variable = keras.Variable([1.0])
    optimizer = tp.ElasticAveraging(sgd(), every=1)
    where = "trains nothing" if _is_server() else "outside of fit"
    with Raises(Exception, where):
        optimizer.apply([tf.ones([1])], [variable])
    with Raises(RuntimeError, "Optimizers must be the same on all ranks"):
        other = tp.ElasticAveraging(sgd(), every=1 + tp.rank())
        other.build([variable])
        other.run(lambda: None)
    with Raises(ValueError, "not built"):
        model = keras.Sequential([keras.layers.Dense(models.CLASSES)])
        model.compile(tp.ElasticAveraging(sgd()), models.LOSS)
        model.fit(((x, y) for x, y in [data]), verbose=0, steps_per_epoch=1)
    with Raises(RuntimeError, "Pass `server_rank` to the first"):
        tp.init(server_rank=1)
    with Raises(ValueError, "has no scheme to change"):
        optimizer.change_scheme("asa16")

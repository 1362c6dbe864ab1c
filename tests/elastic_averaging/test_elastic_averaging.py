"""Workers exchange weights with a server on any rank, each at its own pace."""

import collections
import os
import shutil
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_callbacks
import tfposeidon as tp
from benchmarks.workers.memory import resident_bytes
from tests.helpers import models
from tests.helpers.callbacks import shared_folder
from tests.helpers.checks import LogLines, Raises, reset_peak
from tests.helpers.elastic_averaging import (
    ALPHA,
    BATCH,
    SERVER_ALPHA,
    elastic_fitted,
    elastic_share,
    elastic_state,
    is_server,
    sgd,
    step_count,
    with_state,
)
from tests.helpers.models import same_on_all_ranks
from tests.helpers.over_ranks import exchange_objects
from tfposeidon.communication.wire import GroupWire
from tfposeidon.elastic_averaging import server
from tfposeidon.elastic_averaging.calls import Worker
from tfposeidon.text import readable_size

pytestmark = pytest.mark.ranks("3", server_rank=0)


rank_1_serves = pytest.mark.ranks("3", server_rank=1)
"""Rank 1 is the server, so that the ranks of the workers are not consecutive."""


def _first_worker():
    return tp.rank() == tp.workers().ranks[0]


class _Recorded:
    """Records the values and differences of each exchange on both sides, within a `with` block."""

    def __init__(self):
        self.at_worker, self.at_server = [], []

    def __enter__(self):
        self._own = Worker.swap, server.sum_of_both
        worker_swap, sum_of_both = self._own

        def swap_at_worker(worker, center, values):
            difference = worker_swap(worker, center, values)
            self.at_worker.append((values.numpy(), difference.numpy()))
            return difference

        def sum_at_server(wire, mine, name):
            found = sum_of_both(wire, mine, name)
            if name == "tp.swap":
                self.at_server.append((-mine.numpy(), found.numpy()))
            return found

        Worker.swap, server.sum_of_both = swap_at_worker, sum_at_server
        return self

    def __exit__(self, *_):
        Worker.swap, server.sum_of_both = self._own


def _of_one_variable():
    """Returns an optimizer, the variable that it trains, and its velocity."""
    variable = keras.Variable(np.ones(4, "float32"))
    optimizer = tp.ElasticAveraging(sgd(), sync_every=2, alpha=ALPHA)
    optimizer.build([variable])
    return optimizer, variable, next(v for v in optimizer.variables if "momentum" in v.name)


def _gradient_steps(optimizer, variable, count):
    @tf.function
    def step(gradient):
        optimizer.apply([gradient], [variable])

    generator = np.random.default_rng(tp.rank())
    for _ in range(count):
        step(tf.constant(generator.normal(size=variable.shape), tf.float32))


def test_an_exchange_needs_two_copies_on_workers_and_one_on_the_server(wire):
    """This test is first, because the allocator retains the memory of earlier tests."""
    length = 16 * 2**20  # 64 MB in two variables
    weights = [keras.Variable(np.zeros(length // 2, "float32"), name=name) for name in "ab"]
    optimizer = tp.ElasticAveraging(keras.optimizers.SGD(0.1), sync_every=1, alpha=ALPHA)
    optimizer.build(weights)

    @tf.function
    def exchange():
        optimizer._exchange_now()

    peaks = []

    def train():
        exchange.get_concrete_function()
        peaks.append(_peak_of(exchange))

    if is_server():
        own = server.Served.swap

        def swap(center, pair):
            peaks.append(_peak_of(lambda: own(center, pair)))

        server.Served.swap = swap
        try:
            optimizer.run(train)
        finally:
            server.Served.swap = own
    else:
        optimizer.run(train)
    # The first exchange has the highest peak; later ones reuse memory that the allocator retained.
    copies = max(peaks) / (4 * length)
    expected = 1 if is_server() else 2
    # The tolerance of half a copy is for the allocator and Gloo.
    assert expected - 0.5 < copies < expected + 0.5, f"{copies:.2f} copies of the weights"


def _peak_of(function):
    reset_peak()
    before = resident_bytes()
    function()
    return resident_bytes(peak=True) - before


@rank_1_serves
def test_global_weights_gain_the_sum_of_the_worker_updates(wire):
    start = np.linspace(-1, 1, 50).astype("float32")
    for server_alpha in (None, SERVER_ALPHA):
        variable = keras.Variable(start)
        optimizer = tp.ElasticAveraging(sgd(), sync_every=2, alpha=ALPHA, server_alpha=server_alpha)
        optimizer.build([variable])
        with _Recorded() as recorded:
            optimizer.run(lambda o=optimizer, v=variable: _gradient_steps(o, v, 7 + 2 * tp.rank()))
        same_on_all_ranks([variable.numpy()], wire)
        given = sum((ALPHA * d for _, d in recorded.at_worker), np.zeros(50))
        everybody = np.sum(exchange_objects(given.tolist(), wire, "given"), axis=0)
        gained = variable.numpy() - start
        share = 1.0 if server_alpha is None else SERVER_ALPHA / ALPHA
        np.testing.assert_allclose(gained, share * everybody, rtol=1e-4, atol=1e-5)
        # Remaining steps cause a final exchange: 4 exchanges on one worker, and 5 on the other.
        assert len(recorded.at_worker) == (0 if is_server() else (7 + 2 * tp.rank() + 1) // 2)
        exchanges = exchange_objects(len(recorded.at_worker), wire, "exchanges")
        assert not is_server() or len(recorded.at_server) == sum(exchanges)


def test_each_worker_receives_the_newest_global_weights(wire):
    """Both sides compute the same bits of the difference from the current global weights."""
    variable = keras.Variable(np.zeros(20, "float32"))
    optimizer = tp.ElasticAveraging(sgd(), sync_every=1, alpha=ALPHA)
    optimizer.build([variable])
    with _Recorded() as recorded:
        optimizer.run(lambda: _gradient_steps(optimizer, variable, 9))
    seen = exchange_objects(
        [models.digest([d]) for _, d in recorded.at_worker], wire, "differences"
    )
    if not is_server():
        return
    at_workers = sorted(digest for worker in seen for digest in worker)
    assert at_workers == sorted(models.digest([d]) for _, d in recorded.at_server)
    center = np.zeros(20, "float32")
    for before, difference in recorded.at_server:
        np.testing.assert_allclose(before, center, rtol=1e-5, atol=1e-6)
        center = before + np.float32(ALPHA) * difference
    np.testing.assert_allclose(variable.numpy(), center, rtol=1e-5, atol=1e-6)


class _Slow(keras.callbacks.Callback):
    """Delays the steps of the last rank."""

    def __init__(self, seconds):
        super().__init__()
        self._seconds = seconds

    def on_train_batch_end(self, batch, logs=None):
        if tp.rank() == tp.size() - 1:
            time.sleep(self._seconds)


@pytest.mark.ranks("3", server_rank=0)
@pytest.mark.ranks("3", server_rank=1)
def test_fit_ends_with_the_global_weights_on_all_ranks(wire):
    data = models.mlp.data(96)
    with LogLines() as lines:
        model, history = elastic_fitted(data, epochs=3, callbacks=[_Slow(0.01)])
    same_on_all_ranks(elastic_state(model), wire)
    assert int(model.optimizer.iterations) == step_count(96, 3)
    same_on_all_ranks([np.array(model.evaluate(*data, verbose=0))], wire)
    (serving,) = set(range(tp.size())) - set(tp.workers().ranks)
    text = str(model.optimizer.plan)
    assert f"server: rank {serving}" in text
    assert "sends per exchange" in text
    assert "alpha 0.3, server alpha 0.3" in text
    if is_server():
        # Epochs that end during an evaluation are skipped.
        assert 1 <= len(history["val_loss"]) <= 3
        assert model.history.epoch[-1] == 2
        workers = tp.workers().size
        assert history["exchanges"][-1] == workers * step_count(96, 3) / 3
        assert any(f"rank {tp.rank()} serves {workers} worker(s)" in line for line in lines)
    else:
        assert len(history["loss"]) == 3
        assert not any(name.startswith("val_") for name in history)


@rank_1_serves
def test_early_stopping_on_the_server_stops_all_ranks(wire):
    data = models.mlp.data(48)
    # The server evaluates four batches of six, which are half of the samples.
    weights, part = np.arange(48) % 3.0, slice(0, 24)
    validation = {"validation_data": (*data, weights), "validation_batch_size": 6}
    stop = keras.callbacks.EarlyStopping(
        "val_loss", mode="max", patience=1, restore_best_weights=True
    )
    model, history = elastic_fitted(
        data, epochs=200, callbacks=[stop], validation_steps=4, **validation
    )
    same_on_all_ranks(model.get_weights(), wire)
    assert len(history["val_loss" if is_server() else "loss"]) < 200
    # The server's callback has restored the weights of the best epoch.
    if is_server():
        x, y = (array[part] for array in data)
        found = model.evaluate(x, y, sample_weight=weights[part], verbose=0, return_dict=True)
        np.testing.assert_allclose(found["loss"], max(history["val_loss"]), rtol=1e-5)


def test_only_the_server_writes_files(wire):
    folder, data = shared_folder(wire), models.mlp.data(48)
    path = os.path.join(folder, "center.keras")
    elastic_fitted(data, epochs=1, callbacks=[keras.callbacks.ModelCheckpoint(path)])
    exchange_objects(None, wire, "saved")
    loaded = keras.models.load_model(path)
    assert isinstance(loaded.optimizer, tp.ElasticAveraging)
    same_on_all_ranks(loaded.get_weights(), wire)
    exchange_objects(None, wire, "loaded")
    if is_server():
        shutil.rmtree(folder)


@rank_1_serves
def test_a_resumed_run_starts_at_the_epoch_of_the_server(wire):
    """The learning rate that a callback has set on the server is restored, too."""
    folder, data = shared_folder(wire), models.mlp.data(48)

    def trained(*arguments, **options):
        # Some steps remain after the last regular exchange, and the last snapshot includes them.
        made = tp.ElasticAveraging(sgd(), sync_every=5, alpha=ALPHA)
        rate = keras.callbacks.LearningRateScheduler(lambda epoch: 0.05 * 0.5**epoch)
        options["callbacks"] = [rate, *options["callbacks"]]
        return elastic_fitted(*arguments, optimizer=made, **options)

    trained(data, epochs=2, callbacks=[keras_callbacks.Checkpoint(folder)])
    assert os.listdir(folder)
    resumed = keras_callbacks.Checkpoint(folder)
    model, history = trained(data, epochs=3, callbacks=[resumed])
    assert len(history["val_loss" if is_server() else "loss"]) == 1
    assert int(model.optimizer.iterations) == step_count(48, 3)
    again, history = trained(data, epochs=3, callbacks=[keras_callbacks.Checkpoint(folder)])
    assert not history.get("val_loss" if is_server() else "loss")
    same_on_all_ranks(again.get_weights(), wire)
    assert models.digest(again.get_weights()) == models.digest(model.get_weights())
    assert int(again.optimizer.iterations) == step_count(48, 3)
    exchange_objects(None, wire, "done")
    if is_server():
        shutil.rmtree(folder)


@rank_1_serves
def test_non_finite_weights_do_not_reach_the_global_weights(wire):
    optimizer, variable, velocity = _of_one_variable()
    recovered = os.path.join(shared_folder(wire), "recovered")
    if is_server():
        # The server starts with the state of a resumed run.
        velocity.assign([0.25] * 4)
        optimizer.iterations.assign(40)

    def train():
        # Callbacks change the learning rate during training.
        optimizer.learning_rate = 0.01
        _gradient_steps(optimizer, variable, 3)
        if _first_worker():
            variable.assign([np.nan] * 4)
        _gradient_steps(optimizer, variable, 1)
        assert np.isfinite(variable.numpy()).all()
        # Optimizer state and step count belong together, so the server sends both to the worker.
        assert (velocity.numpy() == 0.25).all() == _first_worker()
        assert int(optimizer.iterations) == (40 if _first_worker() else 44)
        assert float(optimizer.learning_rate) == np.float32(0.01)
        if _first_worker():
            os.mkdir(recovered)
        # No other worker may end before this, because it would send its optimizer state to the
        # server.
        while not os.path.exists(recovered):
            time.sleep(0.01)
        _gradient_steps(optimizer, variable, 2)

    with LogLines() as lines:
        optimizer.run(train)
    same_on_all_ranks([variable.numpy()], wire)
    if wire.topology.rank == 0:
        shutil.rmtree(os.path.dirname(recovered))
    assert np.isfinite(variable.numpy()).all()
    if is_server():
        broken = tp.workers().ranks[0]
        said = [line for line in lines if f"worker {broken} has non-finite weights" in line]
        assert len(said) == 1, lines


def test_non_finite_optimizer_state_does_not_reach_the_server(wire):
    """The non-finite gradient occurs in the last step before workers send their state."""
    optimizer, variable, velocity = _of_one_variable()

    def train():
        _gradient_steps(optimizer, variable, 2)
        optimizer.apply([tf.fill([4], np.nan if _first_worker() else 1.0)], [variable])

    for _ in range(2):
        optimizer.run(train)
        same_on_all_ranks([variable.numpy(), velocity.numpy()], wire)
        assert np.isfinite([variable.numpy(), velocity.numpy()]).all()


class _Counted:
    """Counts the float32 elements that this rank passes to collectives of pairs."""

    def __enter__(self):
        self.elements = collections.defaultdict(list)
        all_reduce, all_gather = GroupWire.all_reduce, GroupWire.all_gather

        def counting(own):
            def collective(wire, tensor, group, name, *scale):
                if tensor.dtype == tf.float32:
                    self.elements[name].append(int(tf.size(tensor)))
                return own(wire, tensor, group, name, *scale)

            return collective

        GroupWire.all_reduce, GroupWire.all_gather = counting(all_reduce), counting(all_gather)
        return self.elements

    def __exit__(self, *_):
        del GroupWire.all_reduce, GroupWire.all_gather


def test_sent_bytes_equal_the_plan(wire):
    def in_16_bits():
        keras.config.set_dtype_policy("bfloat16")
        layer = keras.layers.Dense
        return keras.Sequential([keras.Input((20,)), layer(8), layer(models.CLASSES)])

    for build in (with_state, in_16_bits):
        made = tp.ElasticAveraging(keras.optimizers.Adam(0.01), sync_every=3, alpha=ALPHA)
        with _Counted() as elements:
            model, _ = elastic_fitted(models.mlp.data(48), made, build, epochs=2)
        exchanges = step_count(48, 2) // 3
        per_exchange = made.plan.cost.bytes / 4
        pairs = tp.workers().size if is_server() else 1
        assert elements["tp.swap"] == [per_exchange] * exchanges * pairs
        assert made.bytes_per_step == 4 * per_exchange / 3
        # Adam has two values per weight, its learning rate and its step count.
        slots = 2 + 2 * sum(v.numpy().size for v in model.trainable_variables)
        # A worker sends this state at the end of both epochs, and receives the final state.
        given = [0, 0, slots] * pairs if is_server() else [0, slots, slots]
        assert sorted(elements["tp.slots"]) == sorted(given)
        assert f"a worker sends {readable_size(4 * slots)} of optimizer state" in str(made.plan)


class _UpdateSizes(keras.callbacks.Callback):
    """Records the mean change of the weights in each step."""

    def __init__(self):
        super().__init__()
        self.sizes, self.begin = [], None

    def on_train_begin(self, logs=None):
        self.sizes = []

    def on_train_batch_begin(self, batch, logs=None):
        if self.begin is None:
            self.begin = [v.numpy() for v in self.model.optimizer.variables]
        self._before = self.model.get_weights()

    def on_train_batch_end(self, batch, logs=None):
        pairs = zip(self.model.get_weights(), self._before, strict=True)
        self.sizes.append(np.mean(np.concatenate([np.abs(a - b).ravel() for a, b in pairs])))


def test_adam_resumes_with_its_state_and_step_count(wire):
    """If Adam's step count restarted at 0, the first update would be ten times as large."""
    folder, data = shared_folder(wire), models.mlp.data(96)

    def fitted(epochs, sizes):
        adam = keras.optimizers.Adam(1e-3, beta_1=0.1, beta_2=0.99)
        # Workers exchange only at the end, so that all updates are Adam's.
        made = tp.ElasticAveraging(adam, sync_every=1000, alpha=ALPHA)
        callbacks = [keras_callbacks.Checkpoint(folder), sizes]
        model, _ = elastic_fitted(data, made, epochs=epochs, callbacks=callbacks)
        same_on_all_ranks(elastic_state(model), wire)
        return elastic_state(model)

    before, after = _UpdateSizes(), _UpdateSizes()
    ended = fitted(3, before)
    fitted(4, after)
    exchange_objects(None, wire, "done")
    if is_server():
        shutil.rmtree(folder)
        return
    assert len(after.sizes) == step_count(96)
    usual = np.mean(before.sizes[-step_count(96) :])
    assert 0.5 * usual < after.sizes[0] < 2 * usual, (after.sizes, usual)
    # All workers begin with the final state of the server.
    for found, expected in zip(after.begin, ended[-len(after.begin) :], strict=True):
        np.testing.assert_array_equal(found, expected)


@rank_1_serves
def test_optimizer_state_is_the_mean_over_workers(wire):
    optimizer, variable, velocity = _of_one_variable()
    own = []

    def train():
        _gradient_steps(optimizer, variable, 5 + 2 * tp.workers().index(tp.rank()))
        own.append(velocity.numpy().tolist())

    optimizer.run(train)
    everybody = [one for given in exchange_objects(own, wire, "velocities") for one in given]
    assert len(everybody) == tp.workers().size
    np.testing.assert_allclose(velocity.numpy(), np.mean(everybody, axis=0), rtol=1e-5, atol=1e-6)
    # The first worker takes 5 steps, and the second 7.
    assert int(optimizer.iterations) == 5 + (tp.workers().size - 1)
    same_on_all_ranks([velocity.numpy()], wire)


def test_a_second_concurrent_training_is_refused(wire):
    """A later `fit` continues training. A `fit` or `run` within a run is refused."""
    data = models.mlp.data(48)
    model, _ = elastic_fitted(data, epochs=1)
    model.fit(*elastic_share(data), batch_size=BATCH, epochs=1, verbose=0)
    same_on_all_ranks(elastic_state(model), wire)
    assert int(model.optimizer.iterations) == step_count(48, 2)
    optimizer = model.optimizer

    def train():
        for begins in (
            lambda: model.fit(*elastic_share(data), batch_size=BATCH, verbose=0),
            lambda: optimizer.run(lambda: None),
        ):
            with Raises(RuntimeError, "must end before it starts again. Received: .* still trains"):
                begins()
        _gradient_steps(other, variable, 3)

    other, variable, _ = _of_one_variable()
    optimizer.run(train, others=[other])
    same_on_all_ranks([*model.get_weights(), variable.numpy()], wire)
    assert int(other.iterations) == 3


def test_invalid_uses_are_refused(wire):
    data = models.mlp.data(48)
    with Raises(ValueError, "Pass validation_data instead"):
        elastic_fitted(data, validation_data=None, validation_split=0.5)
    with Raises(ValueError, "Received: ReduceLROnPlateau"):
        elastic_fitted(data, callbacks=[keras.callbacks.ReduceLROnPlateau()])
    variable = keras.Variable([1.0])
    optimizer = tp.ElasticAveraging(sgd(), sync_every=1)
    where = "server must not train" if is_server() else "must run within fit"
    with Raises(Exception, where):
        optimizer.apply([tf.ones([1])], [variable])
    with Raises(RuntimeError, "Optimizers must be the same on all ranks"):
        other = tp.ElasticAveraging(sgd(), sync_every=1 + tp.rank())
        other.build([variable])
        other.run(lambda: None)
    with Raises(
        RuntimeError, "train the same models for the same epochs. Received: number of models"
    ):
        optimizer.run(lambda: None, models=[] if is_server() else [models.mlp()])
    with Raises(ValueError, "must be built before fit"):
        model = keras.Sequential([keras.layers.Dense(models.CLASSES)])
        model.compile(tp.ElasticAveraging(sgd()), models.LOSS)
        without_shapes = tf.data.Dataset.from_generator(lambda: iter([data]), ("float32", "int64"))
        model.fit(without_shapes, verbose=0, steps_per_epoch=1)
    with Raises(RuntimeError, "`server_rank` to the first"):
        tp.init(server_rank=tp.workers().ranks[0])
    with Raises(ValueError, "does not support a change of the scheme"):
        optimizer.change_scheme(tp.schemes.AllToAll(wire_dtype="float16"))

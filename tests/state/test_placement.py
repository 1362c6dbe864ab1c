"""Tests the placement of layer state: defaults, registered classes, and features that use it."""

import contextlib
import dataclasses
import os
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_callbacks
import tfposeidon as tp
from tests.helpers.callbacks import shared_folder
from tests.helpers.checks import LogLines, Raises
from tests.helpers.local_updates import hidden
from tests.helpers.models import same_on_all_ranks
from tests.helpers.over_ranks import exchange_objects
from tfposeidon.state import snapshots
from tfposeidon.state.placement import (
    Placement,
    another_seed,
    is_seed,
    placement_outside_variables,
    placements_of_layers,
    seeds_of_layers,
)

L = keras.layers


class Codebook(L.Layer):
    """Layer with a codebook that moves with its inputs, a counter, and its last dropout masks."""

    def build(self, shape):
        self.book = self.add_weight(shape=shape[1:], initializer="ones", trainable=False)
        self.steps = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)
        self.dropout = L.Dropout(0.5)
        self.masks = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.book.assign(0.9 * self.book + 0.1 * keras.ops.mean(x, axis=0))
            self.steps.assign(self.steps + 1)
            masks = self.dropout(keras.ops.ones_like(x), training=True)
            self.masks.assign(keras.ops.mean(masks, axis=0))
        return x + self.book


class OwnBook(Codebook):
    """Class that is registered with placements of its variables."""


tp.state.register(OwnBook, lambda layer: [(layer.book, "local")])


class Counter(L.Layer):
    """Layer that counts the samples of this rank."""

    def build(self, shape):
        self.seen = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.seen.assign(self.seen + keras.ops.cast(keras.ops.shape(x)[0], "int64"))
        return x


tp.state.register(Counter, "partial")


class OwnStatistics(L.BatchNormalization):
    """Subclass of a registered class, with another placement."""


class OwnScale(L.Normalization):
    """Subclass with another placement of its values, which are not variables."""


tp.state.register(OwnStatistics, "local")
tp.state.register(OwnScale, "local")


class OwnWords(L.StringLookup):
    """Layer with a local vocabulary on each rank."""


tp.state.register(OwnWords, "local")


class Steps(keras.callbacks.Callback):
    """Callback that counts steps in a variable whose placement it declares."""

    def __init__(self, placement):
        super().__init__()
        self.count = keras.Variable(0, dtype="int64", trainable=False, name="count")
        self.placement = placement

    def state(self):
        return [(self.count, self.placement)]

    def on_train_batch_begin(self, batch, logs=None):
        self.count.assign(self.count + 1)


def _model(book=Codebook, synchronized=False):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    frozen = L.Dense(4, name="frozen")
    frozen.trainable = False
    layers = [
        L.Dense(4),
        frozen,
        L.BatchNormalization(synchronized=synchronized),
        book(name="book"),
    ]
    return keras.Sequential([keras.Input((6,)), *layers, L.Dropout(0.2), L.Dense(1)])


def _recurrent(optimizer, dropout=0.0):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    layers = [L.Bidirectional(L.LSTM(3, stateful=True)), L.Dense(1)]
    layers += [L.Dropout(dropout)] if dropout else []
    model = keras.Sequential([keras.Input(batch_shape=(4, 3, 2)), *layers])
    model.compile(optimizer, "mse")
    return model


def _state(model, *placements):
    return [v for v, placement in placements_of_layers(model) if placement in placements]


def _names(variables):
    return {v.path.split("/", 1)[-1] for v in variables}


def test_default_placements_depend_on_the_kind_of_state():
    model = _model()
    names = {one: _names(_state(model, one)) for one in Placement}
    book = model.get_layer("book")
    assert names[Placement.REPLICATED] == _names([*model.get_layer("frozen").variables, book.steps])
    normalization = model.layers[2]
    statistics = [normalization.moving_mean, normalization.moving_variance]
    assert names[Placement.AVERAGED] == _names([*statistics, book.book, book.masks])
    assert names[Placement.LOCAL] == _names(seeds_of_layers(model))
    everything = sum(len(_state(model, one)) for one in Placement)
    assert everything == len(model.non_trainable_variables)
    normalization.trainable = False
    assert _names(statistics) <= _names(_state(model, Placement.REPLICATED))


def test_registered_placements_override_the_defaults():
    model = _model(OwnBook)
    book = model.get_layer("book")
    assert _names([book.book]) <= _names(_state(model, Placement.LOCAL))
    assert _names([book.masks]) <= _names(_state(model, Placement.AVERAGED))
    # The placement of the nearest class applies.
    own = OwnStatistics()
    model = keras.Sequential([keras.Input((4,)), own])
    assert _names([own.moving_mean]) <= _names(_state(model, Placement.LOCAL))
    assert placement_outside_variables(OwnScale()) == Placement.LOCAL


def test_a_variable_shared_with_an_inner_layer_has_the_placement_of_the_outer_layer():
    class Router(L.Layer):
        def __init__(self, counts):
            super().__init__()
            self.counts = counts

    class Memory(L.Layer):
        def build(self, shape):
            self.counts = self.add_weight(shape=(2,), trainable=False)
            self.router = Router(self.counts)

    tp.state.register(Memory, "partial")
    model = keras.Sequential([Memory()])
    model.layers[0].build((None, 2))
    assert _state(model, Placement.PARTIAL) == [model.layers[0].counts]


def test_states_of_sequences_are_local():
    model = _recurrent("sgd")
    assert sum("rnn_state" in v.path for v in _state(model, Placement.LOCAL)) == 4
    assert not _state(model, Placement.AVERAGED, Placement.REPLICATED)


def test_invalid_registrations_are_refused():
    rule = "must be one of replicated, averaged, local, partial"
    for wrong in ("mean", "sharded"):
        with pytest.raises(ValueError, match=f"{rule}.*'{wrong}'"):
            tp.state.register(L.Dense, wrong)
    with pytest.raises(TypeError, match="must be a layer class"):
        tp.state.register(L.Dropout(0.1), "local")


def test_seeds_of_additional_ranks_are_distinct():
    state = seeds_of_layers(_model())[0].value
    seeds = [another_seed(state, number) for number in range(1000)]
    np.testing.assert_array_equal(seeds[0], state)
    assert len({int(seed) for seed, _ in seeds}) == 1000
    assert {int(count) for _, count in seeds} == {int(state[1])}


def _data(wire):
    x = np.random.default_rng(0).normal(size=(32, 6)).astype("float32")
    mine = x[wire.topology.rank :: wire.topology.size]
    return mine, mine[:, :1]


@pytest.mark.ranks("2")
@pytest.mark.parametrize(
    "make",
    [
        lambda: tp.DistributedOptimizer(keras.optimizers.SGD(0.1)),
        lambda: tp.LocalUpdates(keras.optimizers.SGD(0.1), sync_every=2),
    ],
    ids=["distributed", "local"],
)
def test_fit_synchronizes_all_but_local_state(wire, make):
    """After an epoch, statistics, codebooks and counters are equal, but seeds and masks are not."""
    model = _model()
    model.compile(make(), "mse")
    callbacks = [keras_callbacks.BroadcastVariables(), keras_callbacks.AverageBatchNorm()]
    seen = []

    def look(batch, logs):
        # Callbacks see the global weights, so assign the local weights.
        is_local = isinstance(model.optimizer, tp.LocalUpdates)
        with hidden(model) if is_local else contextlib.nullcontext():
            seen.append(model.get_layer("book").masks.numpy().tolist())

    model.fit(
        *_data(wire),
        batch_size=8,
        epochs=2,
        verbose=0,
        callbacks=[*callbacks, keras.callbacks.LambdaCallback(on_train_batch_end=look)],
    )
    equal = [*model.trainable_variables, *_state(model, "replicated", "averaged")]
    same_on_all_ranks([v.numpy() for v in equal], wire)
    seeds = [v.numpy().tolist() for v in seeds_of_layers(model)]
    assert len({str(one) for one in exchange_objects(seeds, wire, "seeds")}) == 2
    masks = exchange_objects(seen[0], wire, "masks")
    assert masks[0] != masks[1]


@pytest.mark.ranks("2")
def test_local_recurrent_states_are_resumed(wire):
    """Each rank has the states of its own sequences."""
    random = np.random.default_rng(wire.topology.rank)
    data = random.normal(size=(12, 3, 2)).astype("float32"), random.normal(size=(12, 1))
    options = {"batch_size": 4, "shuffle": False, "verbose": 0}
    folder = shared_folder(wire)

    def go(epochs, *callbacks):
        model = _recurrent(tp.DistributedOptimizer(keras.optimizers.SGD(0.1)))
        model.fit(*data, epochs=epochs, callbacks=list(callbacks), **options)
        return [v.numpy() for v in (*model.variables, *_state(model, "local"))]

    whole = go(2, keras_callbacks.BroadcastVariables())
    callbacks = [keras_callbacks.BroadcastVariables(), keras_callbacks.Checkpoint(folder)]
    go(1, *callbacks)
    for a, b in zip(go(2, *callbacks), whole, strict=True):
        np.testing.assert_array_equal(a, b)
    assert len({str(one) for one in exchange_objects(whole[-1].tolist(), wire, "states")}) == 2
    exchange_objects(None, wire, "compared")
    if wire.topology.rank == 0:
        shutil.rmtree(folder)


@pytest.mark.ranks("2")
def test_an_additional_rank_starts_with_new_local_state(wire, monkeypatch):
    """The rank draws its own masks, and starts new sequences."""
    folder, found = shared_folder(wire), []
    data = np.ones((8, 3, 2), "float32"), np.zeros((8, 1))
    read = snapshots.Snapshots.read_latest

    def read_rank_0(files):
        snapshot = read(files)
        own = snapshot and {0: files.read_all_ranks(snapshot)[0]}
        return snapshot and dataclasses.replace(snapshot, own=own, same_layout=False)

    monkeypatch.setattr(snapshots.Snapshots, "read_latest", read_rank_0)
    for epochs in (1, 2):
        model = _recurrent(tp.DistributedOptimizer(keras.optimizers.SGD(0.1)), dropout=0.5)
        note = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda *_, m=model: found.append(
                [(is_seed(v), v.numpy().tolist()) for v in _state(m, "local")]
            )
        )
        callbacks = [keras_callbacks.Checkpoint(folder), note]
        model.fit(*data, epochs=epochs, batch_size=4, verbose=0, callbacks=callbacks)
    states = [value for of_seed, value in found[-1] if not of_seed]
    assert len(states) == 4
    assert all(np.any(state) == (wire.topology.rank == 0) for state in states)
    seeds = [value for of_seed, value in found[-1] if of_seed]
    for first, second in zip(*exchange_objects(seeds, wire, "seeds"), strict=True):
        assert first[0] != second[0]
        assert first[1] == second[1]
    if wire.topology.rank == 0:
        shutil.rmtree(folder)


@pytest.mark.ranks("2")
def test_replica_check_compares_counters(wire):
    model = _model()
    model.compile(tp.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")

    def spoil(batch, logs):
        # The change follows the comparison at the start of `fit`.
        model.get_layer("book").steps.assign(wire.topology.rank)

    callbacks = [
        keras.callbacks.LambdaCallback(on_train_batch_begin=spoil),
        keras_callbacks.ReplicaCheck(1),
    ]
    with Raises(RuntimeError, "After 1 steps: .*book"):
        model.fit(*_data(wire), batch_size=8, verbose=0, callbacks=callbacks)


@pytest.mark.ranks("2")
def test_synchronized_batch_normalization_is_refused(wire):
    model = _model(synchronized=True)
    model.compile(tp.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    with Raises(ValueError, r"synchronized=True.*averages the moving"):
        model.fit(*_data(wire), batch_size=8, verbose=0)


def _counting():
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), Counter(name="counter"), L.Dense(1)])
    model.compile(tp.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    return model, model.get_layer("counter").seen


def _keep_only(names, folder, wire):
    for name in set(os.listdir(folder)) - set(names) if wire.topology.rank == 0 else ():
        shutil.rmtree(os.path.join(folder, name))
    exchange_objects(None, wire, "removed")


@pytest.mark.ranks("2")
def test_sums_of_partial_state_are_preserved(wire, monkeypatch):
    """This holds over epochs and fits, in files, and if a job of other ranks resumes."""
    folder = shared_folder(wire)
    options = {"batch_size": 8, "verbose": 0}
    callbacks = [keras_callbacks.BroadcastVariables(), keras_callbacks.AverageBatchNorm()]
    saving = keras_callbacks.Checkpoint(folder, every_n_steps=1, keep=9)

    def total(seen):
        return sum(exchange_objects(int(seen.numpy()), wire, "total"))

    model, seen = _counting()
    for fits in (1, 2):
        # Each rank has 16 samples.
        model.fit(*_data(wire), epochs=2 * fits, callbacks=[*callbacks, saving], **options)
        assert total(seen) == 2 * 32 * fits
        assert bool(seen.numpy()) == (wire.topology.rank == 0)
    # Without the last two snapshots, the run resumes in the middle of an epoch, where each rank has
    # counted its own samples.
    kept = sorted(os.listdir(folder))[:-2]
    read = snapshots.Snapshots.read_latest

    def read_as_others(files):
        snapshot = read(files)
        own = files.read_all_ranks(snapshot)
        return dataclasses.replace(snapshot, own=own, same_layout=False)

    for patched in (False, True):
        if patched:
            monkeypatch.setattr(snapshots.Snapshots, "read_latest", read_as_others)
        _keep_only(kept, folder, wire)
        model, seen = _counting()
        found = []
        note = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda *_, s=seen, f=found: f.append(int(s.numpy()))
        )
        resumed = keras_callbacks.Checkpoint(folder, keep=9)
        model.fit(*_data(wire), epochs=4, callbacks=[*callbacks, resumed, note], **options)
        begun = exchange_objects(found[0], wire, "begun")
        assert begun == ([112, 0] if patched else [104, 8])
        assert total(seen) == 128
    if wire.topology.rank == 0:
        shutil.rmtree(folder)


@pytest.mark.ranks("2")
def test_callbacks_declare_the_placement_of_their_state(wire):
    """Replicated state is compared; local state is saved and resumed on each rank."""
    rank, folder = wire.topology.rank, shared_folder(wire)
    options = {"batch_size": 8, "verbose": 0}

    def go(placement, begin, epochs, *callbacks):
        model, _ = _counting()
        steps = Steps(placement)
        steps.count.assign(begin)
        model.fit(*_data(wire), epochs=epochs, callbacks=[*callbacks, steps], **options)
        return int(steps.count.numpy())

    with LogLines() as lines:
        assert go("replicated", 10 * rank, 1) == 2
    assert rank or any("'count', which differs on rank(s) [1]" in line for line in lines)
    broadcast = keras_callbacks.BroadcastVariables()
    assert go("replicated", 10 * (1 + rank), 1, broadcast) == 10 + 2
    assert go("local", 10 * rank, 1, keras_callbacks.Checkpoint(folder)) == 10 * rank + 2
    assert go("local", 0, 2, keras_callbacks.Checkpoint(folder)) == 10 * rank + 4
    exchange_objects(None, wire, "compared")
    if rank == 0:
        shutil.rmtree(folder)


@pytest.mark.ranks("2")
def test_each_rank_saves_its_local_vocabulary(wire):
    """Local vocabularies are neither sent nor compared."""
    rank, folder = wire.topology.rank, shared_folder(wire)

    def go(epochs, words):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(3)
        lookup = OwnWords(max_tokens=4, output_mode="one_hot", pad_to_max_tokens=True)
        lookup.set_vocabulary(words)
        model = keras.Sequential([keras.Input((), dtype="string"), lookup, L.Dense(1)])
        model.compile(tp.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        data = np.array(["ant", "bee"] * 2), np.ones(4)
        callbacks = [keras_callbacks.BroadcastVariables(), keras_callbacks.Checkpoint(folder)]
        model.fit(*map(tf.constant, data), epochs=epochs, verbose=0, callbacks=callbacks)
        return lookup.get_vocabulary(include_special_tokens=False)

    own = [["ant", "bee"], ["cat", "dog", "eel"]][rank]
    assert go(1, own) == own
    assert go(2, ["gnu"]) == own
    exchange_objects(None, wire, "compared")
    if rank == 0:
        shutil.rmtree(folder)


@pytest.mark.ranks("3", server_rank=0)
def test_partial_state_is_refused_with_elastic_averaging(wire):
    model, _ = _counting()
    model.compile(tp.ElasticAveraging(keras.optimizers.SGD(0.1)), "mse")
    with Raises(ValueError, "asynchronously cannot sum their parts"):
        model.fit(*_data(wire), batch_size=8, verbose=0)

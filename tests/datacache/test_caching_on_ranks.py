"""Each node holds one copy, epochs contain each sample once, and the source is read once."""

import gc
import itertools
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import datacache
import keras_callbacks
import tfposeidon as tp
from datacache.nodes import sample_exchange
from datacache.nodes.sample_exchange import SampleExchange
from datacache.pool.spec import Layout, owner_nodes
from tests import drawn
from tests.helpers.caching import BATCH, SAMPLES, make_folder
from tests.helpers.checks import Raises
from tests.helpers.over_ranks import exchange_objects

pytestmark = pytest.mark.ranks("2+1")
on_equal_nodes_too = pytest.mark.ranks("2+1", "2x2")


def _open(wire, folder, preprocess=drawn.decode, **arguments):
    memory = folder / f"memory{wire.topology.node_index}"
    arguments = {"memory": memory, **arguments}
    return datacache.Cache(datacache.from_folder(folder / "images"), preprocess, **arguments)


def _over_ranks(wire, value):
    return exchange_objects(value, wire, "value")


def _check_epochs(wire, cache, seed=3):
    data = cache.dataset(BATCH, seed=seed)
    order = datacache.Order(samples=SAMPLES, global_batch=BATCH, seed=seed)
    for epoch in range(3):
        mine = drawn.numbers(cache.counted(data), SAMPLES)
        shares = order.shares(
            datacache.Position(epoch=epoch), wire.topology.rank, wire.topology.size
        )
        assert mine == [number for share, _ in shares for number in share]
        assert sorted(itertools.chain(*_over_ranks(wire, mine))) == list(range(SAMPLES))
    positions = _over_ranks(wire, cache.state_dict())
    assert positions == [order.state_dict(datacache.Position(epoch=3))] * wire.topology.size


@on_equal_nodes_too
def test_epochs_contain_each_sample_once_and_the_source_is_read_once(wire):
    with make_folder(wire) as folder:
        cache = _open(wire, folder)
        _check_epochs(wire, cache)
        reads = sum(_over_ranks(wire, cache.stats().source_reads))
        # On each node, one rank may read the first sample to determine its size, and another rank
        # may read it to create the store.
        nodes = len(wire.topology.nodes)
        assert SAMPLES <= reads <= (SAMPLES if nodes == 1 else SAMPLES + 2 * nodes)
        assert cache._tiers.pool.slots == SAMPLES
        cache.close()
        again = _open(wire, folder)
        again.warm(progress=False)
        assert (
            _over_ranks(wire, len(again._tiers.missing(np.arange(SAMPLES))))
            == [0] * wire.topology.size
        )
        _check_epochs(wire, again)
        assert sum(_over_ranks(wire, again.stats().source_reads)) == 0
        again.close()


def test_closed_caches_are_released(wire):
    with make_folder(wire) as folder:
        cache = _open(wire, folder, partition="split")
        cache.warm(progress=False)
        reader = weakref.ref(cache._reader)
        cache.close()
        del cache
        gc.collect()
        assert reader() is None


@on_equal_nodes_too
def test_each_node_caches_its_part(wire):
    if len(wire.topology.nodes) == 1:
        return
    with make_folder(wire) as folder:
        cache = _open(wire, folder, partition="split")
        memory = cache._tiers.pool
        assert (
            memory.slots
            == memory.spec.shard.assigned_samples
            <= -(-SAMPLES // len(wire.topology.nodes))
        )
        _check_epochs(wire, cache)
        assert memory.filled == memory.slots
        stats = _over_ranks(wire, cache.stats().to_dict())
        assert sum(s["source_reads"] for s in stats) < SAMPLES + wire.topology.size
        assert sum(s["sent"] for s in stats) == sum(s["received"] for s in stats)
        # In three epochs, each rank received those samples of its shares that its node does not
        # hold.
        home = memory.has_room(np.arange(SAMPLES))
        order = datacache.Order(samples=SAMPLES, global_batch=BATCH, seed=3)
        positions = [datacache.Position(epoch=epoch) for epoch in range(3)]
        shares = [
            s for p in positions for s, _ in order.shares(p, wire.topology.rank, wire.topology.size)
        ]
        assert cache.stats().received == sum(int((~home[share]).sum()) for share in shares)
        cache.close()
        assert not (folder / f"memory{wire.topology.node_index}" / cache.fingerprint[:20]).exists()


def test_each_node_caches_decoded_samples_on_disk_only(wire):
    with make_folder(wire) as folder:
        decoded = folder / f"decoded{wire.topology.node_index}"
        cache = _open(wire, folder, memory=None, decoded=decoded)
        cache.warm(progress=False)
        exchange_objects(None, wire, "warm")
        received = cache.stats().received
        _check_epochs(wire, cache)
        assert cache.stats().received == received, "this node must hold all samples"
        reads = sum(_over_ranks(wire, cache.stats().source_reads))
        assert reads <= SAMPLES + 2 * len(wire.topology.nodes)
        cache.close()


def test_parts_that_do_not_fit_are_read_through(wire):
    with make_folder(wire) as folder:
        cache = _open(
            wire,
            folder,
            budget=5 * (8 * 8 * 3 + 8 + 8) + 100,
            disk=folder / f"disk{wire.topology.node_index}",
        )
        _check_epochs(wire, cache)
        reads = sum(_over_ranks(wire, cache.stats().source_reads))
        assert reads <= SAMPLES + wire.topology.size
        cache.close()


def test_texts_and_samples_of_many_sizes_are_sent(wire):
    def preprocess(contents, label):
        return {
            "pixels": drawn.decode(contents, label)[0][: label + 1],
            "text": contents,
            "label": label,
        }

    with make_folder(wire) as folder:
        cache = _open(wire, folder, preprocess, partition="split", variable_shapes=True)
        order, state = datacache.Order(samples=SAMPLES, global_batch=BATCH), None
        for _ in range(2):
            for batch in cache.counted(cache.dataset(BATCH, state=state)):
                for pixels, text, label in zip(
                    batch["pixels"], batch["text"], batch["label"], strict=True
                ):
                    expected = tf.io.decode_png(text)[: label + 1]
                    np.testing.assert_array_equal(pixels[: label + 1], expected)
                    assert not np.any(pixels[label + 1 :])
            state = order.state_dict(datacache.Position(epoch=1))
        cache.close()


def test_training_reports_equal_cache_statistics_on_all_ranks(wire):
    with make_folder(wire) as folder:
        cache = _open(wire, folder, partition="split")
        data = cache.dataset(BATCH).map(
            lambda pixels, label: (tf.cast(pixels, "float32") / 255, label)
        )
        model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(drawn.CLASSES)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tp.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss)
        callbacks = [
            keras_callbacks.BroadcastVariables(),
            keras_callbacks.CachePosition(cache),
            keras_callbacks.CacheStatistics(cache),
        ]
        history = model.fit(data, epochs=3, verbose=0, shuffle=False, callbacks=callbacks).history
        assert len(set(map(str, _over_ranks(wire, history["cache_source_megabytes"])))) == 1
        assert cache.state_dict()["epoch"] == 3
        cache.close()


@pytest.mark.parametrize("steps", [None, 2])
def test_a_pydataset_keeps_its_order_in_fit(wire, steps):
    """By default, `fit` would shuffle the batches on each rank separately."""
    numbers = tf.data.Dataset.range(SAMPLES).map(lambda n: (tf.cast([n], "float32"), [0.0]))
    seen = []

    class Note(keras.layers.Layer):
        def call(self, x, training=None):
            tf.py_function(lambda n: seen.append(n.numpy().ravel().tolist()), [x], [])
            return x

    with make_folder(wire) as folder:
        memory = folder / f"memory{wire.topology.node_index}"
        source = datacache.from_dataset(numbers, key="numbers")
        with datacache.Cache(source, memory=memory) as cache:
            data = cache.pydataset(BATCH)
            model = keras.Sequential([keras.Input((1,)), Note(), keras.layers.Dense(1)])
            model.compile(tp.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse")
            position = keras_callbacks.CachePosition(cache, data)
            model.fit(data, epochs=2, steps_per_epoch=steps, callbacks=[position], verbose=0)
            order = datacache.Order(samples=SAMPLES, global_batch=BATCH)
            count = 2 * (steps or order.steps(datacache.Position(), wire.topology.size))
            batches = order.batches(datacache.Position(), wire.topology.rank, wire.topology.size)
            assert seen == [share.tolist() for share, _ in itertools.islice(batches, count)]


def test_a_batch_across_epochs_may_contain_a_sample_twice(wire):
    """A job on fewer ranks left a sample, which the last rank receives twice from another node."""
    ranks, nodes = wire.topology.size, len(wire.topology.nodes)
    position = datacache.Position(samples=SAMPLES - 1)
    for seed in itertools.count():
        order = datacache.Order(samples=SAMPLES, global_batch=SAMPLES, seed=seed)
        (left, *share), _ = next(order.batches(position, ranks - 1, ranks))
        if left in share and owner_nodes(SAMPLES, nodes)[left] != nodes - 1:
            break
    with make_folder(wire) as folder:
        cache = _open(wire, folder)
        data = cache.dataset(SAMPLES, seed=seed, state=order.state_dict(position))
        mine, _ = next(order.batches(position, wire.topology.rank, ranks))
        assert drawn.numbers(cache.counted(data), SAMPLES) == mine.tolist()
        cache.close()


def test_ranks_may_leave_an_epoch_at_different_steps(wire):
    """The ranks that leave early and the remaining ranks do not wait for each other."""
    with make_folder(wire) as folder:
        cache = _open(wire, folder, partition="split")
        data = cache.counted(cache.dataset(BATCH))
        for _ in range(1 + wire.topology.rank % 2):
            next(data)
        data.close()
        cache.close()


@pytest.mark.parametrize("folders", [{}, {"memory": None}])
def test_ranks_with_different_functions_are_refused(wire, folders):
    with (
        make_folder(wire) as folder,
        Raises(
            ValueError,
            r"All ranks must open the same cache. Received: .* on rank 1\. "
            r".* computed from the source, `pre",
        ),
    ):
        factor = tf.constant(wire.topology.rank, tf.int64)
        _open(
            wire,
            folder,
            lambda contents, label: (drawn.decode(contents, label)[0], label * factor),
            **folders,
        )


def test_each_pass_over_shuffled_data_must_be_reported(wire):
    with make_folder(wire) as folder:
        cache = _open(wire, folder)
        data = cache.dataset(BATCH)
        assert len(list(data))
        with Raises(
            Exception,
            "On several ranks, or within an epoch, training must report the start of each epoch",
        ):
            list(data)
        plain = cache.dataset(BATCH, shuffle=False)
        assert drawn.numbers(plain, SAMPLES) == drawn.numbers(plain, SAMPLES)
        cache.close()


class _Counting:
    """Communicator that counts the bytes that a rank sends to others."""

    def __init__(self, wire):
        self.topology, self._wire, self.sent = wire.topology, wire, {}

    def all_gather(self, tensor, group, name):
        return self._wire.all_gather(tensor, group, name)

    def all_to_all(self, tensor, splits, group, name):
        def count(splits):
            away = sum(n for rank, n in enumerate(splits) if rank != self.topology.rank)
            self.sent[name] = self.sent.get(name, 0) + int(away) * tensor.dtype.size
            return splits

        counted = tf.ensure_shape(
            tf.numpy_function(count, [tf.stack(splits)], tf.int32), [group.size]
        )
        return self._wire.all_to_all(tensor, tf.unstack(counted), group, name)


@on_equal_nodes_too
def test_exchanges_send_samples_lengths_and_requested_indices(wire):
    counting, size, rank = _Counting(wire), wire.topology.size, wire.topology.rank
    samples = [
        drawn.decode(tf.io.encode_png(drawn.image(number)), tf.constant(1, tf.int64))
        for number in range(SAMPLES)
    ]
    samples = [[part.numpy() for part in sample] for sample in samples]
    layout = Layout.of(samples[0])
    exchange = SampleExchange(
        counting,
        "test.exchange",
        layout,
        lambda numbers: [samples[n] for n in numbers],
        lambda: False,
    )
    asked = list(range(rank, SAMPLES, size))
    for number, future in zip(
        asked, exchange.ask(asked, [(rank + 1) % size] * len(asked)), strict=True
    ):
        np.testing.assert_array_equal(future.result()[0], samples[number][0])
    exchange.close()
    given = len(range((rank - 1) % size, SAMPLES, size))
    assert counting.sent == {
        "test.exchange.numbers": 8 * len(asked),
        "test.exchange.lengths": 8 * given,
        "test.exchange.samples": (8 * 8 * 3 + 8) * given,
    }


def test_samples_beyond_the_sizes_of_one_collective_are_sent_in_parts(wire, monkeypatch):
    if wire.topology.size == 1:
        return
    size, rank = wire.topology.size, wire.topology.rank
    monkeypatch.setattr(sample_exchange, "MOST_BYTES", 100 * size)
    layout = Layout.of([np.zeros(40)])
    exchange = SampleExchange(
        wire,
        "test.parts",
        layout,
        lambda n: [[np.full(40, float(one))] for one in n],
        lambda: False,
    )
    # Ranks request different numbers of samples, and some requests need several collectives.
    asked = list(range(3 * rank))
    futures = exchange.ask(asked, [(rank + 1 + number % (size - 1)) % size for number in asked])
    for number, future in zip(asked, futures, strict=True):
        np.testing.assert_array_equal(future.result()[0], np.full(40, float(number)))
    exchange.close()


def test_failed_requests_are_reported_to_the_requesting_ranks(wire):
    if wire.topology.size == 1:
        return
    layout = Layout.of([np.int64(0)])

    def answer(numbers):
        assert 7 not in numbers, "sample 7 is missing"
        return [[np.array(number)] for number in numbers]

    exchange = SampleExchange(wire, "test.failing", layout, answer, lambda: False)
    other = (wire.topology.rank + 1) % wire.topology.size
    (fine,) = exchange.ask([3], [other])
    assert fine.result()[0] == 3
    exchange_objects(None, wire, "asked")
    (lost,) = exchange.ask([7], [other])
    with Raises(datacache.SourceError, rf"sample 7 is missing.*\(on rank {other}\)"):
        lost.result()
    (again,) = exchange.ask([4], [other])
    assert again.result()[0] == 4
    exchange.close()

"""The cache as scripts use it, on one rank: every sample is f(its number), whatever was there before."""

import itertools
import json
import logging
import os
import pickle
import resource

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

import datacache
import keras_callbacks
from datacache.batches import BUFFERS, LARGE_PAGE, Buffers
from datacache.errors import CacheError
from datacache.pool.layout import Layout
from tests import drawn

SAMPLES, BATCH = 24, 7


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return drawn.folder(tmp_path_factory.mktemp("images"), SAMPLES)


@pytest.fixture
def opened(tmp_path):
    """Opens caches below the test's folder, and closes them after it."""
    caches = []

    def open_cache(source, preprocess=drawn.decode, **changed):
        if not hasattr(source, "identity"):
            source = datacache.from_folder(source)
        caches.append(
            datacache.Cache(source, preprocess, **{"memory": tmp_path / "memory"} | changed)
        )
        return caches[-1]

    yield open_cache
    for cache in caches:
        cache.close()


def _epoch(data):
    return drawn.numbers(data, SAMPLES)


def test_buffers_begin_with_a_large_page_and_are_used_again_once_nobody_holds_them():
    buffers = Buffers(Layout.of([np.zeros((8, 8, 3), "uint8"), np.int64(0)]))
    images, labels = buffers.take(BATCH)
    address = images.ctypes.data
    assert address % LARGE_PAGE == 0
    others = [buffers.take(BATCH) for _ in range(3)]
    assert len({address, *(of[0].ctypes.data for of in others)}) == 4
    view = images[1:, 2]
    del images
    assert buffers.take(BATCH)[0].ctypes.data != address
    del labels
    assert buffers.take(BATCH)[0].ctypes.data != address
    del view
    assert buffers.take(BATCH - 1)[0].ctypes.data == address


def test_memory_of_batches_is_made_before_it_is_asked_for():
    buffers = Buffers(Layout.of([np.zeros(2**20, "uint8")]))
    buffers.prepare(3, BATCH).join()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    taken = [buffers.take(BATCH)[0] for _ in range(3)]
    for array in taken:
        array[:] = 1
    # Pages of 4 KiB that are touched for the first time would be 5376.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1000
    assert len({array.ctypes.data for array in [*taken, *buffers.take(BATCH)]}) == 4


@pytest.mark.parametrize("samples", [SAMPLES, 2])
def test_a_warm_cache_makes_the_memory_of_batches_ahead(images, opened, monkeypatch, samples):
    made = []
    monkeypatch.setattr(Buffers, "prepare", lambda _, count, samples: made.append((count, samples)))
    cache = opened(images)
    cache.dataset(BATCH)
    assert not made
    cache.warm(progress=False)
    data = cache.dataset(samples)
    assert made == [(1, SAMPLES) if samples == SAMPLES else (BUFFERS, 2)]
    assert sorted(_epoch(data)) == list(range(SAMPLES))


def test_epochs_are_exact_and_later_ones_read_nothing(images, opened):
    cache = opened(images)
    data = cache.dataset(BATCH, seed=5)
    assert data.element_spec == (
        tf.TensorSpec([None, 8, 8, 3], tf.uint8),
        tf.TensorSpec([None], tf.int64),
    )
    epochs = [_epoch(data) for _ in range(3)]
    assert len(data) == 4
    for number, epoch in enumerate(epochs):
        order = datacache.Order(samples=SAMPLES, global_batch=BATCH, seed=5).permutation(number)
        assert epoch == order.tolist()
    stats = cache.stats()
    assert stats.source_reads == SAMPLES
    assert stats.source_bytes == sum(path.stat().st_size + 8 for path in images.rglob("*.png"))
    assert stats.memory_hits == 2 * SAMPLES + 1
    assert f"{SAMPLES} of {SAMPLES} samples" in str(cache)
    assert _epoch(cache.dataset(BATCH, shuffle=False)) == list(range(SAMPLES))


def test_a_restart_reads_nothing(images, opened):
    opened(images).warm(progress=False)
    cache = opened(images)
    assert sorted(_epoch(cache.dataset(BATCH))) == list(range(SAMPLES))
    assert cache.stats().source_reads == 0


def test_batches_are_left_alone(images, opened):
    """Memory of batches is used again only once nobody holds one, or an array of one."""
    data = opened(images).dataset(4, shuffle=False)
    held = [batch for _ in range(8) for batch in data]
    views = [memoryview(pixels) for pixels, _ in held]
    addresses = {np.asarray(view).ctypes.data for view in views}
    assert len(addresses) == len(views), "each batch that is held has memory of its own"
    del held
    for _ in range(4):
        for _ in data:
            pass
    for place, view in enumerate(views):
        np.testing.assert_array_equal(view, [drawn.image(place % 6 * 4 + i) for i in range(4)])
    del views, view
    again = {np.asarray(memoryview(pixels)).ctypes.data for pixels, _ in data}
    assert addresses & again, (
        "memory that nobody holds any more is used again, and TensorFlow makes no copy"
    )


def _scaled(factor):
    factor = tf.constant(factor, tf.int64)
    return lambda contents, label: (drawn.decode(contents, label)[0], label * factor)


def _with_loop(steps):
    def preprocess(contents, label):
        for _ in tf.range(steps):
            label += 1
        return drawn.decode(contents, label)[0], label

    return tf.autograph.experimental.do_not_convert(
        lambda c, x: tf.autograph.to_graph(preprocess)(c, x)
    )


def _with_variable(value):
    variable = tf.Variable(value, dtype=tf.int64)
    return lambda contents, label: (drawn.decode(contents, label)[0], label + variable)


def _with_cases(factor):
    def preprocess(contents, label):
        cases = [lambda: label, lambda: label + 1, lambda: label * factor]
        return drawn.decode(contents, label)[0], tf.switch_case(tf.cast(label, tf.int32), cases)

    return preprocess


def _with_condition(factor):
    def preprocess(contents, label):
        return drawn.decode(contents, label)[0], tf.cond(
            label > 1, lambda: label * factor, lambda: label
        )

    return preprocess


@pytest.mark.parametrize(
    "kind", [_scaled, _with_loop, _with_variable, _with_cases, _with_condition]
)
def test_another_function_is_another_cache(images, opened, kind):
    one, same, other = (opened(images, kind(value)) for value in (2, 2, 3))
    assert one.fingerprint == same.fingerprint != other.fingerprint
    one.warm(progress=False)
    labels = [
        np.concatenate([y for _, y in cache.dataset(BATCH, shuffle=False)])
        for cache in (same, other)
    ]
    assert same.stats().source_reads == 0
    expected = [
        kind(value)(tf.io.encode_png(drawn.image(0)), tf.constant(2, tf.int64))[1]
        for value in (2, 3)
    ]
    assert [int(y[-1]) for y in labels] == [int(value) for value in expected]


def test_fingerprints_are_those_of_other_processes(images, opened):
    """Names of functions in graphs are numbered within a process."""
    for kind in (_with_loop, _with_cases, _with_condition):
        before = opened(images, kind(4)).fingerprint
        for _ in range(3):
            tf.function(lambda: tf.constant(1)).get_concrete_function()
            opened(images, _scaled(7))
        assert opened(images, kind(4)).fingerprint == before


def test_another_source_or_version_is_another_cache(tmp_path, opened):
    folder = drawn.folder(tmp_path / "images", 6)
    fingerprints = [opened(folder).fingerprint, opened(folder, version=2).fingerprint]
    file = folder / "class0" / "00000.png"
    file.write_bytes(tf.io.encode_png(drawn.image(99)).numpy())
    cache = opened(folder)
    assert len({*fingerprints, cache.fingerprint}) == 3
    pixels, _ = next(iter(cache.dataset(6, shuffle=False)))
    np.testing.assert_array_equal(pixels[0], drawn.image(99))


def test_what_the_graph_does_not_show_is_said(images, opened, caplog):
    def random(contents, label):
        return tf.image.random_flip_left_right(drawn.decode(contents, label)[0]), label

    def python(contents, label):
        return drawn.decode(contents, label)[0], tf.ensure_shape(
            tf.numpy_function(lambda x: x, [label], tf.int64), []
        )

    with caplog.at_level(logging.WARNING, "datacache"):
        opened(images, random)
        opened(images, python)
    assert "draws at random (RandomUniform" in caplog.text
    assert "calls Python code" in caplog.text


def test_the_disk_keeps_what_was_read(images, tmp_path, opened):
    opened(images, disk=tmp_path / "disk").warm(progress=False)

    def half(contents, label):
        return drawn.decode(contents, label)[0][::2, ::2], label

    cache = opened(images, half, disk=tmp_path / "disk")
    pixels, _ = next(iter(cache.dataset(BATCH, shuffle=False)))
    np.testing.assert_array_equal(pixels[6], drawn.image(6)[::2, ::2])
    cache.warm(progress=False)
    assert (cache.stats().source_reads, cache.stats().disk_hits) == (0, SAMPLES)


def test_decoded_samples_survive_the_memory(images, tmp_path, opened):
    opened(images, decoded=tmp_path / "decoded").warm(progress=False)
    cache = opened(images, decoded=tmp_path / "decoded", memory=tmp_path / "new memory")
    assert sorted(_epoch(cache.dataset(BATCH))) == list(range(SAMPLES))
    assert (cache.stats().source_reads, cache.stats().decoded_hits) == (0, SAMPLES)


@pytest.mark.parametrize("memory", ["some", None])
def test_what_does_not_fit_is_read_through(images, tmp_path, opened, memory):
    room = 5 * (8 * 8 * 3 + 8 + 8) + 100
    cache = opened(images, budget=room, **({} if memory else {"memory": None}))
    data = cache.dataset(BATCH)
    for _ in range(3):
        assert sorted(_epoch(data)) == list(range(SAMPLES))
    kept = 5 if memory else 0
    assert cache.stats().memory_hits in (2 * kept, 2 * kept + 1)
    # The first one is read once more if there is no room for it.
    first = cache._levels.memory is None or not cache._levels.memory.has_room(np.array([0]))[0]
    assert cache.stats().source_reads == 3 * SAMPLES - 2 * kept + first
    assert cache.stats().unkept == 3 * (SAMPLES - kept)


def test_without_room_there_is_one_level_less(images, opened, caplog):
    with caplog.at_level(logging.WARNING, "datacache"):
        cache = opened(images, budget=100)
    assert (
        "one level less. A pool needs room before it begins. Received: 100 bytes, for samples of 208"
        in caplog.text
    )
    assert sorted(_epoch(cache.dataset(BATCH))) == list(range(SAMPLES))
    assert "nothing in memory" in str(cache)


@pytest.mark.parametrize("verify", ["first", "always"])
def test_torn_samples_heal(images, opened, verify, caplog):
    opened(images).warm(progress=False)
    cache = opened(images, verify=verify)
    pool = cache._levels.memory
    pool._columns[0][7, 0, 0, 0] ^= 1
    data = cache.dataset(BATCH)
    assert sorted(_epoch(data)) == list(range(SAMPLES))
    assert (cache.stats().healed, cache.stats().source_reads) == (1, 1)
    if verify == "always":
        pool._columns[1][3] += 1
        assert sorted(_epoch(data)) == list(range(SAMPLES))
        assert cache.stats().healed == 2


class Flaky:
    """A source that fails so many times for each sample."""

    def __init__(self, source, failures):
        self._source, self._left = source, dict.fromkeys(range(len(source)), failures)

    def __getattr__(self, name):
        return getattr(self._source, name)

    def __len__(self):
        return len(self._source)

    def read(self, sample):
        self._left[sample] -= 1
        if self._left[sample] >= 0:
            raise OSError(5, "Input/output error")
        return self._source.read(sample)


def test_reads_are_tried_again_and_then_named(images, opened, monkeypatch):
    monkeypatch.setattr("datacache.levels.source_level.FIRST_PAUSE_S", 0.001)
    source = datacache.from_folder(images)
    cache = opened(Flaky(source, 2))
    assert sorted(_epoch(cache.dataset(BATCH))) == list(range(SAMPLES))
    assert cache.stats().retries == 2 * SAMPLES
    flaky = Flaky(source, 2)
    cache = opened(flaky, memory=None)
    flaky._left[3] = 9
    with pytest.raises(
        Exception,
        match=r"A sample must be readable. Received: \[Errno 5\].* for .*00003.png, 4 times",
    ):
        _epoch(cache.dataset(BATCH))


def test_a_sample_that_cannot_be_decoded_is_named(tmp_path, opened):
    folder = drawn.folder(tmp_path / "images", SAMPLES)
    (folder / "class1" / "00011.png").write_bytes(b"no image")
    with pytest.raises(
        datacache.SourceError,
        match=r"`preprocess` must take every sample. .* for .*00011.png. Mend it",
    ):
        opened(folder).warm(progress=False)


def test_nested_samples_of_many_sizes(images, opened):
    def preprocess(contents, label):
        pixels = tf.io.decode_png(contents, 3)[: label + 1]
        return {
            "pixels": pixels,
            "more": (label, tf.strings.substr(contents, 1, 3 + tf.cast(label, tf.int32))),
        }

    cache = opened(images, preprocess, variable_shapes=True)
    for _ in range(2):
        for batch in cache.dataset(SAMPLES, shuffle=False):
            label, text = batch["more"]
            assert batch["pixels"].shape == (SAMPLES, 3, 8, 3)
            for number in range(SAMPLES):
                rows = number * drawn.CLASSES // SAMPLES + 1
                np.testing.assert_array_equal(
                    batch["pixels"][number, :rows], drawn.image(number)[:rows]
                )
                assert not np.any(batch["pixels"][number, rows:])
                assert label[number] == rows - 1
                assert text[number].numpy() == b"PNG\r\n\x1a"[: rows + 2]
    assert cache.stats().source_reads == SAMPLES
    with pytest.raises(
        Exception,
        match=r"All samples must have the same shapes and types.* or say variable_shapes=True",
    ):
        opened(images, lambda c, y: preprocess(c, y)["pixels"]).warm(progress=False)


@pytest.mark.parametrize("disk", [False, True])
def test_in_place_of_the_cache_of_tf_data(tmp_path, opened, disk):
    calls = []

    def elements():
        calls.append(None)
        for number in range(SAMPLES):
            yield drawn.image(number), number * drawn.CLASSES // SAMPLES

    spec = (tf.TensorSpec([8, 8, 3], tf.uint8), tf.TensorSpec([], tf.int64))
    data = tf.data.Dataset.from_generator(elements, output_signature=spec)
    with pytest.raises(
        datacache.SourceError,
        match=r"A dataset must have a known number of samples. Received: one with unknown many",
    ):
        datacache.from_dataset(data, key="drawn")
    data = data.apply(tf.data.experimental.assert_cardinality(SAMPLES))
    cache = opened(
        datacache.from_dataset(data, key="drawn"),
        None,
        **({"disk": tmp_path / "disk"} if disk else {}),
    )
    batches = cache.dataset(BATCH)
    for _ in range(2):
        assert sorted(_epoch(batches)) == list(range(SAMPLES))
    assert len(calls) == 2, "once for the shapes, once for all samples"
    few = opened(datacache.from_dataset(data, key="few"), None, budget=1000)
    with pytest.raises(
        Exception, match=r"must fit on a disk. Received: no room for element \d+ of the dataset"
    ):
        few.warm(progress=False) and _epoch(few.dataset(BATCH))


def test_texts_end_as_they_were(tmp_path, opened):
    texts = [b"a", b"b\0\0", b"\0", b""]
    data = tf.data.Dataset.from_tensor_slices(texts)
    cache = opened(datacache.from_dataset(data, key="texts"), None, disk=tmp_path / "disk")
    for _ in range(2):
        assert [
            text for batch in cache.dataset(2, shuffle=False) for text in batch.numpy()
        ] == texts
    folder = tmp_path / "files"
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number}.bin").write_bytes(text)
    cache = opened(datacache.from_folder(folder, extensions=[".bin"], labels=False), None)
    assert [text for batch in cache.dataset(2, shuffle=False) for text in batch.numpy()] == texts


def test_many_iterators_over_one_dataset(images, opened):
    data = opened(images).dataset(BATCH, seed=5)
    iterators = [iter(data) for _ in range(4)]
    order = datacache.Order(samples=SAMPLES, global_batch=BATCH, seed=5)
    for iterator in iterators:
        first = _epoch([next(iterator)])
        assert first in ([*order.permutation(epoch)[:BATCH]] for epoch in range(4))
    for iterator in iterators:
        assert len(_epoch(iterator)) == SAMPLES - BATCH


def test_a_keras_pydataset(images, opened):
    cache = opened(images)
    data = cache.pydataset(BATCH, seed=5)
    order = datacache.Order(samples=SAMPLES, global_batch=BATCH, seed=5)
    for epoch in range(2):
        assert (
            _epoch([data[step] for step in range(len(data))]) == order.permutation(epoch).tolist()
        )
        data.on_epoch_end()


def test_samples_by_number(images, opened):
    samples = opened(images).random_access()
    assert len(samples) == SAMPLES
    pixels, label = samples[11]
    np.testing.assert_array_equal(pixels, drawn.image(11))
    assert label == 11 * drawn.CLASSES // SAMPLES


class _InProcesses(keras.utils.PyDataset):
    """What users write to augment in Python: worker processes, forked by Keras, read samples."""

    def __init__(self, samples):
        super().__init__(workers=2, use_multiprocessing=True)
        self._samples = samples

    def __len__(self):
        return 3

    def __getitem__(self, step):
        batch = [self._samples[number] for number in range(8 * step, 8 * step + 8)]
        return tuple(np.stack(parts) for parts in zip(*batch, strict=True))


def test_forked_processes_read_what_memory_holds_and_make_nothing(images, opened):
    cache = opened(images)
    data = _InProcesses(cache.random_access())

    def epoch():
        adapter = PyDatasetAdapter(data)
        adapter.on_epoch_begin()
        yield from itertools.islice(adapter.get_numpy_iterator(), 3)
        adapter.on_epoch_end()

    with pytest.raises(
        CacheError,
        match=r"Samples must be made by the process that opened .* Received: sample \d+, .*Call cache.warm",
    ):
        list(epoch())
    cache.warm(progress=False)
    assert _epoch(epoch()) == list(range(SAMPLES))
    with pytest.raises(
        ValueError,
        match=r"must be read in threads.* Received: use_multiprocessing=True. Leave it out",
    ):
        cache.pydataset(8, workers=2, use_multiprocessing=True)
    with pytest.raises(
        TypeError, match=r"A cache must be opened in the process that reads it. Received: .*Open it"
    ):
        pickle.dumps(cache.random_access())


def test_goes_on_where_training_was(images, opened):
    cache = opened(images)
    data = cache.dataset(BATCH, seed=2)
    seen = []
    for step, batch in enumerate(cache.counted(data)):
        if step == 2:
            break
        seen += _epoch([batch])
    text = json.dumps(cache.state_dict())
    assert len(text) < 100
    with pytest.raises(
        RuntimeError, match="A loop that was left within an epoch goes on with a new dataset"
    ):
        next(cache.counted(data))
    for again in (cache, opened(images)):
        rest = again.dataset(BATCH, seed=2, state=json.loads(text))
        assert sorted(seen + _epoch(again.counted(rest))) == list(range(SAMPLES))
        assert sorted(_epoch(again.counted(rest))) == list(range(SAMPLES))
    assert cache.state_dict(data) == json.loads(text), (
        "the position of another dataset is another one"
    )
    with pytest.raises(Exception, match="it must be said which pass begins"):
        next(iter(again.dataset(BATCH, seed=2, state=json.loads(text))))
    with pytest.raises(
        ValueError,
        match=r"the samples that it began with. Received: a seed of 3, and 2 in the saved",
    ):
        again.dataset(BATCH, seed=3, state=json.loads(text))


def test_positions_must_be_counted(images, opened):
    cache = opened(images)
    with pytest.raises(RuntimeError, match="Positions are those of a dataset"):
        cache.state_dict()
    data = cache.dataset(BATCH)
    assert cache.state_dict()["samples"] == 0
    next(iter(data))
    with pytest.raises(RuntimeError, match="steps must be counted where they are trained"):
        cache.state_dict()


def test_positions_are_those_of_what_was_made_of_a_dataset(images, opened):
    cache = opened(images)
    with pytest.raises(
        RuntimeError, match=r"Positions are those of a dataset. Received: a cache without one"
    ):
        cache.begin_epoch(1)
    one = cache.dataset(8, seed=1)
    by_hand = (batch for batch in one)
    assert (
        _epoch(cache.counted(by_hand))
        == datacache.Order(samples=SAMPLES, global_batch=8, seed=1).permutation(0).tolist()
    )
    other, third = cache.dataset(8, seed=1), cache.pydataset(8, seed=1)
    made = one.map(lambda *batch: batch).shuffle(2).repeat(2).prefetch(1)
    cache.begin_epoch(5, made)
    cache.count(1, third)
    assert [cache.state_dict(data)["epoch"] for data in (one, made, other, third)] == [5, 5, 0, 0]
    assert [cache.state_dict(data)["samples"] for data in (one, made, other, third)] == [0, 0, 0, 8]
    both = tf.data.Dataset.zip(one, other)
    for data, received in (
        (None, "data=None"),
        ([1], r"data=\[1\]"),
        (both, "data made of 2 of them"),
    ):
        with pytest.raises(
            RuntimeError,
            match=rf"It must be said which dataset .* a cache with 3, and {received}.*Pass",
        ):
            cache.state_dict(data)


def _as_float(pixels, label):
    return tf.cast(pixels, "float32"), label


def _model_that_notes(seen, steps_per_execution):
    """A model that notes all images that it trains on."""

    def look(x, training=None):
        note = (
            tf.numpy_function(lambda y: seen.append(y.copy()) or y, [x], x.dtype) if training else x
        )
        return tf.ensure_shape(note, x.shape)

    class Look(keras.layers.Layer):
        call = staticmethod(look)

    model = keras.Sequential(
        [keras.Input((8, 8, 3)), Look(), keras.layers.Flatten(), keras.layers.Dense(drawn.CLASSES)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, steps_per_execution=steps_per_execution)
    return model


def _fitted(cache, kind="dataset", steps_per_execution=1, data=None, **arguments):
    """Trains a model, and returns the numbers of the images in the order in which it saw them."""
    seen = []
    if data is None:
        data = getattr(cache, kind)(8, seed=1)
        if kind == "dataset":
            data = data.map(_as_float)

    model = _model_that_notes(seen, steps_per_execution)
    history = model.fit(data, verbose=0, shuffle=False, **arguments)
    pixels = [image.astype(np.uint8) for batch in seen for image in batch]
    return [
        next(n for n in range(SAMPLES) if np.array_equal(i, drawn.image(n))) for i in pixels
    ], history.history


def test_fit_and_its_callbacks(images, tmp_path, opened):
    cache, events = opened(images), tmp_path / "events"
    callbacks = [
        keras_callbacks.CachePosition(cache),
        keras_callbacks.CacheStatistics(cache, events),
    ]
    seen, history = _fitted(cache, epochs=3, callbacks=callbacks)
    order = datacache.Order(samples=SAMPLES, global_batch=8, seed=1)
    assert seen == [n for epoch in range(3) for n in order.permutation(epoch)]
    assert cache.state_dict() == order.state_dict(datacache.Position(epoch=3))
    assert history["cache_hits"] == [1 / SAMPLES, 1, 1]
    assert history["cache_source_megabytes"][1:] == [0, 0]
    assert list(events.iterdir())
    later, _ = _fitted(
        again := opened(images),
        initial_epoch=2,
        epochs=3,
        callbacks=[keras_callbacks.CachePosition(again)],
    )
    assert later == order.permutation(2).tolist()
    again = opened(images)
    data = again.dataset(
        8, seed=1, state=order.state_dict(datacache.Position(epoch=1, samples=16))
    ).map(_as_float)
    with pytest.raises(
        RuntimeError, match=r"In fit, epochs are whole. Received: 16 samples done of epoch 1. Let"
    ):
        _fitted(
            again,
            data=data,
            initial_epoch=1,
            epochs=3,
            callbacks=[keras_callbacks.CachePosition(again)],
        )


@pytest.mark.parametrize("kind", ["dataset", "pydataset"])
@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_fit_sees_the_epoch_that_it_says(images, opened, kind, steps_per_execution):
    """Also with executions that the steps of an epoch do not fill."""
    cache = opened(images)
    order = datacache.Order(samples=SAMPLES, global_batch=8, seed=1)
    states = []
    position = keras_callbacks.CachePosition(cache)
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: states.append(cache.state_dict())
    )
    arguments = {"steps_per_execution": steps_per_execution, "callbacks": [position, note]}
    seen, _ = _fitted(cache, kind, initial_epoch=3, epochs=5, **arguments)
    assert seen == [n for epoch in (3, 4) for n in order.permutation(epoch)]
    assert states == [order.state_dict(datacache.Position(epoch=epoch)) for epoch in (4, 5)]


@pytest.mark.parametrize("training_first", [True, False])
@pytest.mark.parametrize("kind", ["dataset", "pydataset"])
def test_validation_leaves_the_position_of_training_alone(images, opened, kind, training_first):
    """Also where it has batches of another size, and an order of its own that goes on from epoch to epoch."""
    cache = opened(images)
    make = {
        "training": lambda: getattr(cache, kind)(8, seed=1),
        "validation": lambda: getattr(cache, kind)(5, seed=2),
    }
    data = {name: make[name]() for name in (make if training_first else reversed(make))}
    if kind == "dataset":
        data = {name: one.map(_as_float).prefetch(1) for name, one in data.items()}
    training, validation = data["training"], data["validation"]
    order = datacache.Order(samples=SAMPLES, global_batch=8, seed=1)
    states = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: states.append(cache.state_dict(training))
    )
    callbacks = [keras_callbacks.CachePosition(cache, training), note]
    seen, _ = _fitted(
        cache,
        data=training,
        validation_data=validation,
        initial_epoch=3,
        epochs=5,
        callbacks=callbacks,
    )
    assert seen == [n for epoch in (3, 4) for n in order.permutation(epoch)]
    assert states == [order.state_dict(datacache.Position(epoch=epoch)) for epoch in (4, 5)]
    with pytest.raises(
        RuntimeError,
        match=r"It must be said which dataset is trained on.*CachePosition\(cache, data\)",
    ):
        _fitted(cache, data=training, callbacks=[keras_callbacks.CachePosition(cache)])


def test_cleared(images, opened):
    cache = opened(images)
    cache.warm(progress=False)
    cache.clear()
    assert sorted(_epoch(cache.dataset(BATCH))) == list(range(SAMPLES))
    assert cache.stats().source_reads == 2 * SAMPLES


def test_cleared_again_and_again_with_many_sizes(images, opened):
    """Memory has room for all samples, and little more."""

    def preprocess(contents, label):
        return tf.io.decode_png(contents, 3)[: label + 1], contents

    contents = sum(path.stat().st_size + 8 for path in images.rglob("*.png"))
    pixels = sum(
        8 * 3 * min(8, number * drawn.CLASSES // SAMPLES + 1) * 3 for number in range(SAMPLES)
    )
    room = SAMPLES * 8 * 8 + contents + pixels
    cache = opened(images, preprocess, variable_shapes=True, budget=room)
    for _ in range(4):
        cache.warm(progress=False)
        assert cache._levels.memory.filled == SAMPLES
        cache.clear()
    assert cache.stats().unkept == 0


def test_what_has_no_room_is_said(images, opened, caplog):
    cache = opened(images, lambda contents, label: (contents, label), budget=SAMPLES * 40 + 500)
    with caplog.at_level(logging.WARNING, "datacache"):
        cache.warm(progress=False)
        cache.warm(progress=False)
    assert (
        caplog.text.count(
            f"no more room in {cache._levels.memory.folder}: what it does not hold is read through"
        )
        == 1
    )


def test_pools_that_nobody_has_open_go_where_room_is_needed(
    images, tmp_path, opened, caplog, monkeypatch
):
    """And no others: there is memory for two pools, of which three want to be used."""
    root = tmp_path / "memory"

    def taken():
        return sum(512 * path.stat().st_blocks for path in root.rglob("*") if path.is_file())

    for module in ("system.room", "pool.idle"):
        monkeypatch.setattr(f"datacache.{module}.is_memory", lambda device: True)
    caches = [opened(images, version=version) for version in range(2)]
    total = taken() + 3000
    monkeypatch.setattr("datacache.system.room.available_memory", lambda: total - taken())
    with caplog.at_level(logging.WARNING, "datacache"):
        few = opened(images, version=2)
        assert few._levels.memory is None or few._levels.memory.slots < SAMPLES
        few.close()
        assert "removed" not in caplog.text
        for cache in caches:
            cache.warm(progress=False)
            cache.close()
        os.utime(caches[1]._levels.memory.folder / "users", (0, 0))
        again = opened(images, version=3)
    assert again._levels.memory.slots == SAMPLES
    assert "for room: " in caplog.text
    assert "which no process had open since 1970" in caplog.text
    kept = opened(images, version=0)
    kept.warm(progress=False)
    assert kept.stats().source_reads == 0, "the one that was opened last is still there"


def test_bad_caches(images, tmp_path, opened, monkeypatch):
    with pytest.raises(
        datacache.SourceError, match=r"A source must exist. Received: .*nowhere, which is no folder"
    ):
        datacache.from_folder(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        datacache.SourceError,
        match=r"A source must have samples. Received: .*with no file ending in",
    ):
        datacache.from_folder(tmp_path / "empty")
    with pytest.raises(
        datacache.SourceError, match=r"one folder per class. Received: '00000.png' directly"
    ):
        datacache.from_folder(images / "class0")
    assert len(datacache.from_folder(images / "class0", labels=False)) == SAMPLES // drawn.CLASSES
    with pytest.raises(
        datacache.SourceError,
        match=r"Received: list without identity, signature, name, decode, read. Use",
    ):
        datacache.Cache([1, 2])
    with pytest.raises(ValueError, match=r"`budget` must be a size.* Received: budget='lots'"):
        opened(images, budget="lots")
    with pytest.raises(
        ValueError, match=r'`verify` must be "first", "always" or "never". Received: verify=True'
    ):
        opened(images, verify=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        CacheError,
        match=r"that it can write to. Received: .*file/.* \(Not a directory\). Name another",
    ):
        opened(images, memory=tmp_path / "file")
    monkeypatch.setattr("datacache.pool.folder.SHARED_MEMORY", "/nowhere")
    with pytest.raises(
        CacheError,
        match=r"The pool in memory needs shared memory. Received: no /nowhere. Mount a tmpfs",
    ):
        datacache.Cache(datacache.from_folder(images))
    folder = tmp_path / "memory" / opened(images, memory=tmp_path / "other").fingerprint[:20]
    folder.mkdir(mode=0o700, parents=True)
    (folder / "thesis.tex").write_text("x")
    with pytest.raises(CacheError, match=r"A cache must have a folder of its own"):
        opened(images)
    with pytest.raises(
        ValueError, match=r"A sample must be made of dense tensors. Received: RaggedTensor"
    ):
        opened(images, lambda contents, label: tf.strings.bytes_split([contents]))

"""Tests the position of training in an epoch: in loops, in `fit`, and with validation."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import datacache
import keras_callbacks
from tests import drawn
from tests.datacache.caches import BATCH, SAMPLES, sample_numbers


def test_iteration_resumes_at_the_position_of_training(images, opened):
    cache = opened(images)
    data = cache.dataset(BATCH, seed=2)
    seen = []
    for step, batch in enumerate(cache.counted(data)):
        if step == 2:
            break
        seen += sample_numbers([batch])
    text = json.dumps(cache.state_dict())
    assert len(text) < 100
    with pytest.raises(
        RuntimeError, match="A loop that stopped within an epoch must resume with a new dataset"
    ):
        next(cache.counted(data))
    for again in (cache, opened(images)):
        rest = again.dataset(BATCH, seed=2, state=json.loads(text))
        assert sorted(seen + sample_numbers(again.counted(rest))) == list(range(SAMPLES))
        assert sorted(sample_numbers(again.counted(rest))) == list(range(SAMPLES))
    assert cache.state_dict(data) == json.loads(text), "each dataset must have its own position"
    with pytest.raises(Exception, match="training must report the start of each epoch"):
        next(iter(again.dataset(BATCH, seed=2, state=json.loads(text))))
    with pytest.raises(
        ValueError,
        match=r"the samples and the order of its .* Received: seed 3, and 2 in the saved",
    ):
        again.dataset(BATCH, seed=3, state=json.loads(text))


def test_a_position_requires_counted_batches(images, opened):
    cache = opened(images)
    with pytest.raises(RuntimeError, match="A position requires a dataset"):
        cache.state_dict()
    data = cache.dataset(BATCH)
    assert cache.state_dict()["samples"] == 0
    next(iter(data))
    with pytest.raises(RuntimeError, match="`state_dict` requires counted steps, because"):
        cache.state_dict()


def test_positions_follow_derived_datasets(images, opened):
    cache = opened(images)
    with pytest.raises(
        RuntimeError,
        match=r"A position requires a dataset .* Received: a cache with 0 datasets",
    ):
        cache.begin_epoch(1)
    one = cache.dataset(8, seed=1)
    by_hand = (batch for batch in one)
    assert (
        sample_numbers(cache.counted(by_hand))
        == datacache.Order(samples=SAMPLES, global_batch=8, seed=1).permutation(0).tolist()
    )
    other, third = cache.dataset(8, seed=1), cache.pydataset(8, seed=1)
    made = one.map(lambda *batch: batch).prefetch(1)
    cache.begin_epoch(5, made)
    cache.count(1, third)
    assert [cache.state_dict(data)["epoch"] for data in (one, made, other, third)] == [5, 5, 0, 0]
    assert [cache.state_dict(data)["samples"] for data in (one, made, other, third)] == [0, 0, 0, 8]
    both = tf.data.Dataset.zip(one, other)
    for data, received in (
        (None, "data=None"),
        ([1], r"data=\[1\]"),
        (both, "data=.*, derived from 2 of them"),
    ):
        with pytest.raises(
            RuntimeError,
            match=rf"must identify the dataset .* a cache with 3 datasets, and {received}.*Pass",
        ):
            cache.state_dict(data)


def _as_float(pixels, label):
    return tf.cast(pixels, "float32"), label


def _recording_model(seen, steps_per_execution):
    """Returns a model that records the images of its training steps in `seen`."""

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
    """Trains a model; returns the numbers of its images in order, and the logs."""
    seen = []
    if data is None:
        data = getattr(cache, kind)(8, seed=1)
        if kind == "dataset":
            data = data.map(_as_float)

    model = _recording_model(seen, steps_per_execution)
    history = model.fit(data, verbose=0, shuffle=False, **arguments)
    pixels = [image.astype(np.uint8) for batch in seen for image in batch]
    return [
        next(n for n in range(SAMPLES) if np.array_equal(i, drawn.image(n))) for i in pixels
    ], history.history


def test_callbacks_track_position_and_statistics_in_fit(images, opened):
    cache = opened(images)
    callbacks = [keras_callbacks.CachePosition(cache), keras_callbacks.CacheStatistics(cache)]
    seen, history = _fitted(cache, epochs=3, callbacks=callbacks)
    order = datacache.Order(samples=SAMPLES, global_batch=8, seed=1)
    assert seen == [n for epoch in range(3) for n in order.permutation(epoch)]
    assert cache.state_dict() == order.state_dict(datacache.Position(epoch=3))
    assert history["cache_hits"] == [1 / SAMPLES, 1, 1]
    assert history["cache_source_megabytes"][1:] == [0, 0]
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
        RuntimeError,
        match=r"In fit, data must start .* Received: a state after 16 samples of epoch 1. Res",
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
def test_fit_reads_the_epoch_that_it_reports(images, opened, kind, steps_per_execution):
    """An execution may have more steps than the rest of the epoch."""
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
def test_validation_does_not_change_the_position_of_training(images, opened, kind, training_first):
    """Validation has another batch size, and its order continues from epoch to epoch."""
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
        match=r"must identify the dataset in training if.*CachePosition\(cache, data\)",
    ):
        _fitted(cache, data=training, callbacks=[keras_callbacks.CachePosition(cache)])

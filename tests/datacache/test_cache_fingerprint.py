"""A fingerprint depends on source, function and version, but not on the process."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import datacache
from datacache.tiers.preprocessing import Preprocessing
from tests import drawn
from tests.datacache.caches import BATCH


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
def test_another_function_has_another_fingerprint(images, opened, kind):
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


def test_fingerprints_are_equal_in_other_processes(images, opened):
    """The graphs contain names of functions, which TensorFlow numbers within each process."""
    for kind in (_with_loop, _with_cases, _with_condition):
        before = opened(images, kind(4)).fingerprint
        for _ in range(3):
            tf.function(lambda: tf.constant(1)).get_concrete_function()
            opened(images, _scaled(7))
        assert opened(images, kind(4)).fingerprint == before


def test_another_source_or_version_has_another_fingerprint(tmp_path, opened):
    folder = drawn.folder(tmp_path / "images", 6)
    fingerprints = [opened(folder).fingerprint, opened(folder, version=2).fingerprint]
    file = folder / "class0" / "00000.png"
    file.write_bytes(tf.io.encode_png(drawn.image(99)).numpy())
    cache = opened(folder)
    assert len({*fingerprints, cache.fingerprint}) == 3
    pixels, _ = next(iter(cache.dataset(6, shuffle=False)))
    np.testing.assert_array_equal(pixels[0], drawn.image(99))


def test_ops_that_the_fingerprint_misses_are_logged(images, opened, caplog):
    def random(contents, label):
        return tf.image.random_flip_left_right(drawn.decode(contents, label)[0]), label

    def python(contents, label):
        return drawn.decode(contents, label)[0], tf.ensure_shape(
            tf.numpy_function(lambda x: x, [label], tf.int64), []
        )

    def reads(contents, label):
        return tf.io.read_file(tf.constant("mask.png")), label

    with caplog.at_level(logging.WARNING, "datacache"):
        opened(images, random)
        opened(images, python)
        Preprocessing(datacache.from_folder(images), reads)
    assert "uses random ops (RandomUniform" in caplog.text
    assert "calls Python code" in caplog.text
    assert "reads files (ReadFile), which" in caplog.text


FLIP, CROP = (
    keras.layers.RandomFlip("horizontal", seed=1),
    keras.layers.RandomCrop(4, 4, seed=1),
)
COUNTER = tf.Variable([0.0])
GENERATOR = tf.random.Generator.from_seed(1)
NORMALIZE = keras.layers.Normalization(mean=1.0, variance=2.0)
TABLE = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([0], [1]), 0)


def _box(image):
    box = tf.image.sample_distorted_bounding_box(
        [8, 8, 3], tf.zeros([0, 0, 4]), use_image_if_no_bounding_boxes=True
    )
    return tf.slice(image, *box[:2])


@pytest.mark.parametrize(
    ("draws", "op"),
    [
        (lambda image: tf.random.shuffle(image), "RandomShuffle"),
        (lambda image: tf.image.random_brightness(image, 0.1, seed=1), "RandomUniform"),
        (_box, "SampleDistortedBoundingBoxV2"),
        (lambda image: image + GENERATOR.normal([8, 8, 3]), "RngReadAndSkip"),
        (lambda image: FLIP(image, training=True), "Assign"),
        (lambda image: CROP(image, training=True), "Assign"),
        (lambda image: image * tf.cast(tf.timestamp(), tf.float32), "Timestamp"),
        (
            lambda image: tf.cond(
                tf.reduce_mean(image) > 0, lambda: image + tf.random.normal([]), lambda: image
            ),
            "RandomStandardNormal",
        ),
        (lambda image: tf.nn.fractional_max_pool(image[None], 1.5, True)[0], "FractionalMaxPool"),
        (lambda image: COUNTER.scatter_nd_add([[0]], [1.0]) * image, "ResourceScatterNdAdd"),
        (lambda image: tf.map_fn(lambda row: row + tf.random.normal([]), image), "RandomStandard"),
    ],
)
def test_random_ops_are_logged_once(draws, op, images, caplog):
    with caplog.at_level(logging.WARNING, "datacache"):
        Preprocessing(datacache.from_folder(images), lambda *stored: draws(_as_float(*stored)))
    assert caplog.text.count("uses random ops") == 1
    assert op in caplog.text


@pytest.mark.parametrize(
    "steady",
    [
        lambda image: tf.image.stateless_random_crop(image, [4, 4, 3], seed=(1, 2)),
        lambda image: tf.random.stateless_normal([], tf.cast(tf.shape(image)[:2], tf.int64)),
        lambda image: FLIP(image, training=False),
        lambda image: NORMALIZE(image[None]),
        lambda image: image + tf.cast(TABLE.lookup(tf.constant(0)), tf.float32),
        lambda image: tf.map_fn(lambda row: tf.sort(row), image),
        lambda image: tf.debugging.assert_all_finite(image, "finite"),
    ],
)
def test_deterministic_ops_are_not_logged(steady, images, caplog):
    with caplog.at_level(logging.WARNING, "datacache"):
        Preprocessing(datacache.from_folder(images), lambda *stored: steady(_as_float(*stored)))
    assert "uses random ops" not in caplog.text


def _as_float(contents, label):
    return tf.cast(drawn.decode(contents, label)[0], tf.float32)

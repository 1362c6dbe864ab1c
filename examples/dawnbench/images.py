"""Batches of images, which are decoded once per resolution and cropped at random."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

import datacache

MARGIN = 1.143
"""Side of a cached image, relative to that of a crop: 256 pixels for crops of 224."""
AREAS, ASPECTS = (0.35, 1.0), (3 / 4, 4 / 3)
"""Ranges of a random crop's area, relative to the cached image, and of its width / height."""


class Images(NamedTuple):
    """Training and test images.

    Attributes:
      train: Source of the training images.
      test: Source of the test images.
      classes: Number of classes.
      pair: Function that maps a sample of a source to the bytes of its image file and its class
        index, which starts at 0.
    """

    train: Any
    test: Any
    classes: int
    pair: Callable


TEST_NAMES = ("validation", "val", "test")
"""Names of the test split, in order of preference, because ImageNet's `test` has no labels."""
RECORD_FEATURES = {
    "image/encoded": tf.io.FixedLenFeature([], tf.string),
    "image/class/label": tf.io.FixedLenFeature([], tf.int64),
}
"""Features that TFRecord files must have; the label is the class index, which starts at 1."""
RECORD_CLASSES = 1000


def open_images(data):
    """Opens the images that the option `--data` selects.

    Args:
      data: "tfds:NAME" or "tfds:NAME@FOLDER" for a builder of tensorflow-datasets; or a folder with
        TFRecord files (train-* and validation-*, val-* or test-*), or with folders of images
        (train/<class>/*.jpeg and validation/<class>/*.jpeg, val/ or test/).

    Returns:
      The `Images`.

    Raises:
      SystemExit: If `data` contains no such images.
    """
    if data.startswith("tfds:"):
        name, _, folder = data.removeprefix("tfds:").partition("@")
        return _of_tfds(name, folder or None)
    folder = Path(data)
    records = {name: sorted(folder.glob(f"{name}-*")) for name in ("train", *TEST_NAMES)}
    # Test images must be in the same format as training images.
    if records["train"] and (test := _test_name(lambda name: records[name])):
        sources = [datacache.from_tfrecords(records[n], RECORD_FEATURES) for n in ("train", test)]
        return Images(*sources, RECORD_CLASSES, pair_of_record)
    if (folder / "train").is_dir() and (test := _test_name(lambda name: (folder / name).is_dir())):
        sources = [datacache.from_folder(folder / name) for name in ("train", test)]
        if sources[0].class_names != sources[1].class_names:
            different = set(sources[0].class_names) ^ set(sources[1].class_names)
            raise SystemExit(
                f"train and {test} must have the same classes. Received: {data}, where one lacks "
                f"{', '.join(sorted(different)[:3])}. Add the missing folders"
            )
        return Images(
            *sources, len(sources[0].class_names), lambda contents, label: (contents, label)
        )
    raise SystemExit(
        "--data must be a folder with train/<class>/*.jpeg and validation/<class>/*.jpeg (or val/, "
        "or test/), a folder with train-* and validation-* (TFRecord files), or tfds:NAME. "
        f"Received: {data}. Draw images: python examples/data/draw_shapes.py FOLDER"
    )


def _test_name(is_there):
    """Returns the first of `TEST_NAMES` for which `is_there` is true, or `None`."""
    return next(filter(is_there, TEST_NAMES), None)


def _of_tfds(name, folder):
    import tensorflow_datasets as tfds

    builder = tfds.builder(name, data_dir=folder)
    undecoded = {"image": tfds.decode.SkipDecoding()}
    test = _test_name(lambda one: one in builder.info.splits)
    if test is None:
        raise SystemExit(
            f"--data must have a split to test on. Received: tfds:{name} with the splits "
            f"{', '.join(builder.info.splits)}. Use a builder with a validation or test split"
        )
    sources = [datacache.from_tfds(builder, one, decoders=undecoded) for one in ("train", test)]
    classes = builder.info.features["label"].num_classes
    return Images(*sources, classes, lambda features: (features["image"], features["label"]))


def pair_of_record(features):
    label = features["image/class/label"]
    rule = f"classes of TFRecords must be from 1 to {RECORD_CLASSES}, as in ImageNet"
    # `tf.one_hot` would map a class out of range to zeros.
    checks = [
        tf.debugging.assert_positive(label, rule),
        tf.debugging.assert_less_equal(label, tf.cast(RECORD_CLASSES, label.dtype), rule),
    ]
    with tf.control_dependencies(checks):
        return features["image/encoded"], label - 1


def kept_side(size):
    """Returns the side of the cached images for crops of `size` pixels."""
    return round(MARGIN * size)


def decoded(size, pair, *sample):
    """Decodes an image, and resizes its largest centered square to the size of cached images.

    Args:
      size: Side of the crops, in pixels.
      pair: Function that maps the sample to the bytes of a JPEG or PNG file, and the class index.
      *sample: Sample of a source.

    Returns:
      `[kept_side(size), kept_side(size), 3]` uint8, and the class as int32.
    """
    contents, label = pair(*sample)
    image = tf.io.decode_image(contents, channels=3, expand_animations=False)
    shape = tf.shape(image)
    side = tf.minimum(shape[0], shape[1])
    top, left = (shape[0] - side) // 2, (shape[1] - side) // 2
    square = tf.slice(image, [top, left, 0], [side, side, 3])
    kept = kept_side(size)
    resized = tf.image.resize(square, [kept, kept], antialias=True)
    return tf.cast(tf.round(resized), tf.uint8), tf.cast(label, tf.int32)


def cache_of(source, pair, size, **options):
    """Opens the cache of a source's images for one resolution.

    Args:
      source: Source of images.
      pair: Function that maps a sample to the bytes of an image file, and the class index.
      size: Side of the crops, in pixels.
      **options: Options of `datacache.Cache`: memory, disk, budget, partition.
    """
    return datacache.Cache(source, functools.partial(decoded, size, pair), **options)


def training_batches(cache, size, global_batch, classes, seed):
    """Returns this rank's batches of random crops, half of which are mirrored.

    The contents of a batch seed its crops, so crops differ between epochs, and are the same in a
    resumed run.

    Args:
      cache: Cache for the resolution.
      size: Side of the crops, in pixels.
      global_batch: Samples per step, over all ranks.
      classes: Number of classes.
      seed: Seed of the order.

    Returns:
      The cache's dataset for `CachePosition`, and the dataset of batches for `fit`.
    """
    data = cache.dataset(global_batch, seed=seed)
    return data, data.map(functools.partial(_augmented, size, classes), tf.data.AUTOTUNE).prefetch(
        tf.data.AUTOTUNE
    )


def test_batches(cache, size, global_batch, classes):
    """Returns batches of this rank's share of the test images, with centered crops."""
    data = cache.dataset(global_batch, shuffle=False)
    return data.map(functools.partial(_centered, size, classes), tf.data.AUTOTUNE).prefetch(2)


def _augmented(size, classes, images, labels):
    # The seed depends on the samples and their order, which differ in each epoch, and on no state,
    # so a resumed epoch has the same crops.
    seed = _seed_of(images, labels)
    boxes = _random_boxes(tf.shape(images)[0], seed)
    crops = tf.image.crop_and_resize(images, boxes, tf.range(tf.shape(images)[0]), [size, size])
    return tf.cast(tf.round(crops), tf.uint8), tf.one_hot(labels, classes)


def _seed_of(images, labels):
    """Returns a seed that differs between batches."""
    weights = tf.range(1, tf.shape(labels)[0] + 1)
    middle = tf.cast(images[:, tf.shape(images)[1] // 2, :, 0], tf.int32)
    return tf.stack([tf.reduce_sum(weights * labels), tf.reduce_sum(weights[:, None] * middle)])


def _random_boxes(count, seed):
    """Returns `[count, 4]` boxes (top, left, bottom, right), half of them mirrored."""
    area, aspect, down, right, side = tf.unstack(tf.random.stateless_uniform([5, count], seed))
    area = AREAS[0] + area * (AREAS[1] - AREAS[0])
    aspect = tf.exp(math.log(ASPECTS[0]) + aspect * math.log(ASPECTS[1] / ASPECTS[0]))
    height = tf.minimum(tf.sqrt(area / aspect), 1.0)
    width = tf.minimum(tf.sqrt(area * aspect), 1.0)
    top, left = down * (1 - height), right * (1 - width)
    is_mirrored = side < 0.5
    begin = tf.where(is_mirrored, left + width, left)
    end = tf.where(is_mirrored, left, left + width)
    return tf.stack([top, begin, top + height, end], axis=1)


def _centered(size, classes, images, labels):
    margin = (kept_side(size) - size) // 2
    crops = images[:, margin : margin + size, margin : margin + size]
    return crops, tf.one_hot(labels, classes)

"""Tests the images of the DAWNBench example: formats, refused folders, and crops."""

import numpy as np
import pytest
import tensorflow as tf
from sklearn.linear_model import RidgeClassifier

import datacache
from tests.examples.conftest import SIZE, TRAIN
from tests.tfds_builder import OwnBuilder, prepare, tfds


def _files(folder, part):
    """Returns contents and class of each file of a part, in the order of the folder."""
    files = sorted((folder / part).glob("*/*.jpg"))
    names = sorted({file.parent.name for file in files})
    return [(file.read_bytes(), names.index(file.parent.name)) for file in files]


def _as_records(folder, target):
    """Writes images in the format of the usual ImageNet scripts; class indices start at 1."""
    for part, name in (("train", "train"), ("test", "validation")):
        with tf.io.TFRecordWriter(str(target / f"{name}-00000-of-00001")) as writer:
            for encoded, label in _files(folder, part):
                features = {
                    "image/encoded": tf.train.Feature(
                        bytes_list=tf.train.BytesList(value=[encoded])
                    ),
                    "image/class/label": tf.train.Feature(
                        int64_list=tf.train.Int64List(value=[label + 1])
                    ),
                }
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())
    return str(target)


def _as_tfds(folder, target):
    class DrawnShapes(OwnBuilder):
        """Data set of the images in `folder`."""

        def features(self):
            return {
                "image": tfds.features.Image(shape=(None, None, 3), encoding_format="jpeg"),
                "label": tfds.features.ClassLabel(num_classes=10),
            }

        def splits(self):
            return {
                part: [
                    {"image": encoded, "label": label} for encoded, label in _files(folder, part)
                ]
                for part in ("train", "test")
            }

    prepare(DrawnShapes(data_dir=target))
    return f"tfds:drawn_shapes@{target}"


def _samples(images, found, source):
    """Returns the classes and pixels that the cache holds for crops of 14 pixels."""
    cache = images.cache_of(source, found.pair, 14, memory=None)
    (pixels, labels) = next(iter(cache.dataset(len(source), shuffle=False)))
    cache.close()
    return sorted(
        (int(label), image.numpy().tobytes()) for image, label in zip(pixels, labels, strict=True)
    )


@pytest.mark.parametrize("form", [lambda folder, target: str(folder), _as_records, _as_tfds])
def test_all_formats_yield_the_same_images(example, drawn, tmp_path, form):
    images = example.images
    found = images.open_images(form(drawn, tmp_path))
    for part, source in (("train", found.train), ("test", found.test)):
        expected = []
        for encoded, label in _files(drawn, part):
            image, _ = images.decoded(14, lambda *pair: pair, tf.constant(encoded), label)
            expected.append((label, image.numpy().tobytes()))
        assert _samples(images, found, source) == sorted(expected)
        assert isinstance(source.name(0), str)


def test_folders_with_other_classes_are_refused(example, drawn, tmp_path):
    images = example.images
    (tmp_path / "train").symlink_to(drawn / "train")
    file = tmp_path / "val" / "circle-stripes" / "1.jpg"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    with pytest.raises(SystemExit, match="must have the same classes"):
        images.open_images(str(tmp_path))
    with pytest.raises(SystemExit, match=r"--data must be a folder with train/<class>"):
        images.open_images(str(tmp_path / "none"))


def test_labeled_images_are_used_for_validation(example, drawn, tmp_path):
    """`test` is the last choice, because it has no labels in ImageNet."""
    images = example.images
    for name in ("train", "validation", "val", "test"):
        (tmp_path / name).symlink_to(drawn / "test")
    for name in ("validation", "val", "test"):
        assert f"{tmp_path.name}/{name}/" in images.open_images(str(tmp_path)).test.name(0)
        (tmp_path / name).unlink()


def test_records_together_with_a_folder_are_refused(example, drawn, tmp_path):
    images = example.images
    _as_records(drawn, tmp_path)
    (tmp_path / "validation-00000-of-00001").unlink()
    (tmp_path / "val").symlink_to(drawn / "test")
    with pytest.raises(SystemExit, match="--data must be a folder with train/<class>"):
        images.open_images(str(tmp_path))


@pytest.mark.parametrize("label", [0, 1001])
def test_classes_outside_imagenet_are_refused(example, label):
    images = example.images
    features = {"image/encoded": tf.constant(b""), "image/class/label": tf.constant(label, "int64")}
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be from 1 to 1000"):
        images.pair_of_record(features)
    features["image/class/label"] = tf.constant(1000, "int64")
    assert int(images.pair_of_record(features)[1]) == 999


def test_crops_are_reproducible_and_differ_between_epochs(example, drawn, tmp_path):
    images = example.images
    found = images.open_images(str(drawn))
    cache = images.cache_of(found.train, found.pair, 12, memory=tmp_path / "memory")

    def epochs():
        _, data = images.training_batches(cache, 12, 10, found.classes, seed=1)
        return [np.concatenate([batch.numpy() for batch, _ in data]) for _ in range(2)]

    first, second = epochs()
    assert first.shape == (TRAIN, 12, 12, 3)
    assert first.dtype == np.uint8
    np.testing.assert_array_equal(epochs()[0], first)
    assert (first != second).any()
    cache.close()


@pytest.mark.slow
def test_synthetic_images_are_not_linearly_separable(example):
    """The accuracy of a linear model of the pixels stays below 60 %."""
    draw_shapes = example.draw_shapes
    rng = np.random.default_rng(0)
    labels = np.arange(1600) % len(draw_shapes.CLASSES)
    pixels = np.stack([draw_shapes.image(label, SIZE, rng).reshape(-1) for label in labels]) / 255
    linear = RidgeClassifier(alpha=100.0).fit(pixels[:1200], labels[:1200])
    assert linear.score(pixels[1200:], labels[1200:]) < 0.6


def test_existing_synthetic_images_are_not_replaced(example, drawn):
    before = sorted((drawn / "train").glob("*/*"))
    example.draw_shapes.draw(drawn, train=5, test=5, size=SIZE)
    assert sorted((drawn / "train").glob("*/*")) == before
    assert len(datacache.from_folder(drawn / "train")) == TRAIN

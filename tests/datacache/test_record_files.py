"""Tests access by index to examples in TFRecord files, and the refusal of invalid files."""

import os

import numpy as np
import pytest
import tensorflow as tf

import datacache
from datacache import SourceError
from tests import drawn

COUNTS = (5, 0, 8)
SIZE = 12
FEATURES = {
    "image/encoded": tf.io.FixedLenFeature([], tf.string),
    "image/class/label": tf.io.FixedLenFeature([], tf.int64),
}


def _example(number):
    """Returns an example with the features in `FEATURES`; classes begin at 1."""
    encoded = tf.io.encode_png(drawn.image(number, SIZE)).numpy()
    features = {
        "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[encoded])),
        "image/class/label": tf.train.Feature(
            int64_list=tf.train.Int64List(value=[1 + number % drawn.CLASSES])
        ),
        "image/filename": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"unused"])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


@pytest.fixture
def files(tmp_path):
    """Returns a pattern that matches files with several records and a file without records."""
    first = 0
    for shard, count in enumerate(COUNTS):
        path = tmp_path / f"train-{shard:05}-of-{len(COUNTS):05}"
        with tf.io.TFRecordWriter(str(path)) as writer:
            for number in range(first, first + count):
                writer.write(_example(number))
        first += count
    return tmp_path / "train-*"


def _decoded(features):
    image = tf.io.decode_png(features["image/encoded"], 3)
    return tf.ensure_shape(image, [SIZE, SIZE, 3]), features["image/class/label"] - 1


def test_samples_equal_the_records_of_the_files(files, tmp_path):
    source = datacache.from_tfrecords(files, FEATURES)
    assert len(source) == sum(COUNTS)
    assert source.name(6) == "record 1 of train-00002-of-00003"
    cache = datacache.Cache(source, _decoded, memory=tmp_path / "memory")
    for _ in range(2):
        (images, labels) = next(iter(cache.dataset(sum(COUNTS), shuffle=False)))
        for number in range(sum(COUNTS)):
            np.testing.assert_array_equal(images[number], drawn.image(number, SIZE))
            assert labels[number] == number % drawn.CLASSES
    assert cache.stats().source_reads == sum(COUNTS)
    cache.close()


def test_records_are_raw_without_features(files):
    source = datacache.from_tfrecords(files)
    for number in range(sum(COUNTS)):
        (content,) = source.read(number)
        assert content.item() == _example(number)


def test_other_files_or_features_have_another_fingerprint(files):
    before = datacache.from_tfrecords(files, FEATURES).identity
    assert datacache.from_tfrecords(files, FEATURES).identity == before
    assert datacache.from_tfrecords(files).identity != before
    path = files.parent / "train-00000-of-00003"
    os.utime(path, ns=(0, 0))
    assert datacache.from_tfrecords(files, FEATURES).identity != before


def test_an_existing_file_is_not_a_pattern(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in (("a[1].tfrecord", b"bracketed"), ("a1.tfrecord", b"one")):
        with tf.io.TFRecordWriter(str(tmp_path / name)) as writer:
            writer.write(value)
    for files, value in (
        (tmp_path / "a[1].tfrecord", b"bracketed"),
        ("~/a[1].tfrecord", b"bracketed"),
        (["~/a[1].tfrecord"], b"bracketed"),
        ("~/a[1]*", b"one"),
    ):
        (found,) = datacache.from_tfrecords(files).read(0)
        assert found.item() == value, files


def test_a_pattern_without_files_is_refused(tmp_path):
    with pytest.raises(
        SourceError, match=r"at least one file. Received: files=.*which matches none"
    ):
        datacache.from_tfrecords(tmp_path / "train-*")


def test_files_without_records_are_refused(files):
    with pytest.raises(SourceError, match=r"must have samples. Received: 1 TFRecord file"):
        datacache.from_tfrecords([files.parent / "train-00001-of-00003"])


@pytest.mark.parametrize("cut", [1, 9, 30])
def test_truncated_files_are_refused(files, cut):
    path = files.parent / "train-00002-of-00003"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(
        SourceError, match=r"must be complete and uncompressed. Received: .*ends within record 7"
    ):
        datacache.from_tfrecords(files)


@pytest.mark.parametrize("at", [-1, 0, 50, "end"])
def test_a_damaged_record_is_named(files, tmp_path, monkeypatch, at):
    """The content is damaged, or the checksum of the length or of the content."""
    monkeypatch.setattr("datacache.tiers.tier.FIRST_PAUSE_S", 0.001)
    path = tmp_path / "train-00002-of-00003"
    *_, record = tf.data.TFRecordDataset([str(path)])
    content = bytearray(path.read_bytes())
    begin = len(content) - 4 - len(record.numpy())
    content[-1 if at == "end" else begin + at] ^= 4
    path.write_bytes(content)
    cache = datacache.Cache(datacache.from_tfrecords(files), memory=tmp_path / "memory")
    samples = cache.random_access()
    assert len(samples[-2]) > 0
    with pytest.raises(SourceError, match=r"of-00003 is damaged at record 7 .* Check the file"):
        samples[-1]
    cache.close()


def test_files_that_end_in_zeros_are_refused(files):
    path = files.parent / "train-00000-of-00003"
    path.write_bytes(path.read_bytes() + bytes(64))
    with pytest.raises(
        SourceError, match=r"must be complete and uncompressed. Received: .*zeros where record 5"
    ):
        datacache.from_tfrecords(files)


def test_compressed_files_and_text_files_are_refused(files, tmp_path):
    path = str(tmp_path / "compressed")
    with tf.io.TFRecordWriter(path, "GZIP") as writer:
        writer.write(_example(0))
    (tmp_path / "text").write_text("no records, but some words\n" * 10)
    for other in (path, tmp_path / "text"):
        with pytest.raises(
            SourceError, match=r"TFRecord files must be complete and unc.*ends within record 0"
        ):
            datacache.from_tfrecords([other])

"""Samples equal those of tensorflow-datasets, and errors name files that cannot be read."""

import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import datacache
from datacache import SourceError
from datacache.sources import record_files
from datacache.sources.source import RandomSource, StreamSource
from tests import drawn
from tests.tfds_builder import OwnBuilder, prepare, tfds

TRAIN, TEST, SHARDS, LARGE = 50, 9, 3, 64
FORMATS = ["tfrecord", "array_record"]
SPLITS = {
    "train": 50,
    "train[:50%]": 25,
    "train[2:7]": 5,
    "train[-4:]": 4,
    "test": 9,
    "train[40:]+test[:3]": 13,
}


class Drawn(OwnBuilder):
    """Data set of images with labels and texts."""

    def features(self):
        return {
            "image": tfds.features.Image(shape=(LARGE, LARGE, 3), encoding_format="png"),
            "label": tfds.features.ClassLabel(num_classes=drawn.CLASSES),
            "text": tfds.features.Text(),
        }

    def splits(self):
        samples = [
            {
                "image": drawn.image(number, LARGE),
                "label": number % drawn.CLASSES,
                "text": f"image {number}, größer" * (number % 5),
            }
            for number in range(TRAIN + TEST)
        ]
        return {"train": samples[:TRAIN], "test": samples[TRAIN:]}


def _builder(folder, form):
    return Drawn(data_dir=folder, file_format=form)


def _prepared(folder, form):
    return prepare(_builder(folder, form), num_shards=SHARDS)


@pytest.fixture(scope="module", params=FORMATS)
def builder(request, tmp_path_factory):
    return _prepared(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(params=FORMATS)
def own(request, tmp_path):
    """Returns a builder with its own files, which the test may change."""
    return _prepared(tmp_path / "own", request.param)


def _expected(builder, split, **decoders):
    """Returns the samples that tensorflow-datasets reads, in the order of its files."""
    if builder.info.file_format.value == "array_record":
        return list(builder.as_data_source(split, **decoders))
    in_order = tfds.ReadConfig(interleave_cycle_length=1)
    return list(tfds.as_numpy(builder.as_dataset(split=split, read_config=in_order, **decoders)))


def _same(sample, expected):
    assert set(sample) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(np.asarray(sample[name]), value, name)


def _sample(source, number):
    return source.decode(*source.read(number))


@pytest.mark.parametrize("split", SPLITS)
def test_samples_by_index_equal_those_of_the_library(builder, split):
    source, expected = datacache.from_tfds(builder, split), _expected(builder, split)
    assert len(source) == len(expected) == SPLITS[split]
    assert isinstance(source, RandomSource)
    assert not isinstance(source, StreamSource)
    order = np.random.default_rng(0).permutation(len(source)).tolist()
    for number in order:
        _same(_sample(source, number), expected[number])
    names = [source.name(number) for number in range(len(source))]
    assert len(set(names)) == len(source)
    assert all(
        f"drawn-{split.partition('[')[0]}.{builder.info.file_format.value}" in name
        for name in names[:4]
    )


def _key(sample):
    return (
        np.asarray(sample["image"]).tobytes(),
        int(sample["label"]),
        bytes(np.asarray(sample["text"]).item()),
    )


@pytest.mark.parametrize("split", ["train", "train[2:7]"])
def test_each_epoch_contains_each_sample_once(builder, tmp_path, split):
    cache = datacache.Cache(
        datacache.from_tfds(builder, split), memory=tmp_path / "memory", disk=tmp_path / "disk"
    )
    wanted = sorted(map(_key, _expected(builder, split)))
    data = cache.dataset(4, seed=3)
    epochs = []
    for _ in range(2):
        samples = [
            {name: part[i] for name, part in b.items()}
            for b in data
            for i in range(len(b["label"]))
        ]
        epochs.append([_key(sample) for sample in samples])
        assert sorted(epochs[-1]) == wanted
    assert epochs[0] != epochs[1]
    assert cache.stats().source_reads == len(wanted)
    cache.close()


def test_scripts_may_decode_images_themselves(builder, tmp_path):
    skip = {"image": tfds.decode.SkipDecoding()}
    source = datacache.from_tfds(builder, "test", decoders=skip)
    for number, expected in enumerate(_expected(builder, "test", decoders=skip)):
        _same(_sample(source, number), expected)

    def preprocess(features):
        return tf.ensure_shape(
            tf.io.decode_png(features["image"], 3)[::8, ::8], [8, 8, 3]
        ), features["label"]

    cache = datacache.Cache(source, preprocess, memory=tmp_path / "memory", disk=tmp_path / "disk")
    cache.warm(progress=False)
    for number, expected in enumerate(_expected(builder, "test")):
        pixels, label = cache.random_access()[number]
        np.testing.assert_array_equal(pixels, expected["image"][::8, ::8])
        assert label == expected["label"]
    again = datacache.from_tfds(builder, "test", decoders={"image": tfds.decode.SkipDecoding()})
    assert (
        datacache.Cache(again, preprocess, memory=tmp_path / "memory").fingerprint
        == cache.fingerprint
    )
    whole = datacache.Cache(
        datacache.from_tfds(builder, "test"), memory=tmp_path / "memory", disk=tmp_path / "disk"
    )
    whole.warm(progress=False)
    assert whole.fingerprint != cache.fingerprint
    assert whole.stats().source_reads == 0, "records on disk must not depend on their decoding"


def test_partial_decoding_selects_features(builder):
    some = tfds.decode.PartialDecoding({"label": True, "text": True})
    sample = _sample(datacache.from_tfds(builder, "test", decoders=some), 2)
    assert set(sample) == {"label", "text"}
    _same(sample, {name: _expected(builder, "test")[2][name] for name in sample})


def _fingerprint(builder, tmp_path, split="train", **decoders):
    source = datacache.from_tfds(builder, split, **decoders)
    cache = datacache.Cache(source, memory=tmp_path / "memory", variable_shapes=True)
    cache.close()
    return cache.fingerprint


def test_other_samples_have_another_fingerprint(own, tmp_path):
    def fingerprints(*splits):
        return [_fingerprint(own, tmp_path, split) for split in splits]

    before = fingerprints("train", "train[:50%]", "train[2:7]", "test")
    assert len(set(before)) == 4
    assert fingerprints("train", "train[:25]", "train[2:7]", "test") == before
    assert (
        _fingerprint(_builder(tmp_path / "own", own.info.file_format.value), tmp_path) == before[0]
    )
    skip = {"image": tfds.decode.SkipDecoding()}
    assert (
        _fingerprint(own, tmp_path, decoders=skip)
        == _fingerprint(own, tmp_path, decoders=dict(skip))
        != before[0]
    )
    os.utime(_shard(own), (1, 1))
    after = fingerprints("train", "train[:50%]", "train[2:7]", "test")
    assert after[3] == before[3]
    assert not set(after[:2]) & set(before)


def _shard(builder, number=1):
    """Returns the path of a shard of the training split."""
    return Path(
        sorted(part.filename for part in builder.info.splits["train"].file_instructions)[number]
    )


@pytest.mark.parametrize("left", ["half", "a little", "nothing", "all but the last bytes"])
@pytest.mark.parametrize("listed", ["before", "after"])
def test_samples_missing_from_truncated_shards_are_named(own, tmp_path, monkeypatch, left, listed):
    monkeypatch.setattr("datacache.tiers.tier.FIRST_PAUSE_S", 0.001)
    source, path = datacache.from_tfds(own, "train"), _shard(own)
    expected = _expected(own, "train")
    first = sum(part.take for part in own.info.splits["train"].file_instructions[:1])
    size = path.stat().st_size
    os.truncate(
        path,
        {"half": size // 2, "a little": 10, "nothing": 0, "all but the last bytes": size - 20}[
            left
        ],
    )
    if listed == "after":
        source = datacache.from_tfds(own, "train")
    cache = datacache.Cache(source, memory=tmp_path / "memory")
    samples, wrong = cache.random_access(), []
    for number in range(TRAIN):
        problem = f"record {number - first} of {path.name}, 4 times. Check the file"
        if listed == "before":
            problem = f"{path.name}, changed or replaced since it was listed"
        try:
            _same(samples[number], expected[number])
        except SourceError as error:
            assert problem in str(error)  # noqa: PT017
            wrong.append(number)
    in_shard = own.info.splits["train"].file_instructions[1].take
    assert wrong
    assert wrong == list(range(wrong[0], first + in_shard)), "all later samples must be missing"
    with pytest.raises(Exception, match=rf"Received: .*{path.name}, (4 times|changed or replaced)"):
        list(cache.dataset(5))
    cache.close()


def test_a_restored_shard_is_read_again(own, tmp_path):
    source, path = datacache.from_tfds(own, "train"), _shard(own, 0)
    path.rename(tmp_path / "away")
    with pytest.raises(OSError, match=path.name):
        source.read(3)
    (tmp_path / "away").rename(path)
    _same(_sample(source, 3), _expected(own, "train")[3])


def _scans(monkeypatch):
    """Returns a list to which each search of a shard appends the shard's name."""
    scanned, find_records = [], record_files.find_records
    monkeypatch.setattr(
        record_files,
        "find_records",
        lambda path: scanned.append(Path(path).name) or find_records(path),
    )
    return scanned


@pytest.mark.parametrize("split", ["train", "train[2:40]"])
def test_each_shard_is_searched_once(tmp_path, monkeypatch, split):
    builder, scanned = _prepared(tmp_path / "own", "tfrecord"), _scans(monkeypatch)
    expected = _expected(builder, split)
    for memory in (tmp_path / "memory", None):
        source = datacache.from_tfds(builder, split)
        with datacache.Cache(source, memory=memory) as cache:
            for number in np.random.default_rng(0).permutation(len(source)).tolist():
                _same(_sample(source, number), expected[number])
            cache.warm(progress=False)
        assert sorted(scanned) == [
            f"drawn-train.tfrecord-0000{shard}-of-0000{SHARDS}" for shard in range(SHARDS)
        ]
        scanned.clear()
    with datacache.Cache(datacache.from_tfds(builder, split), memory=tmp_path / "memory") as cache:
        cache.warm(progress=False)
    assert scanned == [], "a full store must search no shard"


def test_threads_may_read_concurrently(builder):
    source = datacache.from_tfds(builder, "train")
    wanted = [source.read(number)[0].item() for number in range(TRAIN)]
    source, wrong = datacache.from_tfds(builder, "train"), []

    def read(seed):
        for number in np.random.default_rng(seed).integers(0, TRAIN, 200).tolist():
            if source.read(number)[0].item() != wanted[number]:
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_missing_splits_are_refused(own, tmp_path, monkeypatch):
    with pytest.raises(
        SourceError,
        match=r"must be prepared before it is cached. Received: drawn/1.0.0, not prepared",
    ):
        datacache.from_tfds(_builder(tmp_path / "nothing", "tfrecord"), "train")
    for split in ("validation", "validation[:3]", "train[", "train[:150%]"):
        with pytest.raises(
            SourceError,
            match=r"A split must be one of train, test, or a slice .* Received: split='",
        ):
            datacache.from_tfds(own, split)
    with pytest.raises(
        SourceError,
        match=r"must have samples. Received: 0 samples for split='train\[3:3\]' of drawn",
    ):
        datacache.from_tfds(own, "train[3:3]")
    with pytest.raises(
        ValueError,
        match=r"only with its name. Received: data_dir with drawn/1.0.0, which is a builder",
    ):
        datacache.from_tfds(own, "train", data_dir=tmp_path)
    monkeypatch.setattr("datacache.sources.tfds_builder._SHARDS", {"riegeli": None})
    with pytest.raises(
        SourceError,
        match=r"must be riegeli files. Received: .*record for drawn/1.0.0. Prepare the",
    ):
        datacache.from_tfds(own, "train")
    monkeypatch.undo()
    _shard(own).unlink()
    with pytest.raises(
        SourceError, match=r"files of a split must exist. Received: .*No such file.*00001-of-00003"
    ):
        datacache.from_tfds(own, "train")
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(
        ImportError,
        match=r"from_tfds needs tensorflow-datasets .*Run: pip install tfposeidon\[tfds\]",
    ):
        datacache.from_tfds("mnist", "train")


def test_builders_may_be_given_by_name(builder, tmp_path):
    form = builder.info.file_format.value
    source = datacache.from_tfds(
        "drawn", "test", data_dir=Path(builder.data_dir).parents[1], file_format=form
    )
    assert source.identity == datacache.from_tfds(builder, "test").identity
    assert str(source) == "drawn/1.0.0 of tensorflow-datasets"
    with pytest.raises(Exception, match="drown"):
        datacache.from_tfds("drown", "test", data_dir=tmp_path)

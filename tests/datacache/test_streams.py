"""A dataset as a source must yield the same samples in each pass, and is otherwise refused."""

import logging
import os
import random

import numpy as np
import pytest
import tensorflow as tf

import datacache
from datacache import SourceError
from datacache.sources.source import StreamSource

SAMPLES = 20
RANGE = tf.data.Dataset.range(SAMPLES)


def _within(name, **arguments):
    return RANGE.batch(5).interleave(
        lambda batch: getattr(tf.data.Dataset.from_tensor_slices(batch), name)(**arguments)
    )


@pytest.mark.parametrize(
    ("make", "received"),
    [
        (lambda folder: tf.data.Dataset.list_files(str(folder / "*")), "list_files"),
        (lambda folder: RANGE.shuffle(9), "shuffle"),
        (lambda folder: RANGE.shuffle(9, seed=1).map(lambda n: n + 1).prefetch(1), "shuffle"),
        (lambda folder: RANGE.shuffle(9, reshuffle_each_iteration=False), "shuffle"),
        (lambda folder: tf.data.Dataset.zip(RANGE, tf.data.Dataset.random()), "random"),
        (lambda folder: tf.data.Dataset.sample_from_datasets([RANGE, RANGE]), "random"),
        (lambda folder: _within("shuffle", buffer_size=5), "ShuffleDatasetV3 within a dataset"),
        (
            lambda folder: RANGE.map(abs, num_parallel_calls=2, deterministic=False),
            "ParallelMapDataset with deterministic=False. Omit that argument",
        ),
        (
            lambda folder: RANGE.interleave(
                tf.data.Dataset.from_tensors, 2, num_parallel_calls=2, deterministic=False
            ),
            "ParallelInterleaveDataset with deterministic=False",
        ),
        (lambda folder: RANGE.batch(SAMPLES).map(tf.random.shuffle).unbatch(), "UnbatchDataset"),
        (
            lambda folder: RANGE.flat_map(
                lambda n: tf.data.Dataset.from_tensors(n + tf.random.uniform([], 0, 9, tf.int64))
            ),
            "elements that FlatMapDataset selects at random",
        ),
        (
            lambda folder: tf.data.Dataset.choose_from_datasets(
                [RANGE, RANGE], tf.data.Dataset.range(2).shuffle(2).repeat(SAMPLES)
            ),
            "huffle",
        ),
        (
            lambda folder: RANGE.filter(lambda n: tf.random.uniform([]) < 0.5),
            "elements that FilterDataset selects at random",
        ),
    ],
)
def test_a_changing_order_is_refused(tmp_path, make, received):
    for number in range(SAMPLES):
        (tmp_path / f"{number}").touch()
    data = make(tmp_path).apply(tf.data.experimental.assert_cardinality(SAMPLES))
    with pytest.raises(
        SourceError,
        match=r"the same elements in the same order each time. Received: a dataset with "
        rf".*{received}",
    ):
        datacache.from_dataset(data, key="unsteady")


def _drawn():
    return iter(random.sample(range(SAMPLES), SAMPLES))


def test_an_order_drawn_in_python_is_refused(opened):
    data = tf.data.Dataset.from_generator(_drawn, output_signature=tf.TensorSpec([], tf.int64))
    data = data.apply(tf.data.experimental.assert_cardinality(SAMPLES))
    cache = opened(datacache.from_dataset(data, key="drawn by Python"), None)
    with pytest.raises(Exception, match=r"Received: element \d, which differs from the first"):
        list(cache.dataset(5, shuffle=False))
    assert cache._tiers.pool.filled <= 4


def test_an_interruption_causes_no_repeated_samples(opened):
    """Each pass has another order, so all samples of the interrupted pass are read again."""
    reads = []

    def drawn():
        reads.append(None)
        yield from range(4)
        for count, number in enumerate(random.sample(range(4, SAMPLES), SAMPLES - 4)):
            # The first pass reads the first elements for the fingerprint; the second pass is
            # interrupted.
            assert len(reads) != 2 or count < 6, "the job ends"
            yield number

    data = tf.data.Dataset.from_generator(drawn, output_signature=tf.TensorSpec([], tf.int64))
    data = data.apply(tf.data.experimental.assert_cardinality(SAMPLES))
    source = datacache.from_dataset(data, key="interrupted")
    cache = opened(source, None)
    with pytest.raises(Exception, match="the job ends"):
        cache.warm(progress=False)
    assert cache._tiers.pool.filled > 4
    cache.close()
    cache = opened(source, None)
    read = [int(n) for batch in cache.dataset(5, shuffle=False) for n in batch]
    assert sorted(read) == list(range(SAMPLES))


@pytest.mark.parametrize(
    "make",
    [
        lambda: RANGE.shuffle(SAMPLES, seed=3, reshuffle_each_iteration=False),
        lambda: RANGE.map(lambda n: n, num_parallel_calls=4),
        lambda: tf.data.Dataset.zip(RANGE, tf.data.Dataset.random(seed=3)).map(lambda n, _: n),
        lambda: tf.data.Dataset.choose_from_datasets(
            [RANGE.take(10), RANGE.skip(10)], tf.data.Dataset.range(2).repeat(10)
        ),
        lambda: RANGE.interleave(tf.data.Dataset.from_tensors, 4, num_parallel_calls=4),
        lambda: RANGE.map(lambda n: n, num_parallel_calls=4).with_options(_fast()),
    ],
)
def test_a_deterministic_dataset_is_read_once(opened, make):
    data = make().apply(tf.data.experimental.assert_cardinality(SAMPLES))
    cache = opened(datacache.from_dataset(data, key="steady"), None)
    read = [int(n) for batch in cache.dataset(5, shuffle=False) for n in batch]
    assert sorted(read) == list(range(SAMPLES))
    if data.options().deterministic is not False:
        assert read == [int(n) for n in data]


def test_the_fingerprint_includes_the_number_of_processors(monkeypatch):
    def identity(*cycle):
        data = RANGE.interleave(tf.data.Dataset.from_tensors, *cycle)
        data = data.apply(tf.data.experimental.assert_cardinality(SAMPLES))
        return datacache.from_dataset(data, key="steady").identity

    here = identity(), identity(4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(1000))
    assert (identity() == here[0], identity(4) == here[1]) == (False, True)


def test_a_parse_error_does_not_count_as_damage(tmp_path, opened):
    (tmp_path / "a.txt").write_text("1\n2\nthree\n4\n")
    data = tf.data.TextLineDataset(str(tmp_path / "a.txt")).map(tf.strings.to_number)
    data = data.apply(tf.data.experimental.assert_cardinality(4))
    with pytest.raises(SourceError, match=r"Received: .*could not correctly convert.*, after 2"):
        datacache.from_dataset(data, key="lines")


class _Stream(StreamSource):
    """Source of the numbers that a function yields."""

    signature = (tf.TensorSpec([], tf.int64),)

    def __init__(self, length, numbers):
        self.identity, self._length, self._numbers = f"{length} numbers", length, numbers

    def __len__(self):
        return self._length

    def name(self, sample):
        return f"number {sample}"

    def decode(self, number):
        return number

    def stream(self):
        return ([np.array(number)] for number in self._numbers())


@pytest.mark.parametrize(("count", "received"), [(3, "3 samples from"), (7, "more samples from")])
def test_a_stream_of_another_length_is_refused(opened, count, received):
    cache = opened(_Stream(5, lambda: range(count)), None)
    with pytest.raises(Exception, match=f"as many samples as its length. Received: {received}"):
        list(cache.dataset(5))


def test_a_stream_is_read_again_if_its_store_is_cleared_meanwhile(opened):
    others = []

    def numbers():
        for number in range(SAMPLES):
            if number == 9 and others:
                others.pop().clear()
            yield number

    source = _Stream(SAMPLES, numbers)
    cache = opened(source, None)
    others.append(opened(source, None))
    read = [int(n) for batch in cache.dataset(5, shuffle=False) for n in batch]
    assert (read, others) == (list(range(SAMPLES)), [])


def _fast():
    options = tf.data.Options()
    options.deterministic = False
    return options


def test_other_data_with_the_same_key_create_another_cache(opened):
    for first in (0, 100):
        data = tf.data.Dataset.range(first, first + SAMPLES)
        cache = opened(datacache.from_dataset(data, key="mnist"), None)
        assert [int(n) for batch in cache.dataset(5, shuffle=False) for n in batch] == list(
            range(first, first + SAMPLES)
        )
    texts = [
        datacache.from_dataset(tf.data.Dataset.from_tensor_slices([text, "b"]), key="texts")
        for text in ("a", "aa")
    ]
    assert texts[0].identity != texts[1].identity


def test_random_ops_of_a_dataset_are_logged_and_their_results_cached(opened, caplog):
    data = RANGE.map(lambda n: tf.cast(n, tf.float32) + tf.random.uniform([]))
    with caplog.at_level(logging.WARNING, "datacache"):
        cache = opened(datacache.from_dataset(data, key="drawn"), None)
        epochs = [np.concatenate([*cache.dataset(5, shuffle=False)]) for _ in range(2)]
    np.testing.assert_array_equal(*epochs)
    assert caplog.text.count("uses random ops (RandomUniform)") == 1
    others = [
        tf.data.Dataset.range(first, first + 6).map(lambda n: (n, tf.random.uniform([])))
        for first in (0, 0, 9)
    ]
    one, same, other = (datacache.from_dataset(data, key="drawn").identity for data in others)
    assert one == same != other, "only the deterministic parts must determine the identity"


def test_a_damaged_record_of_a_stream_is_an_error(tmp_path, opened):
    path = tmp_path / "a.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number in range(SAMPLES):
            writer.write(bytes([number]) * 8)
    content = bytearray(path.read_bytes())
    content[24 * 7 + 12] ^= 1
    path.write_bytes(content)
    data = tf.data.TFRecordDataset([str(path)]).apply(
        tf.data.experimental.assert_cardinality(SAMPLES)
    )
    cache = opened(datacache.from_dataset(data, key="damaged"), None)
    with pytest.raises(
        Exception, match=r"corrupted record at 180.*, after 7 elements.*from_tfrecords names"
    ):
        list(cache.dataset(5))

"""Elements of any type and structure are cached as `tf.data` represents them, or refused."""

import collections

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.data.ops import debug_mode

import datacache
from datacache import SourceError
from datacache.sources.source import RandomSource

SAMPLES = 4
RANGE = tf.data.Dataset.range(SAMPLES)
Pair = collections.namedtuple("Pair", ["one", "other"])


class Own(RandomSource):
    """Source with a custom read function and signature."""

    def __init__(self, read, signature):
        self._read, self.signature, self.identity = read, signature, "own"

    def __len__(self):
        return SAMPLES

    def name(self, sample):
        return f"value {sample}"

    def read(self, sample):
        return self._read(sample)

    def decode(self, *stored):
        return stored[0]


FLOAT8 = tf.dtypes.experimental.float8_e4m3fn


@pytest.mark.parametrize("dtype", [tf.bfloat16, FLOAT8, tf.float16, tf.complex64, tf.bool])
@pytest.mark.parametrize("variable_shapes", [False, True])
def test_tensorflow_types_are_cached(opened, dtype, variable_shapes):
    def preprocess(n):
        return tf.cast(tf.cast(tf.fill([2], n % 2), tf.float32), dtype)

    source = datacache.from_dataset(RANGE, key="range")
    cache = opened(source, preprocess, variable_shapes=variable_shapes)
    for _ in range(2):
        batches = list(cache.dataset(2, shuffle=False))
        assert {batch.dtype for batch in batches} == {dtype}
        values = [tf.cast(batch, tf.float32).numpy().tolist() for batch in batches]
        assert values == [[[0, 0], [1, 1]]] * 2


def _lists(n):
    return {"a": [n, n + 1], "b": Pair([[n], [2 * n]], (n, [n]))}


def test_a_list_becomes_a_tensor_in_each_way_of_reading(opened):
    cache = opened(datacache.from_dataset(RANGE, key="range"), _lists)
    expected = list(RANGE.map(_lists).batch(2).as_numpy_iterator())
    by_step = cache.pydataset(2, shuffle=False)
    for read in (
        list(cache.dataset(2, shuffle=False).as_numpy_iterator()),
        [by_step[step] for step in range(2)],
        [
            tf.nest.map_structure(lambda *parts: np.stack(parts), *cache.random_access()[i : i + 2])
            for i in (0, 2)
        ],
    ):
        tf.nest.map_structure(np.testing.assert_array_equal, read, expected)


@pytest.mark.parametrize(
    ("preprocess", "received"),
    [
        (lambda n: (n, None), "Received: NoneType from `preprocess`. Remove None"),
        (
            lambda n: [n, "text"],
            r"A list in a sample must convert to one tensor.* Return its parts",
        ),
        (lambda n: (), r"must have at least one tensor. Received: \(\) from"),
        (lambda n: tf.ragged.constant([[1], [2, 3]]), "Received: RaggedTensor"),
    ],
)
def test_values_that_do_not_convert_to_tensors_are_refused(opened, preprocess, received):
    with pytest.raises(ValueError, match=received):
        opened(datacache.from_dataset(RANGE, key="range"), preprocess)


def _unknown_rank():
    values = [[1], [2, 3], [4], [5]]
    return tf.data.Dataset.from_generator(lambda: iter(values), output_types=tf.int64).apply(
        tf.data.experimental.assert_cardinality(SAMPLES)
    )


def test_elements_of_unknown_rank_are_cached_in_memory_only(opened, tmp_path):
    source = datacache.from_dataset(_unknown_rank(), key="unknown")
    cache = opened(source, None, variable_shapes=True)
    batches = [batch.numpy().tolist() for batch in cache.dataset(2, shuffle=False)]
    assert batches == [[[1, 0], [2, 3]], [[4], [5]]]
    with pytest.raises(
        SourceError, match=r"must have a known number of dimensions.*tf.ensure_shape"
    ):
        opened(source, None, variable_shapes=True, disk=tmp_path / "disk")


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize(
    ("read", "spec", "expected"),
    [
        (lambda n: [n], tf.TensorSpec([], tf.int64), [0, 1, 2, 3]),
        (lambda n: [np.int32(n)], tf.TensorSpec([], tf.int64), [0, 1, 2, 3]),
        (lambda n: [n], tf.TensorSpec([], tf.uint8), [0, 1, 2, 3]),
        (lambda n: ["é" * n], tf.TensorSpec([], tf.string), [b"", *("é" * n for n in (1, 2, 3))]),
        (lambda n: [bytes(n)], tf.TensorSpec([], tf.string), [bytes(n) for n in range(4)]),
        (
            lambda n: [np.array(["a", "b" * n])],
            tf.TensorSpec([2], tf.string),
            [[b"a", b"b" * n] for n in range(4)],
        ),
        (
            lambda n: [np.arange(4, dtype=">i8")[::-1][:2] + n],
            tf.TensorSpec([2], tf.int64),
            [[3 + n, 2 + n] for n in range(4)],
        ),
    ],
)
def test_custom_values_follow_their_signature(opened, tmp_path, disk, read, spec, expected):
    source = Own(read, [spec])
    cache = opened(source, None, disk=tmp_path / "disk" if disk else None)
    (batch,) = cache.dataset(SAMPLES, shuffle=False)
    expected = [text.encode() if isinstance(text, str) else text for text in expected]
    assert batch.numpy().tolist() == expected


@pytest.mark.parametrize(
    ("read", "spec", "received"),
    [
        (lambda n: [None], tf.string, "None for value 0, expected string. Convert the value in"),
        (
            lambda n: [np.array([b"a", None], object)],
            tf.string,
            "None.* for value 0, expected string",
        ),
        (lambda n: [np.array([1], object)], tf.string, r"1.* for value 0, expected string"),
        (lambda n: [np.array([b"a\0"])], tf.string, "for value 0, expected string"),
        (lambda n: [None], tf.int64, "None for value 0, expected int64"),
        (lambda n: [1.5], tf.int64, r"1.5 for value 0, expected int64"),
        (lambda n: [300], tf.uint8, "300 for value 0, expected uint8"),
        (lambda n: [1, 2], tf.int64, "2 components for value 0, expected 1"),
    ],
)
def test_values_that_contradict_the_signature_are_refused(opened, read, spec, received):
    with pytest.raises(SourceError, match=received):
        opened(Own(read, [tf.TensorSpec(None, spec)]), None)


def test_caching_works_in_the_debug_mode_of_tf_data(opened):
    """In this mode, functions of datasets run eagerly and receive arrays instead of lists."""
    debug_mode.toggle_debug_mode(True)
    try:
        data = RANGE.map(lambda n: n + 1)
        cache = opened(datacache.from_dataset(data, key="debugged"), lambda n: 2 * n)
        assert [batch.numpy().tolist() for batch in cache.dataset(2, shuffle=False)] == [
            [2, 4],
            [6, 8],
        ]
    finally:
        debug_mode.toggle_debug_mode(False)

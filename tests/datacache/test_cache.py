"""Tests the cache as scripts use it, on one rank."""

import itertools
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

import datacache
from datacache.errors import CacheError
from tests import drawn
from tests.datacache.caches import BATCH, SAMPLES, sample_numbers


def test_epochs_contain_each_sample_once_and_only_the_first_reads_the_source(images, opened):
    cache = opened(images)
    data = cache.dataset(BATCH, seed=5)
    assert data.element_spec == (
        tf.TensorSpec([None, 8, 8, 3], tf.uint8),
        tf.TensorSpec([None], tf.int64),
    )
    epochs = [sample_numbers(data) for _ in range(3)]
    assert len(data) == 4
    for number, epoch in enumerate(epochs):
        order = datacache.Order(samples=SAMPLES, global_batch=BATCH, seed=5).permutation(number)
        assert epoch == order.tolist()
    stats = cache.stats()
    assert stats.source_reads == SAMPLES
    assert stats.source_bytes == sum(path.stat().st_size + 8 for path in images.rglob("*.png"))
    assert stats.memory_hits == 2 * SAMPLES + 1
    assert f"{SAMPLES} of {SAMPLES} samples" in str(cache)
    assert sample_numbers(cache.dataset(BATCH, shuffle=False)) == list(range(SAMPLES))


def test_a_restarted_job_does_not_read_the_source(images, opened):
    opened(images).warm(progress=False)
    cache = opened(images)
    assert sorted(sample_numbers(cache.dataset(BATCH))) == list(range(SAMPLES))
    assert cache.stats().source_reads == 0


def test_batches_are_not_reused_while_referenced(images, opened):
    """Memory is reused only after all batches, and all arrays that view it, are released."""
    data = opened(images).dataset(4, shuffle=False)
    held = [batch for _ in range(8) for batch in data]
    views = [memoryview(pixels) for pixels, _ in held]
    addresses = {np.asarray(view).ctypes.data for view in views}
    assert len(addresses) == len(views), "each referenced batch must have its own memory"
    del held
    for _ in range(4):
        for _ in data:
            pass
    for place, view in enumerate(views):
        np.testing.assert_array_equal(view, [drawn.image(place % 6 * 4 + i) for i in range(4)])
    del views, view
    again = {np.asarray(memoryview(pixels)).ctypes.data for pixels, _ in data}
    assert addresses & again, "released memory must be reused, without copies by TensorFlow"


def test_nested_samples_of_many_sizes_are_cached(images, opened):
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
        match=r"All samples must have the same shapes and types.* pass variable_shapes=True",
    ):
        opened(images, lambda c, y: preprocess(c, y)["pixels"]).warm(progress=False)


@pytest.mark.parametrize("disk", [False, True])
def test_the_cache_replaces_the_cache_of_tf_data(tmp_path, opened, disk):
    calls = []

    def elements():
        calls.append(None)
        for number in range(SAMPLES):
            yield drawn.image(number), number * drawn.CLASSES // SAMPLES

    spec = (tf.TensorSpec([8, 8, 3], tf.uint8), tf.TensorSpec([], tf.int64))
    data = tf.data.Dataset.from_generator(elements, output_signature=spec)
    with pytest.raises(
        datacache.SourceError,
        match=r"must have a known, finite number of samples above 0. Received: a .* an unknown",
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
        assert sorted(sample_numbers(batches)) == list(range(SAMPLES))
    assert len(calls) == 2, "one pass must read the shapes, and one pass all samples"
    few = opened(datacache.from_dataset(data, key="few"), None, budget=1000)
    with pytest.raises(
        Exception, match=r"must fit on a disk. Received: no space for element \d+ of the dataset"
    ):
        few.warm(progress=False) and sample_numbers(few.dataset(BATCH))


def test_texts_keep_trailing_null_bytes(tmp_path, opened):
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


def test_iterators_over_one_dataset_read_complete_epochs(images, opened):
    data = opened(images).dataset(BATCH, seed=5)
    iterators = [iter(data) for _ in range(4)]
    order = datacache.Order(samples=SAMPLES, global_batch=BATCH, seed=5)
    for iterator in iterators:
        first = sample_numbers([next(iterator)])
        assert first in ([*order.permutation(epoch)[:BATCH]] for epoch in range(4))
    for iterator in iterators:
        assert len(sample_numbers(iterator)) == SAMPLES - BATCH


def test_a_keras_pydataset_has_the_order_of_the_cache(images, opened):
    cache = opened(images)
    data = cache.pydataset(BATCH, seed=5)
    order = datacache.Order(samples=SAMPLES, global_batch=BATCH, seed=5)
    for epoch in range(2):
        assert (
            sample_numbers([data[step] for step in range(len(data))])
            == order.permutation(epoch).tolist()
        )
        data.on_epoch_end()


def test_random_access_returns_the_sample_at_an_index(images, opened):
    samples = opened(images).random_access()
    assert len(samples) == SAMPLES
    pixels, label = samples[11]
    np.testing.assert_array_equal(pixels, drawn.image(11))
    assert label == 11 * drawn.CLASSES // SAMPLES


class _InProcesses(keras.utils.PyDataset):
    """Reads samples in worker processes that Keras forks, as augmentation in Python does."""

    def __init__(self, samples):
        super().__init__(workers=2, use_multiprocessing=True)
        self._samples = samples

    def __len__(self):
        return 3

    def __getitem__(self, step):
        batch = [self._samples[number] for number in range(8 * step, 8 * step + 8)]
        return tuple(np.stack(parts) for parts in zip(*batch, strict=True))


def test_forked_processes_read_memory_and_produce_no_samples(images, opened):
    cache = opened(images)
    data = _InProcesses(cache.random_access())

    def epoch():
        adapter = PyDatasetAdapter(data)
        adapter.on_epoch_begin()
        yield from itertools.islice(adapter.get_numpy_iterator(), 3)
        adapter.on_epoch_end()

    with pytest.raises(
        CacheError,
        match=r"Samples must be produced by the process that opened .* Received: sample \d+, .*"
        "Call cache.warm",
    ):
        list(epoch())
    cache.warm(progress=False)
    assert sample_numbers(epoch()) == list(range(SAMPLES))
    with pytest.raises(
        ValueError,
        match=r"must be read in threads.* Received: use_multiprocessing=True. Omit `use_multi",
    ):
        cache.pydataset(8, workers=2, use_multiprocessing=True)
    with pytest.raises(
        TypeError, match=r"A cache must be opened in the process that reads it. Received: .*Open th"
    ):
        pickle.dumps(cache.random_access())


def test_a_cleared_cache_reads_the_source_again(images, opened):
    cache = opened(images)
    cache.warm(progress=False)
    cache.clear()
    assert sorted(sample_numbers(cache.dataset(BATCH))) == list(range(SAMPLES))
    assert cache.stats().source_reads == 2 * SAMPLES


class _Tens:
    identity, signature = "multiples of ten", [tf.TensorSpec([], tf.int64)]

    def __len__(self):
        return 9

    def name(self, sample):
        return f"ten times {sample}"

    def read(self, sample):
        return [np.array(10 * sample)]

    def decode(self, value):
        return value


@pytest.mark.parametrize("memory", [True, False], ids=["memory", "none"])
def test_sample_indices_follow_list_semantics(tmp_path, memory):
    expected = list(range(0, 90, 10))
    with datacache.Cache(_Tens(), memory=tmp_path / "memory" if memory else None) as cache:
        samples = cache.random_access()
        for number in (-1, -9, np.int64(3), np.uint8(2), True):
            assert samples[number] == expected[number], number
        for number in (9, -10, 1.0, [1], None, np.bool_(True)):
            with pytest.raises((IndexError, TypeError)):
                samples[number]
        batches = cache.pydataset(4, shuffle=False)
        np.testing.assert_array_equal(batches[-1], batches[len(batches) - 1])
        with pytest.raises(IndexError):
            batches[len(batches)]
        assert samples[3:-2:4] == expected[3:-2:4]
        assert list(samples) == expected
        # Reads with invalid indices must not have replaced any sample.
        assert [int(value) for value in cache.dataset(1, shuffle=False).unbatch()] == expected


def test_a_closed_cache_refuses_reads(tmp_path):
    with datacache.Cache(_Tens(), memory=tmp_path / "memory") as cache:
        data, batches, samples = cache.dataset(4), cache.pydataset(4), cache.random_access()
        list(data)
    cache.close()
    for use in (
        *(lambda: cache.dataset(4), lambda: cache.pydataset(4), lambda: cache.warm()),
        *(lambda: cache.stats(), lambda: cache.state_dict(data), lambda: cache.count(1, data)),
        *(lambda: cache.clear(), lambda: len(cache), lambda: cache.begin_epoch(1, data)),
        *(lambda: next(cache.counted(data)), lambda: samples[0], lambda: batches[0]),
        lambda: len(samples),
    ):
        with pytest.raises(CacheError, match=r"a call after close\(\)"):
            use()
    with pytest.raises(tf.errors.OpError, match=r"a call after close\(\)"):
        next(iter(data))
    assert str(cache) == "datacache: closed"

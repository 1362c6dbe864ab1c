"""Clearing, damage and refused samples leave no gaps in the heap of samples of many sizes."""

import contextlib
import json
import threading
from dataclasses import asdict

import numpy as np
import pytest

from datacache.pool.pool import Pool
from datacache.pool.spec import Layout, PoolSpec, SampleShard, stack_samples
from datacache.statistics import Counts
from datacache.tiers.tier import StoreTier
from tests.datacache.pools import (
    SAMPLES,
    VARYING,
    check_varying,
    fill_all,
    varying_pool,
    varying_sample,
)


def fitting_pool(folder, spare=0):
    """Returns a store whose heap has exactly the size of all samples and `spare` bytes."""
    layout = Layout.of(VARYING, [[0], [], [], [0]])
    contents = sum(len(layout.pack(varying_sample(index))) for index in range(SAMPLES))
    return varying_pool(folder, heap_bytes=contents + spare)


def test_samples_of_many_sizes_are_stored_and_stacked(tmp_path):
    pool, other = varying_pool(tmp_path), varying_pool(tmp_path)
    order = np.random.default_rng(0).permutation(SAMPLES)
    for index in order:
        assert pool.put(index, varying_sample(index))
    assert other.find_corrupt(order).size == 0
    for index in order:
        for array, expected in zip(other.read_sample(index), varying_sample(index), strict=True):
            np.testing.assert_array_equal(array, expected)
    read = list(map(other.read_sample, order[:9]))
    numbers, texts, floats, many = stack_samples(read, other.layout)
    longest = max(len(varying_sample(index)[0]) for index in order[:9])
    assert numbers.shape == (9, longest, 3)
    assert numbers.dtype == np.int32
    for place, index in enumerate(order[:9]):
        expected = varying_sample(index)
        np.testing.assert_array_equal(numbers[place, : len(expected[0])], expected[0])
        assert not numbers[place, len(expected[0]) :].any()
        assert texts[place] == expected[1]
        assert floats[place] == index
        assert all(text == b"" for text in many[place, len(expected[3]) :].reshape(-1))
    assert other.layout == Layout.from_dict(json.loads(json.dumps(asdict(other.layout))))


def test_samples_that_do_not_fit_into_the_heap_leave_no_gap(tmp_path):
    layout = Layout.of([np.array(b"", object), np.array(b"", object)])
    pool = Pool(
        tmp_path,
        lambda: PoolSpec(layout=layout, shard=SampleShard(samples=3, slots=3), heap_bytes=120),
    )
    for _ in range(9):
        assert not pool.put(0, [b"x" * 20, b"x" * 70])
    assert pool.put(1, [b"y" * 20, b"y\0\0"])
    assert [text[()] for text in pool.read_sample(1)] == [b"y" * 20, b"y\0\0"]


def test_a_full_heap_accepts_no_samples(tmp_path):
    pool = varying_pool(tmp_path, heap_bytes=1500)
    kept = [index for index in range(SAMPLES) if pool.put(index, varying_sample(index))]
    assert 0 < len(kept) < SAMPLES
    np.testing.assert_array_equal(np.flatnonzero(pool.ready(np.arange(SAMPLES))), kept)
    for index in kept:
        assert pool.read_sample(index)[1] == varying_sample(index)[1]


def test_clearing_frees_space(tmp_path):
    """Samples may return in any order, and from another process that has the store open."""
    pool, other = fitting_pool(tmp_path), fitting_pool(tmp_path)
    everything = np.arange(SAMPLES)
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(SAMPLES)
        assert fill_all(other if seed % 2 else pool, order)
        check_varying(other, everything)
        (pool if seed % 2 else other).clear()
        assert (pool.filled, other.filled) == (0, 0)


def test_repaired_samples_are_appended(tmp_path):
    """The repaired sample occupies new space, because its old offset or length may be corrupt."""
    pool, other = fitting_pool(tmp_path, spare=2000), fitting_pool(tmp_path)
    assert fill_all(pool, range(SAMPLES))
    for step in range(8):
        corrupt = step * 7 % SAMPLES
        pool._columns[0][corrupt, step % 2] += [1, -1, 2**40, -(2**40)][step % 4]
        assert other.find_corrupt(np.arange(SAMPLES), recheck=True).tolist() == [corrupt]
        assert other.put(corrupt, varying_sample(corrupt))
        check_varying(pool, np.arange(SAMPLES))


def test_readers_never_see_parts_of_other_samples(tmp_path):
    """While a sample is cleared and regenerated, readers find the whole sample or none."""
    pool, other = fitting_pool(tmp_path), fitting_pool(tmp_path)
    assert fill_all(pool, range(SAMPLES))
    ends, wrong, found = threading.Event(), [], [0]

    def read():
        while not ends.is_set():
            for index in range(SAMPLES):
                if (arrays := other.read_sample(index)) is not None:
                    found[0] += 1
                    if any(
                        not np.array_equal(*pair)
                        for pair in zip(arrays, varying_sample(index), strict=True)
                    ):
                        wrong.append(index)

    reader = threading.Thread(target=read)
    reader.start()
    for seed in range(15):
        pool.clear()
        assert fill_all(pool, np.random.default_rng(seed).permutation(SAMPLES))
    ends.set()
    reader.join()
    assert found[0]
    assert wrong == []


@pytest.mark.parametrize("end", [0, 16, 10**9, -5])
def test_the_saved_end_of_the_heap_is_ignored(tmp_path, end):
    """After a power failure, the saved end may be older than the samples."""
    with contextlib.closing(fitting_pool(tmp_path, spare=60)) as pool:
        assert fill_all(pool, range(SAMPLES - 1))
        pool._heap._state[0] = end
    with contextlib.closing(fitting_pool(tmp_path)) as pool:
        assert pool.put(SAMPLES - 1, varying_sample(SAMPLES - 1))
        check_varying(pool, np.arange(SAMPLES))


def test_a_batch_cleared_by_another_process_is_regenerated(tmp_path):
    pool = varying_pool(tmp_path)
    everything = np.arange(4)
    made = []

    class Below:
        stream = None

        def samples(self, indices):
            made.append(indices.tolist())
            return [varying_sample(index) for index in indices]

    assert fill_all(pool, everything)
    pool._words[2:4] = 0
    assert pool.read_sample(2) is None
    put = pool.put
    pool.put = lambda sample, arrays: sample != 3 and put(sample, arrays)
    found = StoreTier(pool, Below(), Counts()).collect(everything, {0: varying_sample(0)})
    assert made == [[2, 3]]
    for index in everything:
        np.testing.assert_array_equal(found[index][0], varying_sample(index)[0])

"""Each process detects corrupt samples once, and never returns them."""

import numpy as np
import pytest

from datacache import native
from datacache.pool import pool as pool_module
from tests.datacache.pools import (
    SAMPLES,
    check_samples,
    drawn_sample,
    new_pool,
    section,
    varying_pool,
    varying_sample,
)


@pytest.mark.parametrize("damage", ["flip", "swap", "word", "zero"])
def test_corrupt_samples_are_detected_once_and_repaired(tmp_path, damage):
    pool = new_pool(tmp_path)
    for index in range(SAMPLES):
        pool.put(index, drawn_sample(index))
    path = tmp_path / "datacache.store"
    content = np.memmap(path, offset=section(tmp_path, "words" if damage == "word" else "columns"))
    if damage == "flip":
        content[15 * 7 + 4] ^= 16
    elif damage == "swap":
        content[15 * 7 : 15 * 9] = np.roll(content[15 * 7 : 15 * 9], 15)
    elif damage == "word":
        content[8 * 7] ^= 1
    else:
        content[15 * 7 : 15 * 8] = 0
    reader = new_pool(tmp_path)
    everything = np.arange(SAMPLES)
    corrupt = reader.find_corrupt(everything)
    assert corrupt.tolist() == ([7, 8] if damage == "swap" else [7])
    np.testing.assert_array_equal(reader.ready(everything), ~np.isin(everything, corrupt))
    for index in corrupt:
        reader.put(index, drawn_sample(index))
    assert reader.find_corrupt(everything).size == 0
    check_samples(reader, everything)


@pytest.mark.parametrize("damage", ["content", "offset", "length"])
def test_corrupt_samples_of_many_sizes_are_detected_and_repaired(tmp_path, damage):
    pool = varying_pool(tmp_path)
    for index in range(SAMPLES):
        pool.put(index, varying_sample(index))
    where = {"offset": 0, "length": 1}
    if damage == "content":
        offset, length = map(int, pool._columns[0][7])
        assert length
        pool._heap.content(offset, length)[0] ^= 1
    else:
        pool._columns[0][7][where[damage]] += 2**40
    reader = varying_pool(tmp_path)
    assert reader.find_corrupt(np.arange(SAMPLES)).tolist() == [7]
    reader.put(7, varying_sample(7))
    assert reader.find_corrupt(np.array([7])).size == 0
    assert reader.read_sample(7)[1] == varying_sample(7)[1]


def test_a_sample_at_the_position_of_another_is_corrupt(tmp_path):
    """The sample is complete, but lies in the slot of another sample."""
    pool = new_pool(tmp_path)
    pool.put(3, drawn_sample(3))
    pool.put(4, drawn_sample(4))
    for column in (*pool._columns, pool._words):
        column[4] = column[3]
    assert new_pool(tmp_path).find_corrupt(np.array([3, 4])).tolist() == [4]


@pytest.mark.parametrize("look", ["gather_verified", "find_corrupt"])
def test_readers_verify_checksums_once_and_writers_do_not(tmp_path, monkeypatch, look):
    everything = np.arange(SAMPLES)
    looked_at = []
    gather = native.gather
    monkeypatch.setattr(
        pool_module, "gather", lambda r, p, i, c=None: looked_at.append(c) or gather(r, p, i, c)
    )

    def looks(pool, **again):
        """Returns whether a call verifies checksums, which are all correct."""
        looked_at.clear()
        found = getattr(pool, look)(everything, **again)
        assert not (found[1] if look == "gather_verified" else found).size
        return any(checksums is not None and len(checksums) for checksums in looked_at)

    writer, reader = new_pool(tmp_path), new_pool(tmp_path)
    for index in everything:
        writer.put(index, drawn_sample(index))
    assert not looks(writer)
    assert [looks(reader) for _ in range(3)] == [True, False, False]
    assert looks(writer, recheck=True)
    writer.put(3, drawn_sample(4))
    assert [looks(reader) for _ in range(2)] == [True, False]


def test_corrupt_samples_are_detected_during_the_copy(tmp_path):
    pool = new_pool(tmp_path)
    for index in range(SAMPLES):
        pool.put(index, drawn_sample(index))
    pool._columns[1][7] += 1
    reader = new_pool(tmp_path)
    order = np.random.default_rng(0).permutation(SAMPLES)
    assert reader.gather_verified(order)[1].tolist() == [7]
    assert not reader.ready(np.array([7]))[0]
    reader.put(7, drawn_sample(7))
    arrays, corrupt = reader.gather_verified(order, recheck=True)
    assert not corrupt.size
    for got, expected in zip(arrays, pool.gather(order), strict=True):
        np.testing.assert_array_equal(got, expected)
    pool._columns[1][8] += 1
    assert reader.find_corrupt(order).size == 0, "the reader has verified this sample before"
    assert reader.find_corrupt(order, recheck=True).tolist() == [8]
    assert pool.can_copy(order)
    assert not varying_pool(tmp_path / "varying").can_copy(order)


@pytest.mark.parametrize("look", ["gather_verified", "find_corrupt"])
@pytest.mark.parametrize("act", ["clear", "rewrite"])
def test_a_sample_that_changes_during_verification_is_not_corrupt(tmp_path, monkeypatch, look, act):
    """The sample is intact, but the batch that contains it is discarded."""
    writer, everything = new_pool(tmp_path), np.arange(SAMPLES)
    for index in everything:
        writer.put(index, drawn_sample(index))
    reader, changes = new_pool(tmp_path), iter([True])

    def meanwhile(records, places, into, checksums=None):
        if next(changes, False):
            writer._words[3] = 0
            if act == "rewrite":
                writer.put(3, drawn_sample(4))
        native.gather(records, places, into, checksums)

    monkeypatch.setattr(pool_module, "gather", meanwhile)
    found = getattr(reader, look)(everything, recheck=True)
    if look == "gather_verified":
        assert found[0] is None
        found = found[1]
    assert not found.size
    assert reader.ready(everything)[3] == (act == "rewrite")
    assert not reader.find_corrupt(everything[reader.ready(everything)], recheck=True).size


def test_samples_that_are_cleared_during_the_copy_are_not_returned(tmp_path, monkeypatch):
    pool, other, everything = new_pool(tmp_path), new_pool(tmp_path), np.arange(SAMPLES)
    for index in everything:
        pool.put(index, drawn_sample(index))
    monkeypatch.setattr(
        pool_module, "gather", lambda *given: (native.gather(*given), other.clear())
    )
    arrays, corrupt = pool.gather_verified(everything)
    assert arrays is None
    assert not corrupt.size


def test_samples_written_after_verification_are_retained(tmp_path):
    """A writer may replace the sample before the reader marks it as corrupt."""
    pool = new_pool(tmp_path)
    pool.put(3, drawn_sample(3))
    old = pool._words[[3]]
    pool.put(3, drawn_sample(4))
    agrees = np.array([False])
    assert not pool.settle(np.array([3]), old, agrees)[0]
    assert pool.ready(np.array([3]))[0]
    assert pool.settle(np.array([3]), pool._words[[3]], agrees)[0]
    assert not pool.ready(np.array([3]))[0]


def test_a_mark_refers_to_the_verified_metadata(tmp_path):
    """Another process rewrites the sample before the reader marks it as verified."""
    pool, other = new_pool(tmp_path), new_pool(tmp_path)
    pool.put(3, drawn_sample(3))
    old = pool._words[[3]]
    pool.put(3, drawn_sample(4))
    other.settle(np.array([3]), old, np.array([True]))
    pool._columns[1][3] += 1
    assert other.find_corrupt(np.array([3])).tolist() == [3]

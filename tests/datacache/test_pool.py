"""Tests samples in shared-memory stores, which one process writes and all processes read."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from datacache.errors import CacheError, NoRoomError
from datacache.pool.folder import remove
from datacache.pool.pool import Pool
from datacache.pool.spec import Component, Layout, PoolSpec, SampleShard, owner_nodes
from tests.datacache.pools import (
    LAYOUT,
    SAMPLES,
    check_samples,
    drawn_sample,
    new_pool,
)


def test_other_byte_orders_are_converted():
    array = np.array([1, 2], ">i4")
    layout = Layout.of([array])
    assert layout.unpack(np.frombuffer(layout.pack([array]), np.uint8))[0].tolist() == [1, 2]


def test_samples_are_unpacked_as_they_were_packed():
    layout = Layout.of([np.zeros(2, "uint8"), np.array(b"", object)])
    samples = [[np.array([n, 2], "uint8"), np.array(b"text" * n, object)] for n in range(3)]
    for sample in samples:
        part = np.frombuffer(layout.pack(sample), np.uint8)
        for got, expected in zip(layout.unpack(part), sample, strict=True):
            np.testing.assert_array_equal(got, expected)


def test_one_process_reads_the_samples_of_another(tmp_path):
    one, other = new_pool(tmp_path), new_pool(tmp_path)
    order = np.random.default_rng(0).permutation(SAMPLES)
    assert not other.ready(order).any()
    for index in order[:30]:
        one.put(index, drawn_sample(index))
    np.testing.assert_array_equal(other.ready(order), [True] * 30 + [False] * 10)
    assert other.filled == 30
    assert other.find_corrupt(order[:30]).size == 0
    check_samples(other, order[:30])
    targets = [np.empty((30, *c.shape), c.dtype) for c in LAYOUT.components]
    assert all(
        got is target
        for got, target in zip(other.gather(order[:30], targets), targets, strict=True)
    )
    np.testing.assert_array_equal(targets[2][:, 0], order[:30])


@pytest.mark.parametrize("slots", [1, 13, 39])
def test_stores_select_the_same_samples_for_their_slots(tmp_path, slots):
    everything = np.arange(SAMPLES)
    pool, again = new_pool(tmp_path / "a", slots), new_pool(tmp_path / "b", slots)
    assert pool.has_room(everything).sum() == slots
    np.testing.assert_array_equal(pool.has_room(everything), again.has_room(everything))
    kept = everything[pool.has_room(everything)]
    for index in kept:
        pool.put(index, drawn_sample(index))
    np.testing.assert_array_equal(pool.ready(everything), pool.has_room(everything))
    check_samples(pool, kept)


def test_a_store_without_free_space_is_refused(tmp_path):
    huge = Layout(components=(Component(dtype="uint8", shape=(2**40,)),))
    with pytest.raises(
        NoRoomError, match=r"A store needs .* bytes of free space.*Reduce the budget"
    ):
        Pool(tmp_path, lambda: PoolSpec(layout=huge, shard=SampleShard(samples=2**10, slots=2**10)))
    assert sum(path.stat().st_blocks for path in tmp_path.iterdir()) < 100
    new_pool(tmp_path).put(0, drawn_sample(0))


def test_a_store_can_be_removed_after_the_last_close(tmp_path):
    folder = tmp_path / "pool"
    one, other = new_pool(folder), new_pool(folder)
    one.close()
    with pytest.raises(
        CacheError,
        match=r"must not be in use when it is removed. Received: .*Wait until that process",
    ):
        remove(folder)
    other.put(1, drawn_sample(1))
    check_samples(other, np.array([1]))
    other.close()
    remove(folder)
    assert not folder.exists()
    with pytest.raises(CacheError, match="must be a folder with a file"):
        remove(tmp_path)
    (tmp_path / "thesis.tex").write_text("x")
    assert new_pool(folder).filled == 0


@pytest.mark.parametrize(("samples", "nodes"), [(1, 1), (40, 1), (40, 2), (41, 3), (2, 4)])
def test_each_sample_belongs_to_one_node(samples, nodes):
    home = owner_nodes(samples, nodes)
    parts = [
        SampleShard(samples=samples, slots=samples, node=node, nodes=nodes) for node in range(nodes)
    ]
    for node, part in enumerate(parts):
        np.testing.assert_array_equal(part.slot_indices() >= 0, home == node)
        assert part.assigned_samples == (home == node).sum()
        kept = part.slot_indices()[home == node]
        assert sorted(kept) == list(range(len(kept)))
        few = SampleShard(samples=samples, slots=2, node=node, nodes=nodes).slot_indices()
        assert (few >= 0).sum() == min(2, part.assigned_samples)
        assert (home[few >= 0] == node).all()
    counts = np.bincount(home, minlength=nodes)
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {0: np.zeros((5, 4), "uint8")},
            r"uint8\[5, 4\] and .* for sample 3, .* has uint8\[5, 3\] and",
        ),
        ({1: np.float64(0)}, r".* and float64\[\] and .* for sample 3, .* and float32\[\] and"),
    ],
)
def test_samples_of_another_layout_are_refused(tmp_path, changed, text):
    arrays = [changed.get(place, array) for place, array in enumerate(drawn_sample(3))]
    with pytest.raises(
        ValueError, match=rf"All samples must have the same shapes and types. Received: {text}"
    ):
        new_pool(tmp_path).put(3, arrays)
    with pytest.raises(
        ValueError, match=r"same shapes and types. Received: uint8\[5, 3\] for sample 3, while"
    ):
        new_pool(tmp_path).put(3, drawn_sample(3)[:1])


def test_dates_are_refused():
    with pytest.raises(
        ValueError,
        match=r"Samples must be numbers or bytes. Received: datetime64.* for component 0",
    ):
        Layout.of([np.datetime64("2026-11-22")])


def test_layouts_survive_a_round_trip_through_json():
    assert Layout.from_dict(json.loads(json.dumps(asdict(LAYOUT)))) == LAYOUT

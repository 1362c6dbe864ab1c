"""Samples in shared memory: what is ready is right, whatever was killed, torn or full."""

import contextlib
import fcntl
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest

from datacache import native
from datacache.errors import CacheError, NoRoomError
from datacache.levels.pool_level import PoolLevel
from datacache.pool import heap
from datacache.pool import pool as pool_module
from datacache.pool.folder import remove
from datacache.pool.heap import gaps
from datacache.pool.kept_samples import KeptSamples, owner_nodes
from datacache.pool.layout import Component, Layout
from datacache.pool.pool import Plan, Pool, existing
from datacache.statistics import Counts

LAYOUT = Layout.of(
    sample := [np.zeros((5, 3), "uint8"), np.float32(0), np.zeros(2, "int64"), np.array(True)]
)
SAMPLES = 40
MAPPED = ("samples", "words", "heap", "end")


def f(index):
    """The sample of that number."""
    draw = np.random.default_rng(index)
    pixels = draw.integers(0, 256, (5, 3)).astype("uint8")
    return [pixels, np.float32(draw.normal()), np.array([index, -index]), np.array(index % 2 == 0)]


def _pool(folder, slots=SAMPLES, **of_part):
    return Pool(
        folder,
        lambda: Plan(layout=LAYOUT, part=KeptSamples(samples=SAMPLES, slots=slots, **of_part)),
    )


def _check(pool, samples):
    for arrays, place in zip(zip(*pool.gather(samples), strict=True), samples, strict=True):
        for array, expected in zip(arrays, f(place), strict=True):
            np.testing.assert_array_equal(array, expected)


def test_what_one_writes_another_reads(tmp_path):
    one, other = _pool(tmp_path), _pool(tmp_path)
    order = np.random.default_rng(0).permutation(SAMPLES)
    assert not other.ready(order).any()
    for index in order[:30]:
        one.put(index, f(index))
    np.testing.assert_array_equal(other.ready(order), [True] * 30 + [False] * 10)
    assert other.filled == 30
    assert other.torn(order[:30]).size == 0
    _check(other, order[:30])
    targets = [np.empty((30, *c.shape), c.dtype) for c in LAYOUT.components]
    assert all(
        got is target
        for got, target in zip(other.gather(order[:30], targets), targets, strict=True)
    )
    np.testing.assert_array_equal(targets[2][:, 0], order[:30])


@pytest.mark.parametrize("slots", [1, 13, 39])
def test_a_choice_that_fits_is_kept(tmp_path, slots):
    everything = np.arange(SAMPLES)
    pool, again, other = (
        _pool(tmp_path / name, slots, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert pool.has_room(everything).sum() == slots
    np.testing.assert_array_equal(pool.has_room(everything), again.has_room(everything))
    assert (pool.has_room(everything) != other.has_room(everything)).any() or slots == 39
    kept = everything[pool.has_room(everything)]
    for index in kept:
        pool.put(index, f(index))
    np.testing.assert_array_equal(pool.ready(everything), pool.has_room(everything))
    _check(pool, kept)


@pytest.mark.parametrize("damage", ["flip", "swap", "word", "zero"])
def test_torn_samples_are_found_once_and_heal(tmp_path, damage):
    pool = _pool(tmp_path)
    for index in range(SAMPLES):
        pool.put(index, f(index))
    path = tmp_path / ("words" if damage == "word" else "samples")
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[15 * 7 + 4] ^= 16
    elif damage == "swap":
        content[15 * 7 : 15 * 9] = content[15 * 8 : 15 * 9] + content[15 * 7 : 15 * 8]
    elif damage == "word":
        content[8 * 7] ^= 1
    else:
        content[15 * 7 : 15 * 8] = bytes(15)
    path.write_bytes(content)
    reader = _pool(tmp_path)
    everything = np.arange(SAMPLES)
    torn = reader.torn(everything)
    assert torn.tolist() == ([7, 8] if damage == "swap" else [7])
    np.testing.assert_array_equal(reader.ready(everything), ~np.isin(everything, torn))
    for index in torn:
        reader.put(index, f(index))
    assert reader.torn(everything).size == 0
    _check(reader, everything)


def _fill(folder, die_at):
    """Writes samples, and is killed at that one of all its steps."""
    steps = iter(range(10**6))

    class Mortal(np.ndarray):
        def __setitem__(self, key, value):
            if next(steps) == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            super().__setitem__(key, value)

    pool = _pool(folder)
    pool._words = pool._words.view(Mortal)
    pool._columns = [column.view(Mortal) for column in pool._columns]
    for index in range(4):
        with pool.claim(np.array([index])) as mine:
            assert mine.tolist() == [index]
            pool.put(index, f(index))


def test_a_kill_at_every_step_leaves_only_whole_samples(tmp_path):
    context = multiprocessing.get_context("spawn")
    steps = 4 * (2 + len(LAYOUT.components))
    for die_at in range(steps):
        folder = tmp_path / str(die_at)
        filler = context.Process(target=_fill, args=(folder, die_at))
        filler.start()
        filler.join()
        assert filler.exitcode == -signal.SIGKILL
        pool = _pool(folder)
        ready = np.flatnonzero(pool.ready(np.arange(SAMPLES)))
        assert ready.tolist() == list(range(die_at // (steps // 4)))
        assert pool.torn(ready).size == 0
        _check(pool, ready)
        with pool.claim(np.array([len(ready)])) as mine:
            assert mine.size, "the kernel has released what the killed process had claimed"


def test_claims_are_for_one(tmp_path):
    pool, other = _pool(tmp_path), _pool(tmp_path)
    other.put(5, f(5))
    with pool.claim(np.array([2, 3, 5])) as mine, other.claim(np.array([3, 4])) as theirs:
        assert (mine.tolist(), theirs.tolist()) == ([2, 3], [4])
        with pool.claim_all() as everything, other.claim_all() as again:
            assert (everything, again) == (True, False)
    with other.claim(np.array([3])) as mine:
        assert mine.tolist() == [3]
        found = []
        thread = threading.Thread(target=lambda: found.extend(_claimed(other, 3)))
        thread.start()
        thread.join()
        assert found == []


def _claimed(pool, sample):
    with pool.claim(np.array([sample])) as mine:
        return mine.tolist()


def _open(folder, found):
    try:
        found.put(_pool(folder).filled)
    except CacheError as error:
        found.put(str(error))


def test_many_begin_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    processes = [context.Process(target=_open, args=(tmp_path, found)) for _ in range(8)]
    for process in processes:
        process.start()
    assert [found.get(timeout=300) for _ in processes] == [0] * 8
    for process in processes:
        process.join()


def test_a_kill_while_it_is_made(tmp_path):
    _pool(tmp_path)
    (tmp_path / "header.json").unlink()
    (tmp_path / "samples").write_bytes(b"half")
    (tmp_path / "header.part").write_text("{")
    pool = _pool(tmp_path)
    pool.put(1, f(1))
    _check(pool, np.array([1]))


def test_folders_that_are_no_cache(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(
        CacheError, match=r"A cache must have a folder of its own. Received: .*holds 'thesis.tex'"
    ):
        _pool(tmp_path)
    folder = tmp_path / "pool"
    _pool(folder)
    header = json.loads((folder / "header.json").read_text())
    assert _pool(folder, slots=7).slots == SAMPLES, "a pool is taken as it was made"
    with pytest.raises(
        CacheError, match=r"A cache must have a header.json. Received: .*without one"
    ):
        existing(tmp_path)
    (folder / "header.json").write_text(json.dumps(header | {"format": 99}))
    with pytest.raises(
        CacheError, match=r"A cache must be of a format up to 2. Received: format 99 in .*newer"
    ):
        _pool(folder)


def _header(**changed):
    def change(folder, other):
        path = folder / "header.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))

    return change


def _resized(name, by):
    return lambda folder, other: os.truncate(folder / name, (folder / name).stat().st_size + by)


def _of_another(name):
    return lambda folder, other: (folder / name).write_bytes((other / name).read_bytes())


DAMAGE = {
    "half a header": (
        _resized("header.json", -9),
        "must be whole. Received: .*header.json, which is no JSON",
    ),
    "no text": (
        lambda folder, other: (folder / "header.json").write_bytes(b"\xff"),
        "header.json, which is no JSON",
    ),
    "another JSON": (
        lambda folder, other: (folder / "header.json").write_text("[]"),
        "must say what it holds",
    ),
    "changed": (
        _header(source="other"),
        "must be as it was made. Received: .*header.json, which was changed",
    ),
    "older": (
        _header(format=1),
        "must be of format 2. Received: format 1 in .*an older tfposeidon has made",
    ),
    "moved": (
        lambda folder, other: (shutil.rmtree(folder), shutil.copytree(other, folder)),
        "made as other",
    ),
    "gone": (
        lambda folder, other: (folder / "words").unlink(),
        "must be there. Received: no .*words",
    ),
    "empty": (lambda folder, other: os.truncate(folder / "samples", 0), "samples of 0 bytes, not"),
    **{
        f"short {name}": (_resized(name, -1), f"must be whole. Received: .*{name} of .* bytes, not")
        for name in MAPPED
    },
    **{
        f"long {name}": (_resized(name, 64), f"must be whole. Received: .*{name} of .* bytes, not")
        for name in MAPPED
    },
    **{
        f"swapped {name}": (
            _of_another(name),
            f"must be its own. Received: .*{name}, of another pool",
        )
        for name in MAPPED
    },
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_what_nobody_has_open_is_made_anew(tmp_path, damage, caplog):
    apply, text = DAMAGE[damage]
    folder, other = tmp_path / "pool", tmp_path / "other"
    for place in (other, folder):
        with contextlib.closing(_varying_pool(place)) as pool:
            for index in range(SAMPLES):
                pool.put(index, _varying(index))
    apply(folder, other)
    with pytest.raises(CacheError, match=rf"{text}.* Remove it: python -m datacache rm {folder}$"):
        existing(folder)
    users = os.open(folder / "users", os.O_RDONLY)
    fcntl.flock(users, fcntl.LOCK_SH)
    with pytest.raises(
        CacheError,
        match=rf"{text}.* A process has it open: end it, and the next makes the pool anew",
    ):
        _varying_pool(folder)
    os.close(users)
    with (
        caplog.at_level(logging.WARNING, "datacache"),
        contextlib.closing(_varying_pool(folder)) as pool,
    ):
        assert re.search(rf"datacache: .*{text}.* It is made anew", caplog.text)
        assert pool.filled == 0
        for index in range(SAMPLES):
            assert pool.put(index, _varying(index))
    with contextlib.closing(existing(folder)) as pool:
        assert pool.filled == SAMPLES
        assert pool.torn(np.arange(SAMPLES)).size == 0


def test_no_room(tmp_path):
    huge = Layout(components=(Component(dtype="uint8", shape=(2**40,)),))
    with pytest.raises(
        NoRoomError, match=r"A pool needs room before it begins.*Give it a smaller budget"
    ):
        Pool(tmp_path, lambda: Plan(layout=huge, part=KeptSamples(samples=2**10, slots=2**10)))
    assert sum(path.stat().st_blocks for path in tmp_path.iterdir()) < 100
    _pool(tmp_path).put(0, f(0))


def test_it_is_removed_once_nobody_has_it_open(tmp_path):
    folder = tmp_path / "pool"
    one, other = _pool(folder), _pool(folder)
    one.close()
    with pytest.raises(
        CacheError, match=r"A cache must not be in use to be removed. Received: .*Wait, or end it"
    ):
        remove(folder)
    other.put(1, f(1))
    _check(other, np.array([1]))
    other.close()
    remove(folder)
    assert not folder.exists()
    with pytest.raises(CacheError, match="without one"):
        remove(tmp_path)
    (tmp_path / "thesis.tex").write_text("x")
    assert _pool(folder).filled == 0


@pytest.mark.parametrize(("samples", "nodes"), [(1, 1), (40, 1), (40, 2), (41, 3), (2, 4)])
def test_each_sample_is_at_home_on_one_node(samples, nodes):
    home = owner_nodes(samples, nodes, seed=3)
    parts = [
        KeptSamples(samples=samples, slots=samples, seed=3, node=node, nodes=nodes)
        for node in range(nodes)
    ]
    for node, part in enumerate(parts):
        np.testing.assert_array_equal(part.places() >= 0, home == node)
        assert part.wanted == (home == node).sum()
        kept = part.places()[home == node]
        assert sorted(kept) == list(range(len(kept)))
        few = KeptSamples(samples=samples, slots=2, seed=3, node=node, nodes=nodes).places()
        assert (few >= 0).sum() == min(2, part.wanted)
        assert (home[few >= 0] == node).all()
    counts = np.bincount(home, minlength=nodes)
    assert max(counts) - min(counts) <= 1


VARYING = [
    np.zeros((2, 3), "int32"),
    np.array(b"text", object),
    np.float32(0),
    np.array([[b"a", b"bc"]], object),
]


def _varying(index):
    draw = np.random.default_rng(index)
    texts = np.array([[b"x" * int(draw.integers(9)), b""]] * int(draw.integers(4)), object).reshape(
        -1, 2
    )
    numbers = draw.integers(0, 99, (int(draw.integers(5)), 3)).astype("int32")
    return [
        numbers,
        np.array(bytes(draw.bytes(int(draw.integers(30)))), object),
        np.float32(index),
        texts,
    ]


def _varying_pool(folder, heap_bytes=10**5):
    layout = Layout.of(VARYING, [[0], [], [], [0]])
    return Pool(
        folder,
        lambda: Plan(
            layout=layout, part=KeptSamples(samples=SAMPLES, slots=SAMPLES), heap_bytes=heap_bytes
        ),
    )


def test_samples_of_many_sizes(tmp_path):
    pool, other = _varying_pool(tmp_path), _varying_pool(tmp_path)
    order = np.random.default_rng(0).permutation(SAMPLES)
    for index in order:
        assert pool.put(index, _varying(index))
    assert other.torn(order).size == 0
    for index in order:
        for array, expected in zip(other.sample(index), _varying(index), strict=True):
            np.testing.assert_array_equal(array, expected)
    numbers, texts, floats, many = other.gather(order[:9])
    longest = max(len(_varying(index)[0]) for index in order[:9])
    assert numbers.shape == (9, longest, 3)
    assert numbers.dtype == np.int32
    for place, index in enumerate(order[:9]):
        expected = _varying(index)
        np.testing.assert_array_equal(numbers[place, : len(expected[0])], expected[0])
        assert not numbers[place, len(expected[0]) :].any()
        assert texts[place] == expected[1]
        assert floats[place] == index
        assert all(text == b"" for text in many[place, len(expected[3]) :].reshape(-1))
    assert other.layout == Layout.from_dict(json.loads(json.dumps(other.layout.to_dict())))


@pytest.mark.parametrize("damage", ["content", "offset", "length"])
def test_torn_samples_of_many_sizes(tmp_path, damage):
    pool = _varying_pool(tmp_path)
    for index in range(SAMPLES):
        pool.put(index, _varying(index))
    where = {"offset": 0, "length": 1}
    if damage == "content":
        offset, length = map(int, pool._columns[1][7][:2])
        assert length
        pool._heap.content(offset, length)[0] ^= 1
    else:
        pool._columns[1][7][where[damage]] += 2**40
    reader = _varying_pool(tmp_path)
    assert reader.torn(np.arange(SAMPLES)).tolist() == [7]
    reader.put(7, _varying(7))
    assert reader.torn(np.array([7])).size == 0
    assert reader.sample(7)[1] == _varying(7)[1]


def test_a_sample_in_the_place_of_another_is_torn(tmp_path):
    """Whole, but not the one whose place it is."""
    pool = _pool(tmp_path)
    pool.put(3, f(3))
    pool.put(4, f(4))
    for column in (*pool._columns, pool._words):
        column[4] = column[3]
    assert _pool(tmp_path).torn(np.array([3, 4])).tolist() == [4]


def test_what_does_not_fit_into_the_heap_leaves_no_gap(tmp_path):
    layout = Layout.of([np.array(b"", object), np.array(b"", object)])
    pool = Pool(
        tmp_path, lambda: Plan(layout=layout, part=KeptSamples(samples=3, slots=3), heap_bytes=100)
    )
    for _ in range(9):
        assert not pool.put(0, [b"x" * 20, b"x" * 70])
    assert pool.put(1, [b"y" * 20, b"y\0\0"])
    assert [text[()] for text in pool.sample(1)] == [b"y" * 20, b"y\0\0"]


def test_a_full_heap_takes_no_more(tmp_path):
    pool = _varying_pool(tmp_path, heap_bytes=600)
    kept = [index for index in range(SAMPLES) if pool.put(index, _varying(index))]
    assert 0 < len(kept) < SAMPLES
    np.testing.assert_array_equal(np.flatnonzero(pool.ready(np.arange(SAMPLES))), kept)
    for index in kept:
        assert pool.sample(index)[1] == _varying(index)[1]


def _fitting_pool(folder, spare=0):
    """A pool whose heap holds all samples, and not a byte more than that and `spare`."""
    contents = sum(
        len(component.encoded(np.asarray(array)))
        for index in range(SAMPLES)
        for component, array in zip(
            Layout.of(VARYING, [[0], [], [], [0]]).components, _varying(index), strict=True
        )
        if component.varies
    )
    return _varying_pool(folder, heap_bytes=contents + spare)


def _fill_all(pool, order):
    return sum(pool.put(index, _varying(index)) for index in order) == len(order)


def _check_varying(pool, samples):
    assert pool.torn(samples, again=True).size == 0
    for index in samples:
        for array, expected in zip(pool.sample(index), _varying(index), strict=True):
            np.testing.assert_array_equal(array, expected)


def test_what_is_cleared_leaves_room(tmp_path):
    """In whatever order samples come back, and for who else has it open, too."""
    pool, other = _fitting_pool(tmp_path), _fitting_pool(tmp_path)
    everything = np.arange(SAMPLES)
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(SAMPLES)
        assert _fill_all(other if seed % 2 else pool, order)
        assert pool._heap.used == pool._heap.capacity
        _check_varying(other, everything)
        (pool if seed % 2 else other).clear()
        assert (pool.filled, other.filled) == (0, 0)


def test_what_heals_leaves_room(tmp_path):
    """Also if it is not known any more where their bytes were."""
    pool, other = _fitting_pool(tmp_path), _fitting_pool(tmp_path)
    assert _fill_all(pool, range(SAMPLES))
    for step in range(60):
        torn = step * 7 % SAMPLES
        pool._columns[1][torn, step % 2] += [1, -1, 2**40, -(2**40)][step % 4]
        assert other.torn(np.arange(SAMPLES), again=True).tolist() == [torn]
        assert other.put(torn, _varying(torn))
        _check_varying(pool, np.arange(SAMPLES))


def test_lengths_that_change_leave_no_gap_for_good(tmp_path):
    """What draws at random has other lengths each time."""
    layout = Layout.of([np.array(b"", object)])
    pool = Pool(
        tmp_path,
        lambda: Plan(layout=layout, part=KeptSamples(samples=20, slots=20), heap_bytes=2000),
    )
    draw = np.random.default_rng(0)
    held = {}
    for step in range(1500):
        sample, text = int(draw.integers(20)), draw.bytes(int(draw.integers(1, 150)))
        kept = pool.put(sample, [np.array(text, object)])
        held.pop(sample, None)
        if kept:
            held[sample] = text
        elif sum(map(len, held.values())) + len(text) <= 2000:
            # Room enough, but in pieces.
            assert not gaps(pool._extents(), 2000, len(text) + 8)
        if step % 100 == 0:
            pool.clear()
            held = {}
        assert {n: pool.sample(n)[0][()] for n in held} == held
        assert pool.filled == len(held)


def test_readers_of_what_is_cleared_and_made_anew(tmp_path):
    """They find a sample as it was written, or none: never bytes of others that took its place."""
    pool, other = _fitting_pool(tmp_path), _fitting_pool(tmp_path)
    assert _fill_all(pool, range(SAMPLES))
    ends, wrong, found = threading.Event(), [], [0]

    def read():
        while not ends.is_set():
            for index in range(SAMPLES):
                if (arrays := other.sample(index)) is not None:
                    found[0] += 1
                    if any(
                        not np.array_equal(*pair)
                        for pair in zip(arrays, _varying(index), strict=True)
                    ):
                        wrong.append(index)

    reader = threading.Thread(target=read)
    reader.start()
    for seed in range(15):
        pool.clear()
        assert _fill_all(pool, np.random.default_rng(seed).permutation(SAMPLES))
    ends.set()
    reader.join()
    assert found[0]
    assert wrong == []


@pytest.mark.parametrize("end", [0, 16, 10**9, -5])
def test_a_heap_after_a_loss_of_power(tmp_path, end):
    """The first process after it believes nothing of where the heap ended, which may be older than samples."""
    with contextlib.closing(_fitting_pool(tmp_path, spare=60)) as pool:
        assert _fill_all(pool, range(SAMPLES - 1))
        pool._heap._state[:3] = end
    with contextlib.closing(_fitting_pool(tmp_path)) as pool:
        assert pool.put(SAMPLES - 1, _varying(SAMPLES - 1))
        _check_varying(pool, np.arange(SAMPLES))


def test_a_heap_after_a_loss_of_power_that_others_have_open(tmp_path):
    """Whoever adds first in this boot is told so by the heap, and not by who has the pool open."""
    with contextlib.closing(_fitting_pool(tmp_path, spare=60)) as pool:
        assert _fill_all(pool, range(SAMPLES - 1))
        pool._heap._state[:3] = 0, 10**9, 10**9
        pool._heap._state[heap.BOOT] += 1
        with contextlib.closing(_fitting_pool(tmp_path)) as other:
            assert not other._folder.first
            assert other.put(SAMPLES - 1, _varying(SAMPLES - 1))
            _check_varying(other, np.arange(SAMPLES))


def test_pools_from_before_heaps_knew_their_boot(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_module, "STATE_BYTES", 8 * heap.BOOT)
    with contextlib.closing(_fitting_pool(tmp_path)) as pool:
        assert _fill_all(pool, range(SAMPLES))
    monkeypatch.undo()
    with contextlib.closing(_fitting_pool(tmp_path)) as pool:
        pool.clear()
        assert _fill_all(pool, range(SAMPLES))
    with contextlib.closing(existing(tmp_path)) as pool:
        _check_varying(pool, np.arange(SAMPLES))


def test_a_batch_that_another_process_clears_is_made_again(tmp_path):
    pool = _varying_pool(tmp_path)
    everything = np.arange(4)
    made = []

    class Below:
        stream = None

        def samples(self, indices):
            made.append(indices.tolist())
            return [_varying(index) for index in indices]

    assert _fill_all(pool, everything)
    pool._words[2:4] = 0
    assert pool.gather(everything) is None
    put = pool.put
    pool.put = lambda index, arrays: index != 3 and put(index, arrays)
    found = PoolLevel(pool, Below(), "first", Counts()).collect(everything, {0: _varying(0)})
    assert made == [[2, 3]]
    for index in everything:
        np.testing.assert_array_equal(found[index][0], _varying(index)[0])


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {0: np.zeros((5, 4), "uint8")},
            r"uint8\[5, 4\] for component 0 of sample 3.*has uint8\[5, 3\]",
        ),
        ({1: np.float64(0)}, r"float64\[\] for component 1 of sample 3.*has float32\[\]"),
    ],
)
def test_samples_of_another_layout(tmp_path, changed, text):
    arrays = [changed.get(place, array) for place, array in enumerate(f(3))]
    with pytest.raises(
        ValueError, match=rf"All samples must have the same shapes and types. Received: {text}"
    ):
        _pool(tmp_path).put(3, arrays)
    with pytest.raises(
        ValueError, match=r"as many components. Received: 1 for sample 3, where .* has 4"
    ):
        _pool(tmp_path).put(3, f(3)[:1])


def test_dates_are_not_for_pools():
    with pytest.raises(
        ValueError, match=r"Samples are numbers or bytes. Received: datetime64.* for component 0"
    ):
        Layout.of([np.datetime64("2026-11-22")])


def test_layouts_survive_json():
    assert Layout.from_dict(json.loads(json.dumps(LAYOUT.to_dict()))) == LAYOUT


@pytest.mark.parametrize("shape", [(), (3,), (63,), (64, 65), (100, 100, 3)])
@pytest.mark.parametrize("dtype", ["uint8", "float64"])
@pytest.mark.parametrize("compiled", [True, False])
def test_records_are_gathered_at_any_address(shape, dtype, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(native, "_compiled", lambda: None)
    records = np.random.default_rng(0).integers(0, 256, (17, *shape)).astype(dtype)
    places = np.random.default_rng(1).integers(0, 17, 9)
    raw = np.full(9 * records[0].nbytes + 128, 7, np.uint8)
    for begin in (0, 1, 8, 63):
        into = np.ndarray((9, *shape), dtype, raw, begin)
        native.gather(records, places, into)
        np.testing.assert_array_equal(into, records[places])
        assert (raw[:begin] == 7).all()
        assert (raw[begin + into.nbytes :] == 7).all()
        raw[:] = 7
    native.gather(records, places[:0], into[:0])
    native.gather(records, places, None)
    if compiled:
        with pytest.raises(IndexError, match=r"`places` must be in 0..16. Received: 17..17"):
            native.gather(records, np.array([17]), into[:1])


def _within_a_claim(pool, act):
    with pool.claim(np.array([3])):
        act()


def _within_a_claim_of_everything(pool, act):
    with pool.claim_all():
        act()


def _while_the_heap_grows(pool, act):
    heap.reserve = lambda *_: act()
    pool.put(3, _varying(3))


def _while_a_pool_is_made(pool, act):
    Pool(pool.folder.with_name("another"), act)


HOLDS = [
    _within_a_claim,
    _within_a_claim_of_everything,
    _while_the_heap_grows,
    _while_a_pool_is_made,
]


def _hold_and_fork(folder, hold, forked):
    """Forks a child that says its number and lives on, and waits to be killed, while it holds something."""

    def fork():
        if not os.fork():
            forked.send(os.getpid())
        signal.pause()

    hold(_varying_pool(folder / "pool"), fork)


@pytest.mark.parametrize("hold", HOLDS)
def test_claims_end_with_the_filler_whose_forked_child_lives_on(tmp_path, hold):
    pool = _varying_pool(tmp_path / "pool")
    context = multiprocessing.get_context("spawn")
    forked, end = context.Pipe()
    filler = context.Process(target=_hold_and_fork, args=(tmp_path, hold, end))
    filler.start()
    child = forked.recv()
    try:
        filler.kill()
        filler.join()
        with pool.claim(np.array([3])) as mine, pool.claim_all() as everything:
            assert (mine.tolist(), everything) == ([3], True)
            # These would not end if the child held what its parent did.
            assert pool.put(3, _varying(3))
        assert _varying_pool(tmp_path / "another").filled == 0
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


# JAX, which tests against optax import, warns of any fork; this child calls nothing of it.
@pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning")
def test_a_claim_is_held_while_a_forked_child_begins_and_ends(tmp_path):
    pool, other = _pool(tmp_path), _pool(tmp_path)
    with pool.claim(np.array([3])):
        child = multiprocessing.get_context("fork").Process(target=_claimed, args=(other, 4))
        child.start()
        child.join()
        assert child.exitcode == 0
        with other.claim(np.array([3])) as theirs:
            assert not theirs.size


@pytest.mark.parametrize("at_a_time", [0, 1, 2])
@pytest.mark.parametrize("size", [0, 1, 15, 16, 31, 33, 63, 64, 65, 127, 129, 255, 256, 300, 4099])
def test_checksums_are_those_of_zlib_at_any_address(size, at_a_time, monkeypatch):
    if at_a_time > native._parts_at_a_time():
        pytest.skip("This processor does not multiply so many parts.")
    monkeypatch.setattr(native, "_parts_at_a_time", lambda: at_a_time)
    records = np.random.default_rng(size).integers(0, 256, (17, size)).astype("uint8")
    places, before = np.array([3, 16, 0, 3]), np.array([0, 1, 2**32 - 1, 77], np.uint32)
    expected = [zlib.crc32(records[p].data, int(b)) for p, b in zip(places, before, strict=True)]
    raw = np.full(4 * size + 128, 7, np.uint8)
    for begin in (0, 1, 8, 31, 63):
        into, checksums = np.ndarray((4, size), np.uint8, raw, begin), before.copy()
        native.gather(records, places, into, checksums)
        assert checksums.tolist() == expected
        np.testing.assert_array_equal(into, records[places])
        assert (raw[:begin] == 7).all()
        assert (raw[begin + into.nbytes :] == 7).all()
        raw[:] = 7
        checksums = before.copy()
        native.gather(records, places, None, checksums)
        assert checksums.tolist() == expected


def test_words_are_marked_where_nobody_else_has_been():
    words, places = np.array([0, 1, 2, 3, 4 + 128], np.uint64), np.array([1, 2, 3, 4])
    seen, agrees = np.array([1, 9, 3, 4 + 64], np.uint64), np.array([True, True, False, True])
    assert native.mark(words, places, seen, agrees, np.uint64(63), np.uint64(2**63)).tolist() == [
        True,
        False,
        True,
        True,
    ]
    assert words.tolist() == [0, 2**63 + 1, 2, 0, 2**63 + 4]


@pytest.mark.parametrize("look", ["gather_whole", "torn"])
@pytest.mark.parametrize("compiled", [True, False])
def test_checksums_are_looked_at_once_per_boot_and_not_by_who_wrote(
    tmp_path, monkeypatch, look, compiled
):
    if not compiled:
        monkeypatch.setattr(native, "_compiled", lambda: None)
        monkeypatch.setattr(native, "_parts_at_a_time", lambda: 0)
    everything = np.arange(SAMPLES)
    looked_at = []
    gather = native.gather
    monkeypatch.setattr(
        pool_module, "gather", lambda r, p, i, c=None: looked_at.append(c) or gather(r, p, i, c)
    )

    def looks(pool, **again):
        """Whether it looks at checksums, none of which is wrong."""
        looked_at.clear()
        found = getattr(pool, look)(everything, **again)
        assert not (found[1] if look == "gather_whole" else found).size
        return any(checksums is not None and len(checksums) for checksums in looked_at)

    writer = _pool(tmp_path)
    for index in everything:
        writer.put(index, f(index))
    assert not looks(writer)
    # Without the library, each process looks by itself.
    assert [looks(_pool(tmp_path)) for _ in range(3)] == [True, not compiled, not compiled]
    assert looks(writer, again=True)
    writer.put(3, f(3))
    assert looks(_pool(tmp_path))
    monkeypatch.setattr(pool_module, "boot_number", lambda: np.uint64(5))
    assert [looks(_pool(tmp_path)) for _ in range(2)] == [True, not compiled]


def test_torn_samples_are_found_beside_the_copy(tmp_path):
    pool = _pool(tmp_path)
    for index in range(SAMPLES):
        pool.put(index, f(index))
    pool._columns[1][7] += 1
    reader = _pool(tmp_path)
    order = np.random.default_rng(0).permutation(SAMPLES)
    assert reader.gather_whole(order)[1].tolist() == [7]
    assert not reader.ready(np.array([7]))[0]
    reader.put(7, f(7))
    arrays, torn = reader.gather_whole(order, again=True)
    assert not torn.size
    for got, expected in zip(arrays, pool.gather(order), strict=True):
        np.testing.assert_array_equal(got, expected)
    pool._columns[1][8] += 1
    assert _pool(tmp_path).torn(order).size == 0, "in this boot somebody has looked at it"
    assert _pool(tmp_path).torn(order, again=True).tolist() == [8]
    assert pool.copies(order)
    assert not _varying_pool(tmp_path / "varying").copies(order)


@pytest.mark.parametrize("look", ["gather_whole", "torn"])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("act", ["clear", "rewrite"])
def test_what_changes_while_it_is_looked_at_is_not_torn(tmp_path, monkeypatch, look, compiled, act):
    """It is as its writer left it, and a batch with it is not taken."""
    if not compiled:
        monkeypatch.setattr(native, "_compiled", lambda: None)
        monkeypatch.setattr(native, "_parts_at_a_time", lambda: 0)
    writer, everything = _pool(tmp_path), np.arange(SAMPLES)
    for index in everything:
        writer.put(index, f(index))
    reader, changes = _pool(tmp_path), iter([True])

    def meanwhile(records, places, into, checksums=None):
        if next(changes, False):
            writer._words[3] = 0
            if act == "rewrite":
                writer.put(3, f(4))
        native.gather(records, places, into, checksums)

    monkeypatch.setattr(pool_module, "gather", meanwhile)
    found = getattr(reader, look)(everything, again=True)
    if look == "gather_whole":
        assert found[0] is None
        found = found[1]
    assert not found.size
    assert reader.ready(everything)[3] == (act == "rewrite")
    assert not reader.torn(everything[reader.ready(everything)], again=True).size


def test_known_samples_that_are_cleared_while_they_are_copied(tmp_path, monkeypatch):
    pool, other, everything = _pool(tmp_path), _pool(tmp_path), np.arange(SAMPLES)
    for index in everything:
        pool.put(index, f(index))
    monkeypatch.setattr(
        pool_module, "gather", lambda *given: (native.gather(*given), other.clear())
    )
    arrays, torn = pool.gather_whole(everything)
    assert arrays is None
    assert not torn.size


@pytest.mark.parametrize("compiled", [True, False])
def test_what_was_written_since_a_look_stays(tmp_path, monkeypatch, compiled):
    """Between the look at a torn sample and the word that says so."""
    if not compiled:
        monkeypatch.setattr(native, "_compiled", lambda: None)
    pool = _pool(tmp_path)
    pool.put(3, f(3))
    old = pool._words[[3]]
    pool.put(3, f(4))
    agrees = np.array([False])
    assert not pool._judge(np.array([3]), old, agrees)[0]
    assert pool.ready(np.array([3]))[0]
    assert pool._judge(np.array([3]), pool._words[[3]], agrees)[0]
    assert not pool.ready(np.array([3]))[0]


def test_words_are_shifted_by_numbers_of_their_own_type():
    """NumPy 1 makes no integer of an unsigned one and Python's."""
    assert type(pool_module.LOOKED_AT) is type(pool_module.WRITTEN) is np.uint64


@pytest.mark.parametrize("filled", [SAMPLES - 1, SAMPLES])
def test_a_warm_pool_in_memory_is_mapped_ahead(filled):
    """What the kernel says of the mapping: all of it is there before anybody reads."""
    with _large_pools(filled) as pools:
        assert (_resident_kb(pools[1]._columns[0].ctypes.data) * 1024 >= 100_000 * SAMPLES) == (
            filled == SAMPLES
        )


@pytest.mark.parametrize("look", [True, False])
def test_checksums_are_looked_at_ahead_and_what_is_torn_is_left_to_its_reader(look, monkeypatch):
    monkeypatch.setattr(pool_module, "AT_ONCE", 300_000)
    with _large_pools(SAMPLES, look, torn=5) as pools:
        looked_at = pools[1]._words >> pool_module.LOOKED_AT == pools[1]._boot
        assert np.flatnonzero(~looked_at).tolist() == ([5] if look else list(range(SAMPLES)))
        assert pools[1].ready(np.arange(SAMPLES)).all()
        assert pools[1].gather_whole(np.arange(SAMPLES))[1].tolist() == [5]


def test_a_look_ahead_waits_while_somebody_reads(monkeypatch):
    monkeypatch.setattr(pool_module, "AT_ONCE", 300_000)
    with _large_pools(SAMPLES, look=False) as (_, pool):
        steps, counts = pool._looks(), []
        for reads in (False, True, False):
            if reads:
                pool.gather_whole(np.zeros(1, int))
            next(steps)
            counts.append(np.count_nonzero(pool._words[1:] >> pool_module.LOOKED_AT == pool._boot))
        assert 0 < counts[0] == counts[1] < counts[2]


@contextlib.contextmanager
def _large_pools(filled, look=True, torn=None):
    """A pool in memory, and the same opened by another, who has got ready."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        layout = Layout.of([np.zeros(100_000, "uint8")])
        pools = [
            Pool(
                Path(folder),
                lambda: Plan(layout=layout, part=KeptSamples(samples=SAMPLES, slots=SAMPLES)),
            )
        ]
        for index in range(filled):
            pools[0].put(index, [np.full(100_000, index, "uint8")])
        if torn is not None:
            pools[0]._columns[0][torn] += 1
        pools.append(Pool(Path(folder), lambda: pools[0].plan))
        pools[1].get_ready(look)
        if pools[1]._ahead is not None:
            pools[1]._ahead.join()
        yield pools
        for pool in pools:
            pool.close()


def _resident_kb(address):
    """Of the mapping that begins there."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(f"{address:x}-"))
    return int(next(line for line in lines if line.startswith("Rss:")).split()[1])

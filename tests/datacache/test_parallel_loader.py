"""Tests `ParallelLoader`: the order of its batches, its errors, and the end of its process."""

import functools
import gc
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from datacache.loading.parallel_loader import CropAndMirror, LoaderError, ParallelLoader

LIMIT_S = 300
MODES = {"train": 1, "validate": -1}


def load(mode, item):
    """Returns a batch with another shape, dtype and structure for each item."""
    draw = np.random.default_rng(item)
    images = MODES[mode] * draw.normal(size=(1 + item % 5, 3, 1 + 7 * item))
    labels = np.full(item % 3, item, ("uint8", ">i4", "float16", "bool", "complex64")[item % 5])
    texts = np.array([mode.encode(), b"x" * item])
    several = [images.T, labels[::-1], np.float32(item), texts]
    return (several, tuple(several), images, np.array(item), [])[item % 5]


def in_columns(mode, item):
    """Returns images and labels in which each value is the item."""
    return np.full([3, 1], item, "float32"), np.full([3, 1], item, "float32")


def same_size(mode, item):
    return np.full(1000, MODES[mode] * item)


def fails(mode, item):
    if item == "object":
        return np.array([mode, None])
    if item == "exit":
        sys.exit(7)
    return np.array(100 // item)


def about_itself(mode, item):
    """Returns this process's ID, whether it has imported TensorFlow, and its open files."""
    links = [
        os.readlink(f"/proc/self/fd/{name}")
        for name in os.listdir("/proc/self/fd")
        if not _is_gone(name)
    ]
    return np.array(os.getpid()), np.array("tensorflow" in sys.modules), np.array(links)


def _is_gone(name):
    return not os.path.lexists(f"/proc/self/fd/{name}")


def leaves_traces(folder, mode, item):
    """Creates files when it begins and when it finishes an item."""
    (folder / f"begun {mode} {item}").touch()
    if item == "forever":
        (folder / "pid").write_text(str(os.getpid()))
        threading.Event().wait()
    (folder / f"done {mode} {item}").touch()
    return np.full(9, item)


def _until(condition):
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "the condition was never met"
        time.sleep(0.005)


def _assert_same(batch, expected):
    assert type(batch) is type(expected)
    if not isinstance(batch, np.ndarray):
        assert len(batch) == len(expected)
        for one, other in zip(batch, expected, strict=True):
            _assert_same(one, np.asarray(other))
    else:
        assert batch.dtype == expected.dtype
        np.testing.assert_array_equal(batch, expected, strict=True)


@pytest.fixture(scope="module", params=[2, 3])
def loader(request):
    with ParallelLoader(load, buffers=request.param) as loader:
        yield loader


@pytest.mark.parametrize("mode", MODES)
def test_batches_are_those_of_load(loader, mode):
    items = [int(item) for item in np.random.default_rng(0).permutation(60)]
    received = 0
    for item, batch in zip(items, loader.batches(mode, items), strict=True):
        _assert_same(batch, load(mode, item))
        received += 1
    assert received == 60
    assert list(loader.batches(mode, [])) == []


@pytest.mark.parametrize("leave_after", [0, 1, 2, 5])
def test_a_new_pass_yields_no_batches_of_the_previous_pass(loader, leave_after):
    for first, second in itertools.permutations(MODES):
        training = loader.batches(first, itertools.count())
        for item in range(leave_after):
            _assert_same(next(training), load(first, item))
        for item, batch in zip(range(3, 9), loader.batches(second, range(3, 9)), strict=True):
            _assert_same(batch, load(second, item))
        training.close()


def test_a_second_pass_ends_the_first_pass(loader):
    training, validation = (loader.batches(mode, range(9)) for mode in MODES)
    next(training)
    next(validation)
    with pytest.raises(
        RuntimeError, match=r"A batch must belong to the current pass. Received: .*second Parallel"
    ):
        next(training)
    _assert_same(next(validation), load("validate", 1))


@pytest.mark.parametrize("buffers", [2, 3])
def test_the_loader_reads_ahead_while_the_last_batch_stays_valid(tmp_path, buffers):
    taken = []
    items = (taken.append(item) or item for item in itertools.count())
    with ParallelLoader(functools.partial(leaves_traces, tmp_path), buffers) as loader:
        for item, batch in zip(range(5), loader.batches("train", items), strict=False):
            ahead = item + buffers - 1
            _until((tmp_path / f"done train {ahead}").exists)
            assert taken == list(range(ahead + 1)), "the loader must not read further ahead"
            assert not (tmp_path / f"begun train {ahead + 1}").exists()
            assert batch.tolist() == [item] * 9


@pytest.mark.parametrize("buffers", [2, 3])
def test_views_share_the_buffers_in_turn(buffers):
    with ParallelLoader(same_size, buffers, views=True) as loader:
        batches = list(loader.batches("train", range(7)))
    for (place, one), (other_place, other) in itertools.combinations(enumerate(batches), 2):
        assert np.shares_memory(one, other) == ((place - other_place) % buffers == 0)
    assert [batch[0] for batch in batches[-buffers:]] == list(range(7 - buffers, 7)), (
        "views must remain valid after `stop`"
    )


@pytest.mark.parametrize("buffers", [2, 3])
def test_batches_can_be_retained_prefetched_and_trained_on(buffers):
    # Import here, because loader processes import this module and must start fast.
    import keras
    import tensorflow as tf

    items = list(range(7))
    seen = []

    class Seen(keras.layers.Layer):
        def call(self, x):
            tf.py_function(lambda batch: seen.append(int(batch[0, 0])), [x], [])
            return x

    model = keras.Sequential([keras.Input((1,)), Seen(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with ParallelLoader(in_columns, buffers) as loader:
        kept = list(loader.batches("train", items))
        generated = tf.data.Dataset.from_generator(
            lambda: loader.batches("train", items),
            output_signature=(tf.TensorSpec([3, 1]), tf.TensorSpec([3, 1])),
        ).prefetch(2)
        ahead = [int(x[0, 0]) for x, _ in generated]
        batches = loader.batches("train", items)
        model.fit(batches, steps_per_epoch=len(items), shuffle=False, verbose=0)
    assert [int(x[0, 0]) for x, _ in kept] == ahead == seen == items
    assert all((x == y).all() for x, y in kept)


def test_a_load_function_under_the_main_guard_is_refused(tmp_path):
    (tmp_path / "trains.py").write_text(
        "import datacache\n"
        'if __name__ == "__main__":\n'
        "    def load(mode, item): return item\n"
        "    next(datacache.ParallelLoader(load).batches('train', [0]))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, tmp_path / "trains.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search(
        r"LoaderError: `load` must be importable in another process. Received: AttributeError: "
        r"Can't get attribute 'load'.*Define it at the top level",
        done.stderr,
    )


def test_errors_are_raised_and_the_loader_continues():
    with ParallelLoader(fails) as loader:
        batches = loader.batches("train", [10, 0, 20])
        assert next(batches) == 10
        with pytest.raises(
            LoaderError, match=r"Received: ZeroDivisionError.* for mode='train', item=0. .*omit"
        ) as got:
            next(batches)
        assert "in fails" in got.value.__notes__[0]
        assert list(batches) == []
        child = loader._child
        for item, text in (
            ("object", "without objects. Received: ndarray of object"),
            ("x", "TypeError"),
        ):
            with pytest.raises(LoaderError, match=rf"{text}.*item='{item}'"):
                next(loader.batches("validate", [item]))
        assert next(loader.batches("train", [20])) == 5
        assert loader._child is child
        with pytest.raises(
            LoaderError, match=r"exit code 7, before the batch of mode='train', item='exit'"
        ):
            next(loader.batches("train", ["exit"]))
        assert next(loader.batches("train", [20])) == 5


def test_batches_that_cannot_be_sent_are_refused():
    with pytest.raises(
        ValueError,
        match=r"`buffers` must be an integer >= 2.*buffers=1. .*call `load`",
    ):
        ParallelLoader(load, buffers=1)
    with pytest.raises(
        TypeError, match=r"`load` must be picklable. Received: <function .*top level"
    ):
        ParallelLoader(lambda mode, item: None).start()
    with (
        ParallelLoader(same_size) as loader,
        pytest.raises(TypeError, match=r"Items must be picklable. Received: item=<unlocked"),
    ):
        next(loader.batches("train", [threading.Lock()]))


@pytest.mark.slow
def test_a_killed_loader_raises_an_error_and_restarts():
    loader = ParallelLoader(about_itself)
    loader.start()
    loader.stop()
    # Close files that earlier tests left to the garbage collector, as they would be counted.
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    pids = set()
    for _ in range(2):
        batches = loader.batches("train", itertools.count())
        pids.add(pid := int(next(batches)[0]))
        os.kill(pid, signal.SIGINT)
        assert next(batches)[0] == pid, "the loader process must ignore SIGINT"
        assert loader._child._connection.poll(LIMIT_S)
        os.kill(pid, signal.SIGKILL)
        _until(lambda: not loader._child.alive)
        with pytest.raises(
            LoaderError, match=r"exit code -9, before .*item=2. .*memory ran out.*starts a new"
        ):
            next(batches)
    loader.start()
    pids.add(pid := int(next(loader.batches("train", [0]))[0]))
    os.kill(pid, signal.SIGKILL)
    _until(lambda: not loader._child.alive)
    pids.add(int(next(loader.batches("train", [0]))[0]))
    assert len(pids) == 4
    for _ in range(2):
        loader.stop()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_loader_uses_no_named_shared_memory_and_no_tensorflow():
    with ParallelLoader(about_itself) as loader:
        _, tensorflow, links = list(loader.batches("train", range(3)))[-1]
        assert not tensorflow
        assert any(link.startswith("/memfd:datacache") for link in links)
        ours = Path("/proc/self/maps").read_text().splitlines()
        assert any("/memfd:datacache" in line for line in ours)
        assert not [link for link in links if link.startswith("/dev/shm")]


def test_stop_ends_a_busy_loader_process(tmp_path):
    with ParallelLoader(functools.partial(leaves_traces, tmp_path)) as loader:
        batches = loader.batches("train", [1, "forever", 2])
        batch = next(batches)
        _until((tmp_path / "begun train forever").exists)
    assert batch.tolist() == [1] * 9
    assert _ended(int((tmp_path / "pid").read_text()))
    with pytest.raises(RuntimeError, match="a pass that `stop` or another pass has ended"):
        next(batches)
    assert next(loader.batches("train", [5])).tolist() == [5] * 9
    loader.stop()


TRAINS = """
import functools, os, pathlib, sys, time
from tests.datacache.test_parallel_loader import ParallelLoader, about_itself, leaves_traces
if __name__ == "__main__":
    idle = ParallelLoader(about_itself)
    busy = ParallelLoader(functools.partial(leaves_traces, pathlib.Path(sys.argv[1])))
    pid = next(idle.batches("train", [0]))[0]
    next(busy.batches("train", [0, "forever"]))
    fork = os.fork()
    if fork:
        print(pid, fork, flush=True)
    time.sleep(1000)
"""


@pytest.mark.slow
def test_loaders_end_with_a_killed_training_process(tmp_path):
    (tmp_path / "trains.py").write_text(TRAINS)
    root = Path(__file__).parents[2]
    command = [sys.executable, str(tmp_path / "trains.py"), str(tmp_path)]
    with subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(root)}, stdout=subprocess.PIPE
    ) as process:
        idle, fork = map(int, process.stdout.readline().split())
        _until((tmp_path / "begun train forever").exists)
        _until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        busy = int((tmp_path / "pid").read_text())
        assert not _ended(idle)
        assert not _ended(busy)
        process.kill()
    try:
        _until(lambda: _ended(idle) and _ended(busy))
        assert not _ended(fork), "loaders must end although a forked child holds their pipes open"
    finally:
        os.kill(fork, signal.SIGKILL)


def test_a_script_without_a_main_guard_is_named(tmp_path):
    (tmp_path / "trains.py").write_text(
        "from tests.datacache.test_parallel_loader import ParallelLoader, load\n"
        "next(ParallelLoader(load).batches('train', [0]))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, tmp_path / "trains.py"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert (
        "exit code 1, before the batch of mode='train', item=0. The process has printed the cause"
        in done.stderr
    )
    assert 'must start its work under `if __name__ == "__main__":`' in done.stderr


def _ended(pid):
    """Returns whether a process has ended; a zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


IMAGES = np.random.default_rng(0).integers(0, 256, (8, 9, 7, 3)).astype("uint8")


@pytest.mark.parametrize("mean", [IMAGES.mean(0), [1.0, 2.0, 3.0]], ids=["image", "channels"])
@pytest.mark.parametrize("size", [1, 4, 7])
def test_crops_are_parts_of_the_images_minus_the_mean(mean, size):
    prepare = CropAndMirror(mean, size, seed=3)
    whole = IMAGES - np.asarray(mean, "float32")
    tops, lefts = 10 - size, 8 - size
    seen = set()
    for number in range(20):
        batch = prepare(IMAGES, "train", number)
        assert batch.dtype == np.float32
        np.testing.assert_array_equal(
            batch, CropAndMirror(mean, size, seed=3)(IMAGES, "train", number)
        )
        for image, got in zip(whole, batch, strict=True):
            found = {
                (top, left, step)
                for top, left, step in itertools.product(range(tops), range(lefts), (1, -1))
                if np.array_equal(image[top : top + size, left : left + size][:, ::step], got)
            }
            assert found
            seen |= found
    assert len(seen) > tops * lefts, "crops must cover most positions, and be mirrored"
    top, left = (9 - size) // 2, (7 - size) // 2
    expected = whole[:, top : top + size, left : left + size]
    np.testing.assert_array_equal(prepare(IMAGES, "validate", 0), expected)


def test_crops_depend_on_the_number_of_the_batch_and_the_seed():
    prepare = CropAndMirror([0.0] * 3, 4)
    batches = [prepare(IMAGES, "train", number) for number in (0, 1)] + [
        CropAndMirror([0] * 3, 4, 1)(IMAGES, "train", 0)
    ]
    assert all((one != other).any() for one, other in itertools.combinations(batches, 2))


def test_images_are_prepared_in_the_loader_process():
    prepare = CropAndMirror(IMAGES.mean(0), 4)
    expected = [prepare(IMAGES, mode, 2) for mode in MODES]
    with ParallelLoader(functools.partial(_prepared, prepare)) as loader:
        for mode, batch in zip(MODES, expected, strict=True):
            np.testing.assert_array_equal(next(loader.batches(mode, [2])), batch)


def _prepared(prepare, mode, item):
    return prepare(IMAGES, mode, item)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: CropAndMirror([[0.0]], 4),
            r"`mean` must be of shape \[h, w, c\] or \[c\]. Received: .*\[1, 1\]",
        ),
        (lambda: CropAndMirror([0.0], 0), "`size` must be an integer >= 1. Received: size=0"),
        (
            lambda: CropAndMirror([0.0], 1, -1),
            "`seed` must be an integer >= 0.*seed=-1",
        ),
        (
            lambda: CropAndMirror([0.0], 1)(IMAGES, "train", 0),
            r"mean of shape \[1\], images of shape \[8, 9, 7, 3\]",
        ),
        (
            lambda: CropAndMirror([0.0] * 3, 8)(IMAGES, "train", 0),
            r"at least `size`.*Received: size=8.*7, 3\]",
        ),
        (
            lambda: CropAndMirror([0.0] * 3, 1)(IMAGES[0], "train", 0),
            r"shape \[n, h, w, c\].* \[9, 7, 3\]",
        ),
        (
            lambda: CropAndMirror([0.0] * 3, 1)(IMAGES, "train", -1),
            "`number` must be an integer >= 0. .*number=-1",
        ),
    ],
)
def test_invalid_preparations_are_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call()

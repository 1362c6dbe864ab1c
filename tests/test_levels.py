"""Levels under faults: whatever is killed, torn or full, every sample is f(its number), and nobody has to clean up."""

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from datacache.filling import Filling
from datacache.layout import Layout
from datacache.levels import Levels
from datacache.part import Part
from datacache.pool import Plan, Pool
from datacache.statistics import Counts
from datacache.stored import Stored
from datacache.windows import IN_FLIGHT, WINDOW

SAMPLES = 300
SPAWN = multiprocessing.get_context("spawn")


def f(index):
    """The cached sample of that number."""
    draw = np.random.default_rng(index)
    return [draw.integers(0, 256, (6, 5)).astype("uint8"), np.array(index), np.array(draw.bytes(index % 40), object)]


class Source:
    """Stored samples are texts, and each read leaves a byte in a log that all processes share."""

    identity, signature = "test", ()

    def __init__(self, log):
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __len__(self):
        return SAMPLES

    def name(self, sample):
        return f"number {sample}"

    def decode(self, *stored):
        raise NotImplementedError("These levels have a function in NumPy.")

    def read(self, sample):
        os.write(self._log, b"x")
        return [np.array(str(sample).encode(), object)]


def make(stored, samples):
    """From stored samples to cached ones."""
    assert len(samples) == len(stored)
    return [f(int(components[0][()])) for components in stored]


def open_levels(folder, source=None, slots=SAMPLES, heap_bytes=10**6, lower=True):
    """Memory, and below it decoded and stored samples on a disk."""
    part = Part(samples=SAMPLES, slots=slots)
    layout = Layout.of(f(0))
    filling = Filling("first", Counts())
    text = Layout.of([np.array(b"", object)])
    whole = Part(samples=SAMPLES, slots=SAMPLES)
    stored = Pool(folder / "stored", lambda: Plan(layout=text, part=whole, heap_bytes=10**6)) if lower else None
    decoded = Pool(folder / "decoded", lambda: Plan(layout=layout, part=whole, heap_bytes=10**6)) if lower else None
    memory = Pool(folder / "memory", lambda: Plan(layout=layout, part=part, heap_bytes=heap_bytes))
    return Levels(Stored(source or Source(folder / "log"), stored, filling), make, layout, memory, decoded, filling)


def check_epoch(levels, seed):
    """Reads every sample once, in batches, and looks at each."""
    for numbers in np.array_split(np.random.default_rng(seed).permutation(SAMPLES), 23):
        pixels, index, texts = levels.batch(numbers)
        for place, number in enumerate(numbers):
            expected = f(number)
            np.testing.assert_array_equal(pixels[place], expected[0])
            assert (index[place], texts[place]) == (expected[1], expected[2][()])


def _reads(folder):
    return (folder / "log").stat().st_size


def _epochs(folder, seed, epochs, began=None):
    levels = open_levels(folder)
    if began is not None:
        began.set()
    for epoch in epochs:
        check_epoch(levels, seed + epoch)


def test_kills_at_any_moment(tmp_path):
    """Kills of one of two jobs that fill and read the same pools: samples in flight are read again, no others."""
    draw, kills = np.random.default_rng(0), 10
    steady = SPAWN.Process(target=_epochs, args=(tmp_path, 1000, itertools.count()))
    for seed in range(kills):
        began = SPAWN.Event()
        victim = SPAWN.Process(target=_epochs, args=(tmp_path, seed, itertools.count(), began))
        victim.start()
        assert began.wait(30)
        time.sleep(draw.uniform(0, 0.04))
        victim.kill()
        victim.join()
        assert victim.exitcode == -signal.SIGKILL
        if seed == kills // 2:
            steady.start()
    steady.kill()
    steady.join()
    levels = open_levels(tmp_path)
    check_epoch(levels, 99)
    assert levels.counts.now().healed == 0
    assert SAMPLES <= _reads(tmp_path) <= SAMPLES + (kills + 1) * IN_FLIGHT * WINDOW
    levels.close()


def test_jobs_that_begin_at_once_read_everything_once(tmp_path):
    jobs = [SPAWN.Process(target=_epochs, args=(tmp_path, 10 * job, range(2))) for job in range(3)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert [job.exitcode for job in jobs] == [0, 0, 0]
    assert _reads(tmp_path) == SAMPLES


@pytest.mark.parametrize("level", ["memory", "decoded", "stored"])
def test_bits_that_flip_heal_from_the_level_below(tmp_path, level):
    levels = open_levels(tmp_path)
    check_epoch(levels, 0)
    levels.close()
    if level != "memory":
        for name in ("memory", "decoded")[: 1 + (level == "stored")]:
            _remove(tmp_path / name)
    for name, size in (("samples", 64), ("heap", 8)):
        with (tmp_path / level / name).open("r+b") as stream:
            stream.seek(size)
            byte = stream.read(1)
            stream.seek(size)
            stream.write(bytes([byte[0] ^ 255]))
    levels = open_levels(tmp_path)
    check_epoch(levels, 1)
    assert levels.counts.now().healed in (1, 2)
    assert _reads(tmp_path) == SAMPLES + (levels.counts.now().healed if level == "stored" else 0)
    levels.close()


def _remove(folder):
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


@pytest.mark.parametrize("slots", [1, 100, SAMPLES])
def test_little_room_is_used_and_the_rest_read_through(tmp_path, slots):
    levels = open_levels(tmp_path, slots=slots, heap_bytes=2000)
    for epoch in range(3):
        check_epoch(levels, epoch)
    stats = levels.counts.now()
    assert stats.unkept > 0
    assert stats.memory_hits == 2 * (3 * SAMPLES - stats.unkept) // 3
    assert _reads(tmp_path) == SAMPLES
    levels.close()


FULL = """
import sys, pathlib, logging
sys.path.insert(0, {root!r})
from tests.test_levels import *
folder = pathlib.Path({folder!r})
levels = open_levels(folder, Source({log!r}), heap_bytes=10**9, lower=False)
for epoch in range(3):
    check_epoch(levels, epoch)
print(levels.counts.now().unkept, levels.memory.filled)
"""


def test_a_full_disk_is_one_level_less(tmp_path):
    """A tmpfs with room for the columns, and not for all that differs in size."""
    root, disk = os.getcwd(), tmp_path / "disk"
    disk.mkdir()
    script = FULL.format(root=root, folder=str(disk), log=str(tmp_path / "log"))
    inside = f"mount -t tmpfs -o size=56k none {disk} && head -c 8k /dev/zero > {disk}/other && exec {sys.executable} -"
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", inside]
    done = subprocess.run(command, input=script, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    unkept, filled = map(int, done.stdout.split())
    assert unkept > 0
    assert filled < SAMPLES


def test_a_batch_that_stalls_holds_up_no_other(tmp_path):
    free = threading.Event()

    class Stalling(Source):
        def read(self, sample):
            assert sample != 5 or free.wait(30)
            return super().read(sample)

    levels = open_levels(tmp_path, Stalling(tmp_path / "log"))
    late = threading.Thread(target=levels.batch, args=(np.array([4, 5]),))
    late.start()
    others = np.array([number for number in range(SAMPLES) if number not in (4, 5)])
    assert levels.batch(others)[1].tolist() == others.tolist()
    assert late.is_alive()
    free.set()
    late.join()
    check_epoch(levels, 0)
    assert _reads(tmp_path) == SAMPLES
    levels.close()

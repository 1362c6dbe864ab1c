"""Under faults, each sample with index i equals f(i), and no process has to clean up."""

import functools
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf

from datacache.nodes.reader import Reader
from datacache.pool.pool import Pool
from datacache.pool.spec import Layout, PoolSpec, SampleShard
from datacache.statistics import Counts
from datacache.tiers.tier import PreprocessingTier, SourceTier, StoreTier
from tests.datacache.pools import section

SAMPLES, BATCHES = 300, 23
BATCH = -(-SAMPLES // BATCHES)
READ = np.dtype([("job", "int32"), ("sample", "int32")])
"""Record of a read in the log."""
JOBS = multiprocessing.get_context("forkserver")
"""Forks new processes from a server process that has imported TensorFlow and done nothing else."""
JOBS.set_forkserver_preload([__name__])
EVERY_EPOCH = range(sys.maxsize)
"""Replaces `itertools.count()`, which Python 3.14 cannot send to another process."""


def f(index):
    """Returns the cached sample with an index."""
    draw = np.random.default_rng(index)
    return [
        draw.integers(0, 256, (6, 5)).astype("uint8"),
        np.array(index),
        np.array(draw.bytes(index % 40), object),
    ]


class Source:
    """Source of texts that appends each read to a log that all processes share."""

    identity, signature = "test", [tf.TensorSpec([], tf.string)]

    def __init__(self, log):
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __len__(self):
        return SAMPLES

    def name(self, sample):
        return f"number {sample}"

    def decode(self, *stored):
        raise NotImplementedError("The preprocessing of these tiers is a NumPy function.")

    def read(self, sample):
        os.write(self._log, np.array((os.getpid(), sample), READ).tobytes())
        return [np.array(str(sample).encode(), object)]


def make(stored, samples):
    """Preprocesses stored samples."""
    assert len(samples) == len(stored)
    return [f(int(components[0][()])) for components in stored]


def open_reader(folder, source=None, slots=SAMPLES, heap_bytes=10**6, lower=True):
    """Opens a reader of memory; `lower` adds decoded and stored samples on disk."""
    shard = SampleShard(samples=SAMPLES, slots=slots)
    layout = Layout.of(f(0))
    text = Layout.of([np.array(b"", object)])
    whole = SampleShard(samples=SAMPLES, slots=SAMPLES)
    source, counts = source or Source(folder / "log"), Counts()

    def level(name, below, layout, shard=whole, heap_bytes=10**6, hits=None):
        spec = PoolSpec(layout=layout, shard=shard, heap_bytes=heap_bytes)
        pool = Pool(folder / name, lambda: spec)
        return StoreTier(pool, below, counts, hits=hits)

    below = SourceTier(source, counts)
    if lower:
        below = level("stored", below, text, hits="disk_hits")
    below = PreprocessingTier(below, make, layout, source.name)
    if lower:
        below = level("decoded", below, layout, hits="decoded_hits")
    memory = level("memory", below, layout, shard, heap_bytes)
    return Reader(memory)


def check_epoch(reader, seed):
    """Reads every sample once, in batches, and checks its value."""
    for numbers in np.array_split(np.random.default_rng(seed).permutation(SAMPLES), BATCHES):
        pixels, index, texts = reader.batch(numbers)
        for place, number in enumerate(numbers):
            expected = f(number)
            np.testing.assert_array_equal(pixels[place], expected[0])
            assert (index[place], texts[place]) == (expected[1], expected[2][()])


def _reads(folder):
    return (folder / "log").stat().st_size // READ.itemsize


def _epochs(folder, seed, epochs, make_source=Source):
    reader = open_reader(folder, make_source(folder / "log"))
    for epoch in epochs:
        check_epoch(reader, seed + epoch)


class Paced(Source):
    """Source in which each read waits for a permit."""

    def __init__(self, log, permits):
        super().__init__(log)
        self._permits = permits

    def read(self, sample):
        self._permits.acquire()
        return super().read(sample)


class Deadly(Source):
    """Source that kills its process after a number of reads and a pause."""

    def __init__(self, log, reads, pause_s, began):
        super().__init__(log)
        self._left, self._pause_s = itertools.count(1 - reads), pause_s
        began.set()

    def read(self, sample):
        found = super().read(sample)
        if next(self._left) == 0:
            _kill() if self._pause_s == 0 else threading.Timer(self._pause_s, _kill).start()
        return found


def _kill():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_kills_repeat_only_reads_in_flight(tmp_path):
    """Jobs are killed during or after a read, while a steady job fills the same stores.

    Only the samples of a batch in flight are read again.
    """
    draw, kills, most_reads = np.random.default_rng(0), 5, 8
    assert kills * (most_reads + BATCH) < SAMPLES // 2, "samples must remain for every job"
    permits = JOBS.Semaphore(0)
    paced = functools.partial(Paced, permits=permits)
    steady = JOBS.Process(target=_epochs, args=(tmp_path, 0, EVERY_EPOCH, paced), daemon=True)
    steady.start()
    for kill in range(kills):
        began = JOBS.Event()
        deadly = functools.partial(
            Deadly,
            reads=int(draw.integers(1, most_reads + 1)),
            pause_s=kill % 2 * draw.uniform(0, 0.005),
            began=began,
        )
        # The order differs: in the order of the steady job, this job would find nothing to read.
        job = JOBS.Process(
            target=_epochs,
            args=(tmp_path, 1000 * (kill + 1), EVERY_EPOCH, deadly),
            daemon=True,
        )
        job.start()
        assert began.wait(60)
        _permit_until_dead(permits, job)
        assert job.exitcode == -signal.SIGKILL
    steady.kill()
    steady.join()
    reader = open_reader(tmp_path)
    check_epoch(reader, 99)
    assert reader.tiers.counts.now().healed == 0
    assert _reads(tmp_path) > SAMPLES, "at least one kill must interrupt a read"
    _check_repeated_reads(tmp_path)
    reader.close()


def _permit_until_dead(permits, job):
    """Lets the steady job read slowly until the other job is dead, and then one more batch."""
    for _ in range(6000):
        permits.release()
        job.join(0.01)
        if not job.is_alive():
            break
    for _ in range(BATCH):
        permits.release()


def _check_repeated_reads(folder):
    """Checks that only the last samples of a killed job were read again, each once per job."""
    log = np.fromfile(folder / "log", READ)
    last = {job: set(log["sample"][log["job"] == job][-BATCH:]) for job in set(log["job"])}
    for sample in range(SAMPLES):
        *lost, _ = jobs = log["job"][log["sample"] == sample]
        assert len(set(jobs)) == len(jobs), f"a job read sample {sample} twice"
        assert all(sample in last[job] for job in lost), (
            f"jobs {jobs} read sample {sample}, which was not in flight"
        )


@pytest.mark.slow
def test_concurrent_jobs_read_each_sample_once(tmp_path):
    jobs = [JOBS.Process(target=_epochs, args=(tmp_path, 10 * job, range(2))) for job in range(3)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert [job.exitcode for job in jobs] == [0, 0, 0]
    assert _reads(tmp_path) == SAMPLES


@pytest.mark.parametrize("level", ["memory", "decoded", "stored"])
def test_flipped_bits_are_repaired_from_the_next_tier(tmp_path, level):
    reader = open_reader(tmp_path)
    check_epoch(reader, 0)
    reader.close()
    if level != "memory":
        for name in ("memory", "decoded")[: 1 + (level == "stored")]:
            _remove(tmp_path / name)
    for name, size in (("columns", 64), ("heap", 8)):
        place = section(tmp_path / level, name) + size
        with (tmp_path / level / "datacache.store").open("r+b") as stream:
            stream.seek(place)
            byte = stream.read(1)
            stream.seek(place)
            stream.write(bytes([byte[0] ^ 255]))
    reader = open_reader(tmp_path)
    check_epoch(reader, 1)
    assert reader.tiers.counts.now().healed in (1, 2)
    assert _reads(tmp_path) == SAMPLES + (
        reader.tiers.counts.now().healed if level == "stored" else 0
    )
    reader.close()


def _remove(folder):
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


@pytest.mark.parametrize("slots", [1, 100, SAMPLES])
def test_a_small_tier_is_filled_and_other_samples_are_read_through(tmp_path, slots):
    reader = open_reader(tmp_path, slots=slots, heap_bytes=4000)
    for epoch in range(3):
        check_epoch(reader, epoch)
    stats = reader.tiers.counts.now()
    assert stats.unkept > 0
    assert stats.memory_hits == 2 * (3 * SAMPLES - stats.unkept) // 3
    assert _reads(tmp_path) == SAMPLES
    reader.close()


def test_clearing_does_not_disturb_other_processes(tmp_path):
    """Processes read whole samples and regenerate cleared samples; finally the store is full."""
    reader, other = (
        open_reader(tmp_path, heap_bytes=24_000),
        open_reader(tmp_path, heap_bytes=24_000),
    )
    ends = threading.Event()

    def clear():
        while not ends.wait(0.003):
            reader.tiers.pool.clear()

    clearing = threading.Thread(target=clear)
    clearing.start()
    for epoch in range(5):
        check_epoch(other, epoch)
    ends.set()
    clearing.join()
    check_epoch(other, 0)
    assert other.tiers.pool.filled == SAMPLES
    assert other.tiers.counts.now().healed == 0
    assert _reads(tmp_path) == SAMPLES
    for opened in (reader, other):
        opened.close()


FULL = """
import sys, pathlib, logging
sys.path.insert(0, {root!r})
from tests.datacache.test_tiers import *
folder = pathlib.Path({folder!r})
reader = open_reader(folder, Source({log!r}), heap_bytes=10**9, lower=False)
for epoch in range(3):
    check_epoch(reader, epoch)
print(reader.tiers.counts.now().unkept, reader.tiers.pool.filled)
"""


@pytest.mark.slow
def test_a_full_disk_skips_one_tier(tmp_path):
    """The file system has space for the columns, but not for all samples of many sizes."""
    root, disk = os.getcwd(), tmp_path / "disk"
    disk.mkdir()
    script = FULL.format(root=root, folder=str(disk), log=str(tmp_path / "log"))
    inside = (
        f"mount -t tmpfs -o size=44k none {disk} && head -c 16k /dev/zero > {disk}/other"
        f" && exec {sys.executable} -"
    )
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", inside]
    done = subprocess.run(command, input=script, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    unkept, filled = map(int, done.stdout.split())
    assert unkept > 0
    assert filled < SAMPLES


def test_a_stalled_batch_does_not_delay_others(tmp_path):
    free = threading.Event()

    class Stalling(Source):
        def read(self, sample):
            assert sample != 5 or free.wait(30)
            return super().read(sample)

    reader = open_reader(tmp_path, Stalling(tmp_path / "log"))
    late = threading.Thread(target=reader.batch, args=(np.array([4, 5]),))
    late.start()
    others = np.array([number for number in range(SAMPLES) if number not in (4, 5)])
    assert reader.batch(others)[1].tolist() == others.tolist()
    assert late.is_alive()
    free.set()
    late.join()
    check_epoch(reader, 0)
    assert _reads(tmp_path) == SAMPLES
    reader.close()

"""Free space is the minimum of disk, memory and container; exhausting it kills no process."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np  # noqa: F401 - scripts import all names from here
import pytest

from datacache.errors import NoRoomError
from datacache.pool.pool import Pool
from datacache.pool.spec import Component, Layout, PoolSpec, SampleShard
from datacache.system.room import budget_bytes, free_bytes
from tests.launch import ROOT
from tfposeidon.memory import available_memory, is_memory

MB = 10**6
MACHINE = {
    "meminfo": "MemTotal:  2000000 kB\nMemFree: 1 kB\nMemAvailable:  1500000 kB\n"
    "HugePages_Total: 0\n"
}
"""Memory of a machine with 1434 MB available."""


def cgroup(folder, used, limit, files=0, version=2):
    """Returns names and contents of the files of a cgroup."""
    names = (
        ("memory.max", "memory.current")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    inactive = "inactive_file" if version == 2 else "inactive_file 7\ntotal_inactive_file"
    stat = f"anon 1\n{inactive} {files}\nshmem 5\n"
    return {
        f"{folder}/{name}": f"{value}\n" for name, value in zip(names, (limit, used), strict=True)
    } | {f"{folder}/memory.stat": stat}


V2 = "30 23 0:26 / {at}/cg rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "31 23 0:27 {root} {at}/v1 rw,relatime shared:9 - cgroup cgroup rw,memory"
OTHER = "32 23 0:28 / {at}/cpu rw - cgroup cgroup rw,cpu\n25 24 0:23 / /dev/shm rw - tmpfs tmpfs rw"
CASES = {
    "machine": ("", "0::/", {}, 1434 * MB),
    "version 2": (V2, "0::/a/b", cgroup("cg/a/b", 100 * MB, 1000 * MB), 850 * MB),
    "caches of files": (
        V2,
        "0::/a",
        cgroup("cg/a", 700 * MB, 1000 * MB, files=300 * MB),
        550 * MB,
    ),
    "an enclosing container": (
        V2,
        "0::/a/b",
        cgroup("cg/a/b", 100 * MB, "max") | cgroup("cg/a", 500 * MB, 1000 * MB),
        450 * MB,
    ),
    "at the mount point": (V2, "0::/", cgroup("cg", 100 * MB, 300 * MB), 185 * MB),
    "full": (V2, "0::/a", cgroup("cg/a", 99 * MB, 100 * MB), 0),
    "version 1": (
        V1,
        "4:memory:/a\n3:cpu:/x\n0::/",
        cgroup("v1/a", 100 * MB, 1000 * MB, version=1),
        850 * MB,
    ),
    "caches, version 1": (
        V1,
        "4:memory:/a",
        cgroup("v1/a", 700 * MB, 1000 * MB, 100 * MB, version=1),
        350 * MB,
    ),
    "unlimited": (
        V1,
        "4:cpu,memory:/a",
        cgroup("v1/a", 100 * MB, 2**63 - 4096, version=1),
        1434 * MB,
    ),
    "with docker": (
        V1.replace("{root}", "/docker/x"),
        "4:memory:/docker/x",
        cgroup("v1", 100 * MB, 1000 * MB, version=1),
        850 * MB,
    ),
    "both versions": (
        f"{V1}\n{V2}",
        "4:memory:/a\n0::/b",
        cgroup("v1/a", 100 * MB, 1000 * MB, version=1) | cgroup("cg/b", 1 * MB, 501 * MB),
        501 * MB - 1 * MB - 501 * MB // 20,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_available_memory_is_the_minimum_over_machine_and_containers(tmp_path, case):
    mounts, own, files, expected = CASES[case]
    mounts = f"{OTHER}\n{mounts}".replace("{root}", "/").replace("{at}", str(tmp_path))
    for name, text in ({"self/mountinfo": mounts, "self/cgroup": own} | MACHINE | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_memory(tmp_path) == pytest.approx(expected, abs=MB)
    assert is_memory(os.makedev(0, 23), tmp_path)
    assert not is_memory(os.makedev(0, 26), tmp_path)


def test_available_memory_limits_folders_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("datacache.system.room.available_memory", lambda: 12345)
    # The tolerance is for other processes that write to the disk meanwhile.
    free = pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)
    assert free_bytes(tmp_path / "not" / "there") == free
    monkeypatch.setattr("datacache.system.room.is_memory", lambda device: True)
    assert free_bytes(tmp_path / "not" / "there") == 12345
    assert budget_bytes("80%", free_bytes(tmp_path)) == 9876


def test_files_are_not_reserved_beyond_available_memory(tmp_path, monkeypatch):
    layout = Layout(components=(Component(dtype="uint8", shape=(10**6,)),))
    monkeypatch.setattr("datacache.system.room.is_memory", lambda device: True)
    monkeypatch.setattr("datacache.system.room.STEP_BYTES", 10**6)
    left = iter([10**7] * 3 + [0])
    monkeypatch.setattr("datacache.system.room.available_memory", lambda: next(left))
    with pytest.raises(
        NoRoomError,
        match=r"A store needs 50\d+ bytes of free space. Received: .* with less",
    ):
        Pool(
            tmp_path / "pool",
            lambda: PoolSpec(layout=layout, shard=SampleShard(samples=50, slots=50)),
        )
    assert sum(path.stat().st_blocks for path in (tmp_path / "pool").iterdir()) == 0


IMAGES = Layout(components=(Component(dtype="uint8", shape=(2**20,)),))


def _idle_pool(folder, samples):
    """Creates a store of `samples` MiB that no process has open, and returns its folder."""
    Pool(
        folder, lambda: PoolSpec(layout=IMAGES, shard=SampleShard(samples=samples, slots=samples))
    ).close()
    return folder


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_a_rebuilt_store_reuses_the_space_of_the_old_one(tmp_path, damage):
    pool = _idle_pool(tmp_path / "pool", 8)
    if damage == "gone":
        (pool / "datacache.store").rename(pool / "datacache.part")
    else:
        os.truncate(pool / "datacache.store", 9 * 2**20)

    def plan():
        assert not list(pool.iterdir()), "the old store must be removed"
        return PoolSpec(layout=IMAGES, shard=SampleShard(samples=8, slots=8))

    Pool(pool, plan).close()
    assert (pool / "datacache.store").stat().st_size > 8 * 2**20


@pytest.mark.parametrize("step", ["reserve", "plan"])
def test_an_interrupted_creation_leaves_no_files(tmp_path, monkeypatch, step):
    """The interruption occurs while the store is planned, or while its file is reserved."""

    def interrupted(*_):
        raise KeyboardInterrupt

    plan = PoolSpec(layout=IMAGES, shard=SampleShard(samples=8, slots=8))
    if step == "reserve":
        monkeypatch.setattr("datacache.pool.folder.reserve", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Pool(tmp_path / "pool", interrupted if step == "plan" else lambda: plan)
    assert list((tmp_path / "pool").iterdir()) == []


@contextlib.contextmanager
def _limited(bytes_):
    """Creates a cgroup that limits memory, or skips the test if that is impossible."""
    own = dict(
        line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines()
    )
    places = [
        ("/sys/fs/cgroup/memory", own.get("memory"), "memory.limit_in_bytes"),
        ("/sys/fs/cgroup", own.get(""), "memory.max"),
    ]
    problems = []
    for mount, path, limit in places:
        folder = Path(f"{mount}{path}") / f"datacache-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError as error:
            problems.append(str(error))
            continue
        try:
            (folder / limit).write_text(str(bytes_))
            yield folder
            return
        except OSError as error:
            problems.append(str(error))
        finally:
            folder.rmdir()
    pytest.skip(f"requires the right to create a cgroup: {problems}")


IN_CGROUP = """
import os, sys
open({group!r} + "/cgroup.procs", "w").write(str(os.getpid()))
from tests.datacache.test_room import *

size, many = 2**20, 200
folder = Path({folder!r})
fixed, texts = Layout.of([np.zeros(size, "uint8")]), Layout.of([np.array(b"", object)])


def sample(number, layout):
    pixels = np.full(size, number % 251, "uint8")
    return [pixels if layout is fixed else np.array(pixels.tobytes(), object)]


def check(pool, layout):
    room = np.flatnonzero(pool.has_room(np.arange(many))).tolist()
    kept = [n for n in room if pool.put(n, sample(n, layout))]
    assert pool.find_corrupt(np.array(kept), recheck=True).size == 0
    assert all(np.array_equal(pool.read_sample(n)[0], sample(n, layout)[0]) for n in kept)
    pool.close()
    return len(kept)


try:
    whole = PoolSpec(layout=fixed, shard=SampleShard(samples=many, slots=many))
    Pool(folder / "all", lambda: whole)
except NoRoomError:
    print(0)
slots = budget_bytes("80%", free_bytes(folder)) // (size + 8)
print(slots)
some = PoolSpec(layout=fixed, shard=SampleShard(samples=many, slots=slots))
print(check(Pool(folder / "fixed", lambda: some), fixed))
shutil.rmtree(folder / "fixed")
part = SampleShard(samples=many, slots=many)
varying = PoolSpec(layout=texts, shard=part, heap_bytes=many * 2 * size)
print(check(Pool(folder / "texts", lambda: varying), texts))
"""


@pytest.mark.slow
def test_a_container_out_of_memory_kills_no_process():
    """Neither reserving nor filling a store exceeds the limit of 128 MiB."""
    folder = tempfile.mkdtemp(dir="/dev/shm")
    try:
        with _limited(128 * 2**20) as group:
            script = IN_CGROUP.format(group=str(group), folder=folder)
            done = subprocess.run(
                [sys.executable, "-c", script],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert done.returncode == 0, done.stderr
            shutil.rmtree(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    none, slots, fixed, texts = map(int, done.stdout.split())
    assert (none, fixed) == (0, slots)
    assert 20 < slots < 0.8 * 128
    assert slots <= texts < 128

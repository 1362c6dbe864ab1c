"""`python -m datacache` lists, inspects and removes pools, and disturbs no job."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from datacache.__main__ import main
from datacache.pool import inspection
from datacache.pool.folder import IN_USE
from datacache.pool.pool import Pool
from datacache.pool.spec import Layout, PoolSpec, SampleShard
from datacache.system.descriptors import Descriptor, lock_byte
from tests.datacache.pools import change_header

SAMPLES = 12
ROOT = Path(__file__).parents[2]
SIMPLE = Layout.of([np.zeros((5, 3), "uint8"), np.float32(0)])
VARYING = Layout.of([np.array(b"", object), np.float32(0)])


def _filled(folder, ready=SAMPLES, layout=SIMPLE, **of_part):
    """A pool that nobody has open, with its first samples."""
    part = SampleShard(**{"samples": SAMPLES, "slots": SAMPLES} | of_part)
    pool = Pool(
        folder,
        lambda: PoolSpec(layout=layout, shard=part, heap_bytes=10**4, source="images in /data"),
    )
    samples = np.flatnonzero(pool.has_room(np.arange(SAMPLES)))
    for number in samples[:ready]:
        first = (
            np.full((5, 3), number, "uint8")
            if layout is SIMPLE
            else np.array(b"x" * number, object)
        )
        pool.put(number, [first, np.float32(number)])
    pool.close()
    return folder


@pytest.fixture
def pools(tmp_path):
    """A folder of pools: one whole, one of texts that has room for a few, one in part."""
    root = tmp_path / "pools"
    _filled(root / "a")
    _filled(root / "b", layout=VARYING, slots=5)
    _filled(root / "c", ready=2, node=1, nodes=2)
    return root


def _state(root):
    """Returns time and size of all that is in a folder, which change if somebody writes."""
    return {
        path: (path.stat().st_mtime_ns, path.stat().st_size) for path in [root, *root.rglob("*")]
    }


def _listed(capsys, *folders):
    assert main(["ls", "--json", *map(str, folders)]) == 0
    return {Path(one["folder"]).name: one for one in json.loads(capsys.readouterr().out)}


def test_ls(pools, capsys):
    (pools / "notes.txt").write_text("no pool")
    (pools / "thesis").mkdir()
    user = Pool(pools / "b")
    before = _state(pools)
    assert main(["ls", str(pools)]) == 0
    heading, *rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    cells = [[cell.strip() for cell in row if cell] for row in rows]
    assert heading[0].split() == ["FOLDER"]
    assert [row[:5] for row in cells] == [
        [str(pools / "a"), "images in /data", "12", "12", "12"],
        [str(pools / "b"), "images in /data", "5", "5", "12"],
        [str(pools / "c"), "images in /data", "2", "6", "12"],
    ]
    assert [row[-1] for row in cells] == ["idle", "in use", "idle"]
    assert _state(pools) == before
    user.close()
    assert main(["ls", str(pools / "b"), str(pools / "a")]) == 0
    assert capsys.readouterr().out.count("idle") == 2


def test_ls_for_machines(pools, capsys):
    os.utime(pools / "a", (0, 0))
    found = _listed(capsys, pools)
    assert list(found) == ["a", "b", "c"]
    one = found["b"]
    assert (one["ready"], one["slots"], one["samples"], one["in_use"], one["trouble"]) == (
        5,
        5,
        SAMPLES,
        False,
        "",
    )
    assert one["bytes"] > 0
    assert found["c"]["slots"] == 6
    assert found["a"]["opened"].startswith(("1970", "1969"))
    Pool(pools / "a").close()
    assert _listed(capsys, pools)["a"]["opened"][:4] == time.strftime("%Y")


def test_ls_of_this_user(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("datacache.__main__.default_memory", lambda: str(tmp_path / "shm"))
    assert main(["ls"]) == 0
    assert capsys.readouterr().out == f"No stores in {tmp_path}/shm.\n"
    _filled(tmp_path / "shm" / "one")
    assert main(["ls"]) == 0
    assert f"{tmp_path}/shm/one" in capsys.readouterr().out
    # What the error of a folder that others can write to says.
    (tmp_path / "shm").chmod(0o777)
    assert main(["ls"]) == 2
    assert f"remove it: python -m datacache rm --all {tmp_path}/shm\n" in capsys.readouterr().err
    _filled(tmp_path / "shm" / "two")
    (tmp_path / "shm" / "two").chmod(0o777)
    assert main(["rm", "--all", f"{tmp_path}/shm/two"]) == 0
    assert not (tmp_path / "shm" / "two").exists()
    assert main(["rm", "--all"]) == 0
    assert not (tmp_path / "shm" / "one").exists()
    disk = _filled(tmp_path / "disk" / "one")
    (tmp_path / "shm").rmdir()
    (tmp_path / "shm").symlink_to(disk.parent)
    for command in (["ls"], ["rm", "--all"]):
        assert main(command) == 2
        assert "A store must not be or contain a link. Received: " in capsys.readouterr().err
    assert disk.exists()


DAMAGE = {
    "newer": (
        lambda f: change_header(f, format=99),
        r"The format of a store must be at most 4. Received: format 99",
    ),
    "no JSON": (
        lambda f: os.truncate(f / "datacache.store", 3),
        r"A store must begin with a header in JSON.* Received: .*store, without one. Remove",
    ),
    "made": (
        lambda f: (f / "datacache.store").rename(f / "datacache.part"),
        r"must be complete. Received: .*being created, or was left by a kill",
    ),
    "short": (
        lambda f: os.truncate(f / "datacache.store", 5000),
        r"The file .* must be complete. Received: .*store of 5000 bytes, expected \d+ bytes. Rem",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_broken_pools_are_said_and_removed(pools, capsys, damage):
    apply, text = DAMAGE[damage]
    apply(pools / "a")
    found = _listed(capsys, pools)
    assert list(found) == ["a", "b", "c"]
    assert found["a"]["ready"] is None
    assert re.search(text, found["a"]["trouble"])
    assert main(["ls", str(pools)]) == 0
    said = capsys.readouterr().out
    assert "unusable, idle" in said
    assert f"{pools}/a cannot be used. {found['a']['trouble']}\n" in said
    assert main(["verify", str(pools / "a")]) == 2
    assert capsys.readouterr() == ("", f"datacache: {found['a']['trouble']}\n")
    assert main(["rm", str(pools / "a")]) == 0
    assert not (pools / "a").exists()


def test_what_goes_while_it_is_listed(pools, capsys, monkeypatch):
    """It may go before any of the steps in which `ls` looks at it."""
    going, steps = iter(range(0)), 0

    def watched(step):
        def wrapped(*given):
            if next(going, None) == 0:
                shutil.rmtree(pools / "b")
            return step(*given)

        return wrapped

    for name in (
        "_looks_like_a_pool",
        "_report",
        "_local_time",
        "_in_use",
        "open_store",
        "read_header",
    ):
        monkeypatch.setattr(inspection, name, watched(getattr(inspection, name)))
    while True:
        going, steps = iter(range(steps, -1, -1)), steps + 1
        assert not _listed(capsys, pools)["a"]["trouble"]
        if (pools / "b").exists():
            break
        _filled(pools / "b", layout=VARYING)
    assert steps > 10


def test_corrupt_samples_are_found_and_made_again(pools, capsys):
    assert main(["verify", str(pools)]) == 0
    assert capsys.readouterr().out == (
        "".join(
            f"{pools}/{name}: {whole} samples intact, 0 corrupted\n"
            for name, whole in zip("abc", (12, 5, 2), strict=True)
        )
    )
    user = Pool(pools / "a")
    user._columns[0][[3, 7]] ^= 1
    assert main(["verify", str(pools / "a"), str(pools / "nowhere")]) == 2
    out, err = capsys.readouterr()
    assert out == f"{pools}/a: 10 samples intact, 2 corrupted, which jobs regenerate\n"
    assert err.startswith(
        f"datacache: A store must have a file datacache.store. Received: {pools}/nowhere"
    )
    assert not (pools / "nowhere").exists()
    assert np.flatnonzero(~user.ready(np.arange(SAMPLES))).tolist() == [3, 7]
    user.put(3, [np.zeros((5, 3), "uint8"), np.float32(3)])
    user._columns[0][3] += 1
    user.close()
    assert main(["verify", str(pools)]) == 1
    assert "a: 10 samples intact, 1 corrupted" in capsys.readouterr().out


def test_rm_leaves_what_is_in_use(pools, capsys):
    user = Pool(pools / "b")
    assert main(["rm", "--all", str(pools)]) == 2
    out, err = capsys.readouterr()
    assert [line.partition(": freed ")[0] for line in out.splitlines()] == [
        f"{pools}/a",
        f"{pools}/c",
    ]
    assert err.startswith(f"datacache: A store in use cannot be removed. Received: {pools}/b")
    assert sorted(path.name for path in pools.iterdir()) == ["b"]
    user.close()
    bytes_ = _listed(capsys, pools)["b"]["bytes"]
    assert bytes_ >= 2**12
    assert main(["rm", str(pools / "b")]) == 0
    assert capsys.readouterr().out == f"{pools}/b: freed {bytes_ / 1e3:.2f} kB\n"
    assert main(["rm", "--all", str(pools)]) == 0
    assert capsys.readouterr().out == ""


def test_rm_removes_nothing_of_others(pools, capsys):
    (pools / "a" / "thesis.tex").write_text("x")
    (pools / "mine").mkdir()
    (pools / "mine" / "datacache.store").write_text("x")
    (pools / "mine" / "notes").write_text("x")
    (pools / "empty").mkdir()
    before = _state(pools)
    for folder, text in (
        (
            "a",
            "A folder to remove must contain only a store. "
            "Received: .*contains 'thesis.tex'. Inspect the",
        ),
        ("mine", "A folder to remove must contain only a store. Received: .*contains 'notes'"),
        ("empty", "A store must have a file datacache.store"),
        ("nowhere", "A store must have a file datacache.store"),
        (
            ".",
            "A folder to remove must contain only a store. Received: .*pools, which contains 'a'",
        ),
    ):
        assert main(["rm", str(pools / folder)]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert re.search(text, err)
    assert _state(pools) == before
    assert main(["rm", "--all", str(pools)]) == 2
    assert sorted(path.name for path in pools.iterdir()) == ["a", "empty", "mine"]
    assert (pools / "a" / "datacache.store").exists()


def test_errors_are_one_line(tmp_path, capsys):
    assert main(["rm"]) == 2
    assert capsys.readouterr().err == (
        "datacache: `rm` requires the stores to remove. Received: folders=[]. "
        "Pass the folders of the stores, or --all.\n"
    )
    assert main(["ls", str(tmp_path / "nowhere")]) == 2
    assert "A store must be a folder. Received: " in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["list"])


def test_nobody_waits_for_ls(pools):
    """Other processes may hold the locks that `ls` reads: it does not wait, and takes none."""
    handle = os.open(pools / "a" / "datacache.store", os.O_RDWR)
    assert lock_byte(Descriptor(handle), IN_USE, shared=True)
    assert inspection.inspect_pool(pools / "a").in_use
    lock = os.open(pools / "a", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert inspection.inspect_pool(pools / "a").in_use
    os.close(handle)
    assert inspection.inspect_pool(pools / "a").in_use, "another process changes the store"
    os.close(lock)
    assert not inspection.inspect_pool(pools / "a").in_use
    with open(pools / "a" / "datacache.store", "r+b") as file:
        assert lock_byte(file, IN_USE)


def _run(*arguments):
    script = "import sys; from datacache.__main__ import main; status = main(sys.argv[1:]); "
    script += "print('tensorflow' in sys.modules, 'keras' in sys.modules, file=sys.stderr); "
    script += "sys.exit(status)"
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_tensorflow_stays_away(pools):
    for command, status in (
        (["ls", pools], 0),
        (["verify", pools], 0),
        (["rm", pools / "c"], 0),
        (["rm", pools / "c"], 2),
    ):
        done = _run(*command)
        assert (done.returncode, done.stderr.splitlines()[-1]) == (status, "False False"), (
            done.stderr
        )
    # A program that does not read to the end, as `head`, is no error.
    ends = f"set -o pipefail; {sys.executable} -m datacache ls --json {pools} | true"
    done = subprocess.run(
        ["bash", "-c", ends], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")

"""`python -m datacache` lists, verifies and removes stores without disturbing jobs."""

import fcntl
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from datacache.__main__ import main
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
    """Creates an idle store that holds its first samples."""
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
    """Returns a folder with a full store, a small store of texts, and a partly filled store."""
    root = tmp_path / "pools"
    _filled(root / "a")
    _filled(root / "b", layout=VARYING, slots=5)
    _filled(root / "c", ready=2, node=1, nodes=2)
    return root


def _state(root):
    """Returns modification time and size of all files in a folder, to detect writes."""
    return {
        path: (path.stat().st_mtime_ns, path.stat().st_size) for path in [root, *root.rglob("*")]
    }


def _listed(capsys, *folders):
    """Returns the rows of `ls` by store, and the reasons why other stores cannot be used."""
    assert main(["ls", *map(str, folders)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [re.split("  +", line) for line in lines if " cannot be used. " not in line]
    reasons = [line.split(" cannot be used. ") for line in lines if " cannot be used. " in line]
    return {Path(row[0]).name: row for row in rows[1:]}, {Path(f).name: why for f, why in reasons}


def test_ls_lists_stores_with_samples_and_use(pools, capsys):
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


def test_ls_shows_when_a_store_was_opened(pools, capsys):
    os.utime(pools / "a", (0, 0))
    assert _listed(capsys, pools)[0]["a"][6].startswith(("1970", "1969"))
    Pool(pools / "a").close()
    assert _listed(capsys, pools)[0]["a"][6].startswith(time.strftime("%Y"))


def test_ls_fails_for_folders_that_do_not_exist(pools, capsys):
    assert main(["ls", str(pools), str(pools / "nowhere")]) == 2
    printed = capsys.readouterr().out
    assert f"{pools / 'nowhere'} does not exist." in printed
    assert printed.count("idle") == 3


def test_ls_lists_the_stores_of_this_user_by_default(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("datacache.__main__.default_memory", lambda: str(tmp_path / "shm"))
    assert main(["ls"]) == 0
    assert capsys.readouterr().out == f"No stores in {tmp_path}/shm.\n"
    _filled(tmp_path / "shm" / "one")
    assert main(["ls"]) == 0
    assert f"{tmp_path}/shm/one" in capsys.readouterr().out


DAMAGE = {
    "newer": (
        lambda f: change_header(f, format=99),
        r"The format of a store must be at most 5. Received: format 99",
    ),
    "no JSON": (
        lambda f: os.truncate(f / "datacache.store", 3),
        r"A store must begin with a header in JSON.* Received: .*store, without one. Remove",
    ),
    "made": (
        lambda f: (f / "datacache.store").rename(f / "datacache.part"),
        r"must be complete. Received: .*, whose creation has not finished",
    ),
    "short": (
        lambda f: os.truncate(f / "datacache.store", 500),
        r"The file .* must be complete. Received: .*store of 500 bytes, expected \d+ bytes. Rem",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_stores_are_reported_and_removed(pools, capsys, damage):
    apply, text = DAMAGE[damage]
    apply(pools / "a")
    rows, reasons = _listed(capsys, pools)
    assert (list(rows), list(reasons)) == (["b", "c"], ["a"])
    assert re.search(text, reasons["a"])
    assert main(["verify", str(pools / "a")]) == 2
    assert capsys.readouterr() == ("", f"datacache: {reasons['a']}\n")
    assert main(["rm", str(pools / "a")]) == 0
    assert not (pools / "a").exists()


def test_corrupt_samples_are_reported_and_regenerated(pools, capsys):
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
        "datacache: A store must be a folder with a file datacache.store. "
        f"Received: {pools}/nowhere"
    )
    assert not (pools / "nowhere").exists()
    assert np.flatnonzero(~user.ready(np.arange(SAMPLES))).tolist() == [3, 7]
    user.put(3, [np.zeros((5, 3), "uint8"), np.float32(3)])
    user._columns[0][3] += 1
    user.close()
    assert main(["verify", str(pools)]) == 1
    assert "a: 10 samples intact, 1 corrupted" in capsys.readouterr().out


def test_rm_refuses_stores_in_use(pools, capsys):
    user = Pool(pools / "b")
    assert main(["rm", str(pools)]) == 2
    out, err = capsys.readouterr()
    assert out == f"{pools}/a: removed\n{pools}/c: removed\n"
    rule = "A store must not be in use when it is removed."
    assert err.startswith(f"datacache: {rule} Received: {pools}/b")
    assert sorted(path.name for path in pools.iterdir()) == ["b"]
    user.close()
    assert main(["rm", str(pools / "b")]) == 0
    assert capsys.readouterr().out == f"{pools}/b: removed\n"


def test_rm_removes_only_files_of_stores(pools, capsys):
    (pools / "a" / "thesis.tex").write_text("x")
    (pools / "mine").mkdir(mode=0o700)
    (pools / "mine" / "datacache.store").write_text("x")
    (pools / "mine" / "notes").write_text("x")
    (pools / "empty").mkdir(mode=0o700)
    before = _state(pools)
    for folder, text in (
        (
            "a",
            "A folder to remove must contain only a store. "
            "Received: .*contains 'thesis.tex'. Inspect the",
        ),
        ("mine", "A folder to remove must contain only a store. Received: .*contains 'notes'"),
        ("empty", "A store must be a folder with a file datacache.store"),
        ("nowhere", "A store must be a folder with a file datacache.store"),
    ):
        assert main(["rm", str(pools / folder)]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert re.search(text, err)
    assert _state(pools) == before
    assert main(["rm", str(pools)]) == 2
    assert sorted(path.name for path in pools.iterdir()) == ["a", "empty", "mine"]
    assert (pools / "a" / "datacache.store").exists()


def test_unknown_commands_are_refused():
    for command in (["list"], ["rm"], ["verify"]):
        with pytest.raises(SystemExit, match="2"):
            main(command)


def test_ls_blocks_no_process(pools, capsys):
    """`ls` neither waits for the locks of other processes nor takes locks."""
    handle = os.open(pools / "a" / "datacache.store", os.O_RDWR)
    assert lock_byte(Descriptor(handle), IN_USE, shared=True)
    lock = os.open(pools / "a", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert _listed(capsys, pools)[0]["a"][-1] == "in use"
    os.close(handle)
    assert _listed(capsys, pools)[0]["a"][-1] == "idle"
    os.close(lock)
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


def test_commands_do_not_import_tensorflow(pools):
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

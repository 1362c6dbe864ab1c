"""Stores neither use files of other users nor give other users access."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from datacache.__main__ import main
from datacache.errors import CacheError
from datacache.pool import folder as folders
from datacache.pool.folder import own_memory, remove
from datacache.pool.pool import Pool
from datacache.pool.spec import Layout, PoolSpec, SampleShard
from tests.launch import ROOT

SAMPLES = 5
LAYOUT = Layout.of([np.zeros(3, "uint8"), np.array(b"", object)])
NOBODY = 65534
AS_NOBODY = """
import os
import numpy.testing
from pathlib import Path
from tests.datacache.test_access import *
os.setgroups([])
os.setgid({user})
os.setuid({user})
os.umask(0)
shared = Path({shared!r})
"""
another_user = pytest.mark.skipif(os.geteuid() != 0, reason="requires root, to change the user")


def pool(path):
    return Pool(
        path,
        lambda: PoolSpec(
            layout=LAYOUT, shard=SampleShard(samples=SAMPLES, slots=SAMPLES), heap_bytes=1000
        ),
    )


def sample(number):
    return [np.full(3, number, "uint8"), np.array(b"x" * number, object)]


def nobody(shared, script):
    """Runs a script as another user, with files that are accessible to everyone.

    Returns the JSON that the script prints, if any.
    """
    whole = AS_NOBODY.format(user=NOBODY, shared=str(shared)) + script
    done = subprocess.run(
        [sys.executable, "-c", whole], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout or "null")


@pytest.fixture
def shared(monkeypatch):
    """Creates a folder like /dev/shm, in which all users create files and remove their own."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o1777)
    monkeypatch.setattr(folders, "SHARED_MEMORY", str(path))
    yield path
    shutil.rmtree(path)


def filled(path):
    made = pool(path)
    for number in range(SAMPLES):
        made.put(number, sample(number))
    return made


def check_all(found):
    assert found.find_corrupt(np.arange(SAMPLES)).size == 0
    for number in range(SAMPLES):
        for array, expected in zip(found.read_sample(number), sample(number), strict=True):
            np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("umask", [0, 0o22, 0o77])
def test_stores_are_accessible_to_their_owner_only(shared, umask):
    before = os.umask(umask)
    try:
        made = filled(own_memory() / "deep" / "pool")
    finally:
        os.umask(before)
    with made.claim(np.arange(2)):
        paths = list(own_memory().rglob("*"))
    assert len(paths) == 3
    assert {path.stat().st_mode & 0o7777 for path in paths if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o7777 for path in paths if path.is_file()} == {0o600}
    assert own_memory().stat().st_mode & 0o7777 == 0o700


@another_user
def test_other_users_can_neither_read_nor_lock(shared):
    filled(own_memory() / "pool")
    files = [str(path) for path in (own_memory(), *own_memory().rglob("*"))]
    assert len(files) == 3
    script = (
        f"import json; print(json.dumps([f for f in {files} "
        "if os.access(f, os.R_OK) or os.access(f, os.W_OK)]))"
    )
    assert nobody(shared, script) == []


@another_user
def test_folders_and_stores_of_another_user_are_refused(shared, capsys):
    """A writable folder of another user is refused, too."""
    ours, theirs = own_memory().name, "shared / 'theirs'"
    shutil.rmtree(shared / ours)
    nobody(shared, f"filled({theirs}); (shared / {ours!r}).mkdir(); (shared / 'free').mkdir()")
    before = {path: path.stat().st_mtime_ns for path in shared.rglob("*")}
    with pytest.raises(
        CacheError,
        match=rf"owned by its user. Received: .*{ours}, owned by user {NOBODY}, expected user 0",
    ):
        own_memory()
    for name in ("theirs", "free"):
        with pytest.raises(
            CacheError,
            match=rf"Received: .*{name}, owned by user {NOBODY}, expected user 0. Check who crea",
        ):
            pool(shared / name)
        with pytest.raises(CacheError, match=rf"owned by user {NOBODY}"):
            remove(shared / name)
    with pytest.raises(CacheError, match=rf"owned by user {NOBODY}"):
        Pool(shared / "theirs")
    assert main(["ls", str(shared)]) == 0
    assert re.search(rf"theirs cannot be used. .*owned by user {NOBODY}", capsys.readouterr().out)
    assert {path: path.stat().st_mtime_ns for path in shared.rglob("*")} == before


def test_links_are_not_followed(shared):
    victim = shared / "victim"
    victim.write_text("mine")
    elsewhere = filled(shared / "elsewhere").folder
    (shared / "link").symlink_to(elsewhere)
    for opened in (pool, Pool, remove):
        with pytest.raises(
            CacheError,
            match=r"must not be or contain a link. Received: .*link, a link to .*elsewhere. Check",
        ):
            opened(shared / "link")
    assert [path.name for path in elsewhere.iterdir()] == ["datacache.store"]
    for name in ("datacache.store", "datacache.part"):
        folder = shared / name
        filled(folder).close()
        (folder / "datacache.store").unlink()
        (folder / name).symlink_to(victim)
        if name == "datacache.store":
            with pytest.raises(CacheError, match=r"a link to .*victim"):
                pool(folder)
        else:
            # Before it writes, a store removes leftovers of an earlier store, including links.
            check_all(filled(folder))
        assert victim.read_text() == "mine"


def test_folders_and_files_accessible_to_others_are_refused(shared):
    made = filled(shared / "pool")
    for path, mode in (
        (made.folder, 0o755),
        (made.folder, 0o757),
        (made.folder / "datacache.store", 0o644),
        (made.folder / "datacache.store", 0o620),
        (made.folder / "datacache.store", 0o602),
    ):
        before = path.stat().st_mode & 0o7777
        path.chmod(mode)
        with pytest.raises(
            CacheError,
            match=rf"accessible to user \d+ only. Received: {path} with mode {mode:o}, "
            rf"expected mode {before:o}. If no ",
        ) as refused:
            pool(made.folder)
        with pytest.raises(CacheError, match=r"accessible to user \d+ only"):
            remove(made.folder)
        (remedy,) = re.findall(r"correct it: (.*); otherwise", str(refused.value))
        assert remedy == f"chmod -R go-rwxs {made.folder}"
        assert path.stat().st_mode & 0o7777 == mode
        subprocess.run(remedy, shell=True, check=True)
        check_all(pool(made.folder))
        assert path.stat().st_mode & 0o7777 == before
    check_all(pool(made.folder))
    (made.folder / "datacache.store").unlink()
    os.mkfifo(made.folder / "datacache.store")
    with pytest.raises(
        CacheError,
        match=r"consist of a folder and .* files. Received: .*store, which has another file type",
    ):
        pool(made.folder)

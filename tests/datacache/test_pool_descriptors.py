"""Descriptors of stores have one owner, and none stays open after an error or `close`."""

import contextlib
import fcntl
import os

import numpy as np
import pytest

import datacache
from datacache.errors import CacheError
from datacache.pool.folder import remove
from datacache.pool.pool import Pool
from datacache.system.access import Directory
from datacache.system.descriptors import Descriptor
from tests import drawn
from tests.datacache.caches import BATCH
from tests.datacache.pools import fill_all, varying_pool


def _open_files(folder):
    """Returns the paths in a folder that this process has open."""
    paths = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            paths.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in paths if path.startswith(str(folder))]


def test_a_closed_store_has_no_open_descriptors(tmp_path):
    with varying_pool(tmp_path / "pool") as pool:
        assert fill_all(pool, range(5))
        with pool.claim(np.arange(5, 8)):
            assert _open_files(tmp_path)
    pool.close()
    assert _open_files(tmp_path) == []
    remove(tmp_path / "pool")


@pytest.mark.parametrize(
    "step",
    [
        "system.access.os.fchmod",
        "pool.folder.lock_byte",
        "pool.folder.mmap.mmap",
    ],
)
def test_a_failed_open_leaves_no_descriptors(tmp_path, monkeypatch, step):
    def fails(*_, **__):
        raise OSError(5, "Input/output error")

    if step != "system.access.os.fchmod":
        varying_pool(tmp_path / "pool").close()
    with monkeypatch.context() as patch:
        patch.setattr(f"datacache.{step}", fails)
        with pytest.raises((OSError, CacheError), match="Input/output error"):
            varying_pool(tmp_path / "pool")
        assert _open_files(tmp_path) == []
    varying_pool(tmp_path / "pool").close()
    remove(tmp_path / "pool")


def test_a_retained_exception_keeps_no_store_open(tmp_path, monkeypatch):
    """The frames of the exception's traceback refer to the arrays of the store."""

    def fails(*_):
        raise RuntimeError("no more")

    varying_pool(tmp_path).close()
    monkeypatch.setattr("datacache.pool.pool.Heap", fails)
    with pytest.raises(RuntimeError, match="no more") as kept:
        varying_pool(tmp_path)
    assert _open_files(tmp_path) == []
    assert kept.traceback


def test_a_store_does_not_lock_its_whole_file(tmp_path):
    """Network file systems emulate `flock` by byte-range locks, which stores need themselves."""
    with varying_pool(tmp_path), open(tmp_path / "datacache.store", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_refused_files_are_closed(tmp_path):
    varying_pool(tmp_path / "pool").close()
    (tmp_path / "pool" / "datacache.store").chmod(0o666)
    for opened in (varying_pool, Pool):
        with pytest.raises(CacheError, match="accessible to user"):
            opened(tmp_path / "pool")
    (tmp_path / "pool").chmod(0o777)
    with pytest.raises(CacheError, match="accessible to user"):
        Directory(tmp_path / "pool")
    assert _open_files(tmp_path) == []


@pytest.mark.parametrize("step", ["tiers.opening.PreprocessingTier", "nodes.reader.open_reader"])
def test_a_failed_cache_closes_its_stores(tmp_path, monkeypatch, images, step):
    def fails(*_):
        raise RuntimeError("no more")

    folders = {name: tmp_path / name for name in ("memory", "decoded", "disk")}
    source = datacache.from_folder(images)
    with monkeypatch.context() as patch:
        patch.setattr(f"datacache.{step}", fails)
        with pytest.raises(RuntimeError, match="no more"):
            datacache.Cache(source, drawn.decode, **folders)
    assert _open_files(tmp_path) == []
    with datacache.Cache(source, drawn.decode, **folders) as cache:
        assert len(next(iter(cache.dataset(BATCH)))[0]) == BATCH
    assert _open_files(tmp_path) == []


def test_a_second_close_has_no_effect(tmp_path):
    """After the first close, another file may have the same number."""
    handle = Descriptor(os.open(tmp_path, os.O_RDONLY))
    number = handle.fileno()
    handle.close()
    other = os.open(tmp_path, os.O_RDONLY)
    assert other == number
    handle.close()
    assert os.fstat(other)
    os.close(other)

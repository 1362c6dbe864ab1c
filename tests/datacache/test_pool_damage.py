"""Folders and headers that are damaged are refused by name, or made anew."""

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil

import numpy as np
import pytest

from datacache.errors import CacheError
from datacache.pool.pool import Pool
from tests.datacache.pools import (
    SAMPLES,
    new_pool,
    varying_pool,
    varying_sample,
)

MAPPED = ("samples", "words", "heap", "end")


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
        "must be JSON. Received: .*header.json, which is not JSON",
    ),
    "no text": (
        lambda folder, other: (folder / "header.json").write_bytes(b"\xff"),
        "header.json, which is not JSON",
    ),
    "another JSON": (
        lambda folder, other: (folder / "header.json").write_text("[]"),
        "must state its format",
    ),
    "changed": (
        _header(source="other"),
        "must not be modified. Received: .*header.json, which was modified",
    ),
    "older": (
        _header(format=1),
        "format of a store must be 3. Received: format 1 in .*created by an older tfposeidon",
    ),
    "moved": (
        lambda folder, other: (shutil.rmtree(folder), shutil.copytree(other, folder)),
        "created as other",
    ),
    "gone": (
        lambda folder, other: (folder / "words").unlink(),
        "must exist. Received: no .*words",
    ),
    "empty": (
        lambda folder, other: os.truncate(folder / "samples", 0),
        "samples of 0 bytes, expected",
    ),
    **{
        f"short {name}": (
            _resized(name, -1),
            f"must be complete. Received: .*{name} of .* bytes, expected",
        )
        for name in MAPPED
    },
    **{
        f"long {name}": (
            _resized(name, 64),
            f"must be complete. Received: .*{name} of .* bytes, expected",
        )
        for name in MAPPED
    },
    **{
        f"swapped {name}": (
            _of_another(name),
            f"must belong to it. Received: .*{name} of another store",
        )
        for name in MAPPED
    },
}


def test_folders_that_are_no_cache(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(
        CacheError,
        match=r"A store must have a folder of its own. Received: .*contains 'thesis.tex'",
    ):
        new_pool(tmp_path)
    folder = tmp_path / "pool"
    new_pool(folder)
    header = json.loads((folder / "header.json").read_text())
    assert new_pool(folder, slots=7).slots == SAMPLES, "a pool is taken as it was made"
    with pytest.raises(
        CacheError, match=r"A store must have a header.json. Received: .*without one"
    ):
        Pool(tmp_path)
    (folder / "header.json").write_text(json.dumps(header | {"format": 99}))
    with pytest.raises(
        CacheError, match=r"The format of a store must be at most 3. Received: format 99 in .*newer"
    ):
        new_pool(folder)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_what_nobody_has_open_is_made_anew(tmp_path, damage, caplog):
    apply, text = DAMAGE[damage]
    folder, other = tmp_path / "pool", tmp_path / "other"
    for place in (other, folder):
        with contextlib.closing(varying_pool(place)) as pool:
            for index in range(SAMPLES):
                pool.put(index, varying_sample(index))
    apply(folder, other)
    with pytest.raises(
        CacheError, match=rf"{text}.* Remove the store: python -m datacache rm {folder}$"
    ):
        Pool(folder)
    users = os.open(folder / "users", os.O_RDONLY)
    fcntl.flock(users, fcntl.LOCK_SH)
    with pytest.raises(
        CacheError,
        match=rf"{text}.* A process has the store open. End that process, and open the store",
    ):
        varying_pool(folder)
    os.close(users)
    with (
        caplog.at_level(logging.WARNING, "datacache"),
        contextlib.closing(varying_pool(folder)) as pool,
    ):
        assert re.search(rf"datacache: .*{text}.* The store is rebuilt", caplog.text)
        assert pool.filled == 0
        for index in range(SAMPLES):
            assert pool.put(index, varying_sample(index))
    with contextlib.closing(Pool(folder)) as pool:
        assert pool.filled == SAMPLES
        assert pool.find_corrupt(np.arange(SAMPLES)).size == 0

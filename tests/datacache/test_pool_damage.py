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
from datacache.pool.pool import open_existing
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


def test_folders_that_are_no_cache(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(
        CacheError, match=r"A cache must have a folder of its own. Received: .*holds 'thesis.tex'"
    ):
        new_pool(tmp_path)
    folder = tmp_path / "pool"
    new_pool(folder)
    header = json.loads((folder / "header.json").read_text())
    assert new_pool(folder, slots=7).slots == SAMPLES, "a pool is taken as it was made"
    with pytest.raises(
        CacheError, match=r"A cache must have a header.json. Received: .*without one"
    ):
        open_existing(tmp_path)
    (folder / "header.json").write_text(json.dumps(header | {"format": 99}))
    with pytest.raises(
        CacheError, match=r"A cache must be of a format up to 2. Received: format 99 in .*newer"
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
    with pytest.raises(CacheError, match=rf"{text}.* Remove it: python -m datacache rm {folder}$"):
        open_existing(folder)
    users = os.open(folder / "users", os.O_RDONLY)
    fcntl.flock(users, fcntl.LOCK_SH)
    with pytest.raises(
        CacheError,
        match=rf"{text}.* A process has it open: end it, and the next makes the pool anew",
    ):
        varying_pool(folder)
    os.close(users)
    with (
        caplog.at_level(logging.WARNING, "datacache"),
        contextlib.closing(varying_pool(folder)) as pool,
    ):
        assert re.search(rf"datacache: .*{text}.* It is made anew", caplog.text)
        assert pool.filled == 0
        for index in range(SAMPLES):
            assert pool.put(index, varying_sample(index))
    with contextlib.closing(open_existing(folder)) as pool:
        assert pool.filled == SAMPLES
        assert pool.find_corrupt(np.arange(SAMPLES)).size == 0

"""Damaged stores and folders are named in an error, or rebuilt."""

import contextlib
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
    change_header,
    check_samples,
    drawn_sample,
    new_pool,
    varying_pool,
    varying_sample,
)

STORE = "datacache.store"
DAMAGE = {
    "half a header": (
        lambda folder, other: os.truncate(folder / STORE, 99),
        f"must begin with a header in JSON, which states its format. Received: .*{STORE}, without",
    ),
    "no text": (
        lambda folder, other: (folder / STORE).write_bytes(b"\xff"),
        f"must begin with a header in JSON.*{STORE}, without one",
    ),
    "another JSON": (
        lambda folder, other: (folder / STORE).write_text("[]"),
        "which states its format",
    ),
    "changed": (
        lambda folder, other: change_header(folder, store={}),
        f"must be neither modified nor renamed. Received: .*{STORE}, which was created as pool",
    ),
    "older": (
        lambda folder, other: change_header(folder, format=1),
        "format of a store must be 5. Received: format 1 in .*created by an older tfposeidon",
    ),
    "moved": (
        lambda folder, other: (shutil.rmtree(folder), shutil.copytree(other, folder)),
        "created as other",
    ),
    **{
        name: (
            lambda folder, other, by=by: os.truncate(
                folder / STORE, (folder / STORE).stat().st_size + by
            ),
            f"must be complete. Received: .*{STORE} of .* bytes, expected",
        )
        for name, by in {"short": -1, "long": 64}.items()
    },
}


def test_folders_without_a_store_are_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(
        CacheError,
        match=r"A store must have a folder of its own. Received: .*contains 'thesis.tex'",
    ):
        new_pool(tmp_path)
    folder = tmp_path / "pool"
    new_pool(folder)
    assert new_pool(folder, slots=7).slots == SAMPLES, "an existing store must keep its size"
    with pytest.raises(
        CacheError, match=r"A store must be a folder with a file datacache.store. Received: "
    ):
        Pool(tmp_path)
    change_header(folder, format=99)
    with pytest.raises(
        CacheError, match=r"The format of a store must be at most 5. Received: format 99 in .*newer"
    ):
        new_pool(folder)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_unused_stores_are_rebuilt(tmp_path, damage, caplog):
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


def test_a_rebuilt_store_remains_valid_for_open_processes(tmp_path):
    """The damaged file is replaced instead of changed, because other processes have mapped it."""
    with new_pool(tmp_path) as one:
        one.put(3, drawn_sample(3))
        change_header(tmp_path, store={})
        with new_pool(tmp_path) as other:
            assert other.filled == 0
            other.put(4, drawn_sample(4))
        one.put(5, drawn_sample(5))
        check_samples(one, np.array([3, 5]))

"""Tests the tiers of a cache with little or no free space."""

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests import drawn
from tests.datacache.caches import BATCH, SAMPLES, sample_numbers


def test_the_disk_retains_read_samples(images, tmp_path, opened):
    opened(images, disk=tmp_path / "disk").warm(progress=False)

    def half(contents, label):
        return drawn.decode(contents, label)[0][::2, ::2], label

    cache = opened(images, half, disk=tmp_path / "disk")
    pixels, _ = next(iter(cache.dataset(BATCH, shuffle=False)))
    np.testing.assert_array_equal(pixels[6], drawn.image(6)[::2, ::2])
    cache.warm(progress=False)
    assert (cache.stats().source_reads, cache.stats().disk_hits) == (0, SAMPLES)


def test_decoded_samples_survive_the_loss_of_memory(images, tmp_path, opened):
    opened(images, decoded=tmp_path / "decoded").warm(progress=False)
    cache = opened(images, decoded=tmp_path / "decoded", memory=tmp_path / "new memory")
    assert sorted(sample_numbers(cache.dataset(BATCH))) == list(range(SAMPLES))
    assert (cache.stats().source_reads, cache.stats().decoded_hits) == (0, SAMPLES)


@pytest.mark.parametrize("memory", ["some", None])
def test_samples_beyond_the_budget_are_read_through(images, tmp_path, opened, memory):
    room = 5 * (8 * 8 * 3 + 8 + 8) + 100
    cache = opened(images, budget=room, **({} if memory else {"memory": None}))
    data = cache.dataset(BATCH)
    for _ in range(3):
        assert sorted(sample_numbers(data)) == list(range(SAMPLES))
    kept = 5 if memory else 0
    assert cache.stats().memory_hits in (2 * kept, 2 * kept + 1)
    # If there is no space for sample 0, it is read once more, to determine its size.
    first = cache._tiers.pool is None or not cache._tiers.pool.has_room(np.array([0]))[0]
    assert cache.stats().source_reads == 3 * SAMPLES - 2 * kept + first
    assert cache.stats().unkept == 3 * (SAMPLES - kept)


def test_without_free_space_one_tier_is_skipped(images, opened, caplog):
    with caplog.at_level(logging.WARNING, "datacache"):
        cache = opened(images, budget=100)
    assert (
        "the cache skips a tier. A store needs space for at least one sample. "
        "Received: 100 bytes, for samples of 208" in caplog.text
    )
    assert sorted(sample_numbers(cache.dataset(BATCH))) == list(range(SAMPLES))
    assert "no store in memory" in str(cache)


def test_a_cleared_store_holds_all_samples_again(images, opened):
    """The samples have many sizes, and memory has only as much space as they need."""

    def preprocess(contents, label):
        return tf.io.decode_png(contents, 3)[: label + 1], contents

    contents = sum(path.stat().st_size + 8 for path in images.rglob("*.png"))
    pixels = sum(
        8 * 3 * min(8, number * drawn.CLASSES // SAMPLES + 1) * 3 for number in range(SAMPLES)
    )
    room = SAMPLES * 8 * 8 + contents + pixels
    cache = opened(images, preprocess, variable_shapes=True, budget=room)
    for _ in range(4):
        cache.warm(progress=False)
        assert cache._tiers.pool.filled == SAMPLES
        cache.clear()
    assert cache.stats().unkept == 0


def test_a_full_store_is_logged_once(images, opened, caplog):
    cache = opened(images, lambda contents, label: (contents, label), budget=SAMPLES * 40 + 500)
    with caplog.at_level(logging.WARNING, "datacache"):
        cache.warm(progress=False)
        cache.warm(progress=False)
    assert (
        caplog.text.count(
            f"the store {cache._tiers.pool.folder} is full, so other samples are read from"
        )
        == 1
    )


@pytest.mark.parametrize("sizes", ["equal", "many"])
def test_a_store_remains_usable_after_its_files_are_deleted(images, tmp_path, opened, sizes):
    """A cleaner of temporary files may delete a store; other processes then create another one."""

    def preprocess(contents, label):
        pixels, label = drawn.decode(contents, label)
        return pixels[: label + 1] if sizes == "many" else pixels, label

    cache = opened(images, preprocess, variable_shapes=sizes == "many")
    batches = iter(cache.dataset(BATCH, shuffle=False))
    read = [next(batches)]
    for file in cache._tiers.pool.folder.iterdir():
        file.unlink()
    read += batches
    again = opened(images, preprocess, variable_shapes=sizes == "many")
    for data in (cache.dataset(BATCH, shuffle=False), again.dataset(BATCH, shuffle=False)):
        for batch, expected in zip(data, read, strict=True):
            tf.nest.map_structure(np.testing.assert_array_equal, batch, expected)


FULL = """
import pathlib, sys
import numpy as np, tensorflow as tf
import datacache
from datacache.sources.source import RandomSource

class Numbers(RandomSource):
    identity, signature = "numbers", [tf.TensorSpec([], tf.int64)]
    def __len__(self): return 40
    def name(self, sample): return str(sample)
    def read(self, sample): return [np.array(sample)]
    def decode(self, number): return number

root = pathlib.Path({folder!r})
sizes = {{"equal": lambda n: tf.fill([2000], n), "many": lambda n: tf.fill([1000 + n], n)}}
for free in (0, 4096, 16384, 65536, 200_000):
    (root / "other").write_bytes(bytes(2**19 - free))
    for level in ("memory", "disk", "decoded"):
        for kind, preprocess in sizes.items():
            for budget in ("80%", "100%"):
                folders = {{"memory": None}} | {{level: root / "cache"}}
                with datacache.Cache(
                    Numbers(), preprocess, variable_shapes=kind == "many", budget=budget, **folders
                ) as cache:
                    for _ in range(2):
                        read = [int(n[0]) for b in cache.dataset(7, shuffle=False) for n in b]
                        assert read == list(range(40)), (free, level, kind, budget, read)
                for file in (root / "cache").rglob("*"):
                    file.is_dir() or file.unlink()
print("all read")
"""


@pytest.mark.slow
def test_a_full_file_system_is_read_through(tmp_path):
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    inside = f"mount -t tmpfs -o size=512k none {tmp_path} && exec {sys.executable} -"
    done = subprocess.run(
        [*command, inside],
        input=FULL.format(folder=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.stdout.strip().endswith("all read"), done.stdout[-2000:] + done.stderr[-2000:]


def test_a_disk_without_space_for_a_folder_is_skipped(
    images, tmp_path, opened, caplog, monkeypatch
):
    make = os.mkdir

    def full(path, *arguments, **options):
        if "disk" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        make(path, *arguments, **options)

    monkeypatch.setattr(os, "mkdir", full)
    cache = opened(images, disk=tmp_path / "disk")
    assert sorted(sample_numbers(cache.dataset(BATCH))) == list(range(SAMPLES))
    assert "No space left" in caplog.text

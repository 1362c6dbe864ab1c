"""Work of a warm pool on a thread before anybody reads."""

import contextlib
import tempfile
from pathlib import Path

import numpy as np
import pytest

from datacache.pool import pool as pool_module
from datacache.pool.pool import Pool
from datacache.pool.spec import Layout, PoolSpec, SampleShard
from tests.datacache.pools import (
    SAMPLES,
)


@contextlib.contextmanager
def _large_pools(filled, look=True, corrupt=None):
    """A pool in memory, and the same opened by another, who has got ready."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        layout = Layout.of([np.zeros(100_000, "uint8")])
        pools = [
            Pool(
                Path(folder),
                lambda: PoolSpec(layout=layout, shard=SampleShard(samples=SAMPLES, slots=SAMPLES)),
            )
        ]
        for index in range(filled):
            pools[0].put(index, [np.full(100_000, index, "uint8")])
        if corrupt is not None:
            pools[0]._columns[0][corrupt] += 1
        pools.append(Pool(Path(folder), lambda: pools[0].spec))
        pools[1].prepare(look)
        if pools[1]._background is not None:
            pools[1]._background.join()
        yield pools
        for pool in pools:
            pool.close()


def _verified(pool):
    return ~pool._words.unverified(np.arange(SAMPLES), pool._words.array)


def _resident_kb(address):
    """Returns the resident kB of the mapping that holds an address."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        begin, is_range, end = line.partition(" ")[0].partition("-")
        if is_range and int(begin, 16) <= address < int(end, 16):
            break
    return int(next(line for line in lines if line.startswith("Rss:")).split()[1])


@pytest.mark.parametrize("filled", [SAMPLES - 1, SAMPLES])
def test_a_warm_pool_in_memory_is_mapped_ahead(filled):
    """The kernel says that all of the mapping is there before anybody reads."""
    with _large_pools(filled) as pools:
        assert (_resident_kb(pools[1]._columns[0].ctypes.data) * 1024 >= 100_000 * SAMPLES) == (
            filled == SAMPLES
        )


@pytest.mark.parametrize("look", [True, False])
def test_checksums_are_looked_at_ahead_and_what_is_corrupt_is_left_to_its_reader(look, monkeypatch):
    monkeypatch.setattr(pool_module, "STEP_BYTES", 300_000)
    with _large_pools(SAMPLES, look, corrupt=5) as pools:
        looked_at = _verified(pools[1])
        assert np.flatnonzero(~looked_at).tolist() == ([5] if look else list(range(SAMPLES)))
        assert pools[1].ready(np.arange(SAMPLES)).all()
        assert pools[1].gather_verified(np.arange(SAMPLES))[1].tolist() == [5]


def test_a_look_ahead_waits_while_somebody_reads(monkeypatch):
    monkeypatch.setattr(pool_module, "STEP_BYTES", 300_000)
    with _large_pools(SAMPLES, look=False) as (_, pool):
        steps, counts = pool.verify_in_steps(), []
        for reads in (False, True, False):
            if reads:
                pool.gather_verified(np.zeros(1, int))
            next(steps)
            counts.append(np.count_nonzero(_verified(pool)[1:]))
        assert 0 < counts[0] == counts[1] < counts[2]

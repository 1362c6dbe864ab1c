"""A thread creates the page tables of a full store before the first read."""

import tempfile
from pathlib import Path

import numpy as np
import pytest

from datacache.pool.pool import Pool
from datacache.pool.spec import Layout, PoolSpec, SampleShard
from tests.datacache.pools import SAMPLES


def _resident_kb(address):
    """Returns the resident memory, in kB, of the mapping that contains an address."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        begin, is_range, end = line.partition(" ")[0].partition("-")
        if is_range and int(begin, 16) <= address < int(end, 16):
            break
    return int(next(line for line in lines if line.startswith("Rss:")).split()[1])


@pytest.mark.parametrize("filled", [SAMPLES - 1, SAMPLES])
def test_a_warm_store_in_memory_is_mapped_in_advance(filled):
    """Before the first read, the kernel reports the whole mapping of a full store as resident."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        layout = Layout.of([np.zeros(100_000, "uint8")])
        spec = PoolSpec(layout=layout, shard=SampleShard(samples=SAMPLES, slots=SAMPLES))
        with Pool(Path(folder), lambda: spec) as writer, Pool(Path(folder)) as reader:
            for index in range(filled):
                writer.put(index, [np.full(100_000, index, "uint8")])
            reader.prepare()
            if reader._background is not None:
                reader._background.join()
            is_mapped = _resident_kb(reader._columns[0].ctypes.data) * 1024 >= 100_000 * SAMPLES
            assert is_mapped == (filled == SAMPLES)

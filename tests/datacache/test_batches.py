"""Memory of batches is used again, and made before it is asked for."""

import resource

import numpy as np
import pytest

from datacache.batches import BUFFERS, LARGE_PAGE, Buffers
from datacache.pool.spec import Layout
from tests.datacache.caches import BATCH, SAMPLES, sample_numbers


def test_buffers_begin_with_a_large_page_and_are_used_again_once_nobody_holds_them():
    buffers = Buffers(Layout.of([np.zeros((8, 8, 3), "uint8"), np.int64(0)]))
    images, labels = buffers.take(BATCH)
    address = images.ctypes.data
    assert address % LARGE_PAGE == 0
    others = [buffers.take(BATCH) for _ in range(3)]
    assert len({address, *(of[0].ctypes.data for of in others)}) == 4
    view = images[1:, 2]
    del images
    assert buffers.take(BATCH)[0].ctypes.data != address
    del labels
    assert buffers.take(BATCH)[0].ctypes.data != address
    del view
    assert buffers.take(BATCH - 1)[0].ctypes.data == address


def test_memory_of_batches_is_made_before_it_is_asked_for():
    buffers = Buffers(Layout.of([np.zeros(2**20, "uint8")]))
    buffers.prepare(3, BATCH).join()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    taken = [buffers.take(BATCH)[0] for _ in range(3)]
    for array in taken:
        array[:] = 1
    # Pages of 4 KiB that are touched for the first time would be 5376.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1000
    assert len({array.ctypes.data for array in [*taken, *buffers.take(BATCH)]}) == 4


@pytest.mark.parametrize("samples", [SAMPLES, 2])
def test_a_warm_cache_makes_the_memory_of_batches_ahead(images, opened, monkeypatch, samples):
    made = []
    monkeypatch.setattr(Buffers, "prepare", lambda _, count, samples: made.append((count, samples)))
    cache = opened(images)
    cache.dataset(BATCH)
    assert not made
    cache.warm(progress=False)
    data = cache.dataset(samples)
    assert made == [(1, SAMPLES) if samples == SAMPLES else (BUFFERS, 2)]
    assert sorted(sample_numbers(data)) == list(range(SAMPLES))

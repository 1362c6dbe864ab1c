"""Tests the reuse of the memory of batches."""

import numpy as np

from datacache.batches import HUGE_PAGE, Buffers
from datacache.pool.spec import Layout
from tests.datacache.caches import BATCH


def test_buffers_are_aligned_to_huge_pages_and_reused_after_release():
    buffers = Buffers(Layout.of([np.zeros((8, 8, 3), "uint8"), np.int64(0)]))
    images, labels = buffers.take(BATCH)
    address = images.ctypes.data
    assert address % HUGE_PAGE == 0
    others = [buffers.take(BATCH) for _ in range(3)]
    assert len({address, *(of[0].ctypes.data for of in others)}) == 4
    view = images[1:, 2]
    del images
    assert buffers.take(BATCH)[0].ctypes.data != address
    del labels
    assert buffers.take(BATCH)[0].ctypes.data != address
    del view
    assert buffers.take(BATCH - 1)[0].ctypes.data == address

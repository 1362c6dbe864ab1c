"""Copies records into batches: compiled C where it was built, else NumPy."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import Any

import numpy as np

LIBRARY = Path(__file__).with_name("_records.so")
log = logging.getLogger("tfposeidon")


def gather(records: np.ndarray, places: np.ndarray, into: np.ndarray) -> None:
    """`into[i] = records[places[i]]`; other Python threads run meanwhile.

    Args:
      records: `[n, ...]`, contiguous.
      places: `[k]` int64, each of them in `0..n-1`.
      into: `[k, ...]` of the same type and shape, contiguous.
    """
    copy = _compiled()
    if copy is None:
        np.take(records, places, axis=0, out=into, mode="clip")
        return
    places = np.ascontiguousarray(places, np.int64)
    if places.size:
        # An address is taken as it is, so what is out of range would read other memory.
        if places.min() < 0 or places.max() >= len(records):
            raise IndexError(f"`places` must be in 0..{len(records) - 1}. Received: {places.min()}..{places.max()}")
        bytes_of_one = records.nbytes // len(records)
        copy(into.ctypes.data, records.ctypes.data, bytes_of_one, places.ctypes.data, len(places))


@functools.cache
def _compiled() -> Any:
    if not LIBRARY.exists():
        log.warning("datacache: batches are copied by NumPy, which is slower: no %s. Build it: pip install .", LIBRARY)
        return None
    function = ctypes.CDLL(str(LIBRARY)).gather_records
    function.restype = None
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
    return function

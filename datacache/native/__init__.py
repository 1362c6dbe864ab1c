"""What Python would let other threads wait for: compiled C where it was built, else NumPy and Python."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
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
    library = _compiled()
    if library is None:
        np.take(records, places, axis=0, out=into, mode="clip")
        return
    places = np.ascontiguousarray(places, np.int64)
    if places.size:
        # An address is taken as it is, so what is out of range would read other memory.
        if places.min() < 0 or places.max() >= len(records):
            raise IndexError(f"`places` must be in 0..{len(records) - 1}. Received: {places.min()}..{places.max()}")
        bytes_of_one = records.nbytes // len(records)
        library.gather_records(into.ctypes.data, records.ctypes.data, bytes_of_one, places.ctypes.data, len(places))


def read_file(path: str, offset: int, length: int) -> bytes:
    """Up to `length` bytes of a file, in one call: of 32 threads that read, none waits for Python in between.

    Raises:
      OSError: If it cannot be read.
    """
    library = _compiled()
    if library is None:
        with open(path, "rb") as stream:
            stream.seek(offset)
            return stream.read(length)
    content = np.empty(length, np.uint8)
    count = library.read_file(os.fsencode(path), offset, length, content.ctypes.data)
    if count < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return content[:count].tobytes()


@functools.cache
def _compiled() -> Any:
    if not LIBRARY.exists():
        log.warning(
            "datacache: copying and reading are Python's, which is slower: no %s. Build: pip install .", LIBRARY
        )
        return None
    library = ctypes.CDLL(str(LIBRARY), use_errno=True)
    if not hasattr(library, "read_file"):
        log.warning(
            "datacache: copying and reading are Python's, which is slower: %s is old. Build: pip install .", LIBRARY
        )
        return None
    number, address = ctypes.c_int64, ctypes.c_void_p
    library.gather_records.restype, library.gather_records.argtypes = None, [address, address, number, address, number]
    library.read_file.restype, library.read_file.argtypes = number, [ctypes.c_char_p, number, number, address]
    return library

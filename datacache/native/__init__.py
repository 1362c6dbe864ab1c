"""What Python would let other threads wait for: compiled C where it was built, else NumPy and Python."""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np

LIBRARY = Path(__file__).with_name("_records.so")
log = logging.getLogger("datacache")


def gather(
    records: np.ndarray,
    places: np.ndarray,
    into: np.ndarray | None,
    checksums: np.ndarray | None = None,
) -> None:
    """`into[i] = records[places[i]]`; other Python threads run meanwhile.

    Args:
      records: `[n, ...]`, contiguous.
      places: `[k]` int64, each of them in `0..n-1`.
      into: `[k, ...]` of the same type and shape, contiguous; with `None` checksums only are taken.
      checksums: `[k]` uint32, contiguous: the CRC-32 of what came before, which goes on with the bytes of each record.

    Raises:
      IndexError: If there is no such place.
    """
    places = np.ascontiguousarray(places, np.int64)
    # An address is taken as it is, so what is out of range would read other memory.
    if places.size and (places.min() < 0 or places.max() >= len(records)):
        raise IndexError(
            f"`places` must be in 0..{len(records) - 1}. Received: {places.min()}..{places.max()}"
        )
    library = _compiled()
    if library is None or (checksums is not None and not _parts_at_a_time()):
        _gather_in_python(records, places, into, checksums)
    elif places.size:
        target = None if into is None else into.ctypes.data
        about = records.ctypes.data, records.nbytes // len(records), places.ctypes.data, len(places)
        if checksums is not None:
            library.check_records(target, *about, checksums.ctypes.data, _parts_at_a_time())
        elif into is not None:
            library.gather_records(target, *about)


def _gather_in_python(
    records: np.ndarray, places: np.ndarray, into: np.ndarray | None, checksums: np.ndarray | None
) -> None:
    if into is not None:
        np.take(records, places, axis=0, out=into, mode="clip")
    if checksums is not None:
        for i, place in enumerate(places.tolist()):
            # Of what was copied, where it was.
            record = records[place : place + 1] if into is None else into[i : i + 1]
            checksums[i] = zlib.crc32(record.view(np.uint8).data, int(checksums[i]))


def mark(
    words: np.ndarray,
    places: np.ndarray,
    seen: np.ndarray,
    agrees: np.ndarray,
    same: np.uint64,
    by: np.uint64,
) -> np.ndarray | None:
    """Marks those words, each in one piece, that still are what was seen, and sets to 0 those that do not agree.

    Args:
      words: `[n]` uint64, which other processes may write at the same time.
      places: `[k]` int64, each of them in `0..n-1`.
      seen: `[k]` uint64, what stood there.
      agrees: `[k]` bool.
      same: The bits that are compared, and kept.
      by: The others.

    Returns:
      Which still were what was seen, `[k]` bool; `None` without the compiled library, and all stay as they are.
    """
    library = _compiled()
    if library is None:
        return None
    was = np.empty(len(places), bool)
    wanted = (words, np.uint64), (places, np.int64), (seen, np.uint64), (agrees, bool)
    given = [np.ascontiguousarray(array, dtype) for array, dtype in wanted]
    library.mark_words(
        *(array.ctypes.data for array in given), int(same), int(by), was.ctypes.data, len(places)
    )
    return was


def in_memory(folder: os.PathLike[str]) -> bool:
    """Whether what lies in a folder is in memory, and nowhere else; `False` without the compiled library."""
    library = _compiled()
    return library is not None and bool(library.in_memory(os.fsencode(folder)))


def map_pages(pages: np.ndarray, write: bool = False) -> bool:
    """Makes the page tables for a part of a mapping, which begins with a page, to read or to write.

    Returns:
      Whether it was done: `False` where the kernel cannot, or without the compiled library.
    """
    library = _compiled()
    size = -(-pages.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    return library is not None and bool(library.map_pages(pages.ctypes.data, size, write))


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
def _parts_at_a_time() -> int:
    """What the processor has for checksums; none without the compiled library."""
    library = _compiled()
    return 0 if library is None else library.parts_at_a_time()


@functools.cache
def _compiled() -> Any:
    if not LIBRARY.exists():
        log.warning(
            "datacache: copying and reading are Python's, which is slower: no %s. Build: pip install .",
            LIBRARY,
        )
        return None
    library: Any = ctypes.CDLL(str(LIBRARY), use_errno=True)
    if not hasattr(library, "mark_words"):
        log.warning(
            "datacache: copying and reading are Python's, which is slower: %s is old. Build: pip install .",
            LIBRARY,
        )
        return None
    number, address = ctypes.c_int64, ctypes.c_void_p
    library.gather_records.restype, library.gather_records.argtypes = (
        None,
        [address, address, number, address, number],
    )
    check = library.check_records
    check.restype, check.argtypes = None, [*library.gather_records.argtypes, address, number]
    # It is over sooner than another thread would have given Python back.
    marking = library.mark_words = ctypes.PyDLL(str(LIBRARY)).mark_words
    bits = ctypes.c_uint64
    marking.restype, marking.argtypes = (
        None,
        [address, address, address, address, bits, bits, address, number],
    )
    library.in_memory.restype, library.in_memory.argtypes = number, [ctypes.c_char_p]
    library.map_pages.restype, library.map_pages.argtypes = number, [address, number, number]
    library.parts_at_a_time.restype, library.parts_at_a_time.argtypes = number, []
    library.read_file.restype, library.read_file.argtypes = (
        number,
        [ctypes.c_char_p, number, number, address],
    )
    return library

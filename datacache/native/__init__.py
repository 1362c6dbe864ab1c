"""Runs operations in C that would hold the GIL for a long time in Python.

`ctypes` releases the GIL during each call, so that several threads copy batches concurrently.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

LIBRARY = Path(__file__).with_name("_records.so")


def gather(
    records: np.ndarray,
    indices: np.ndarray,
    into: np.ndarray | None,
    checksums: np.ndarray | None = None,
) -> None:
    """Copies `records[indices[i]]` to `into[i]`, updates `checksums[i]` with it, or does both."""
    indices = np.ascontiguousarray(indices, np.int64)
    # The library does not check bounds, and would access memory outside of `records`.
    if indices.size and (indices.min() < 0 or indices.max() >= len(records)):
        raise IndexError(
            f"`indices` must be in 0..{len(records) - 1}. Received: "
            f"{indices.min()}..{indices.max()}"
        )
    target = None if into is None else into.ctypes.data
    record_bytes = records.nbytes // max(1, len(records))
    given = target, records.ctypes.data, record_bytes, indices.ctypes.data, len(indices)
    if checksums is not None:
        _library().check_records(*given, checksums.ctypes.data, checksum_lanes())
    elif into is not None:
        _library().gather_records(*given)


def populate_pages(pages: np.ndarray) -> bool:
    """Creates the page tables of a part of a mapping; returns whether the kernel supports it."""
    size = -(-pages.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    return bool(_library().map_pages(pages.ctypes.data, size))


class FileStatus(NamedTuple):
    """Properties of a file that change with its content.

    `time_ns` is the modification time, which programs may set. `inode_ns` is the time of the last
    status change. `inode` is the inode number modulo 2**63.
    """

    size: int
    time_ns: int
    inode_ns: int
    inode: int

    @classmethod
    def of(cls, about: os.stat_result) -> FileStatus:
        return cls(about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino % 2**63)

    def is_of(self, other: FileStatus) -> bool:
        """Returns whether both statuses refer to the same version of a file's content."""
        # A moved file has another change time, and some file systems change inode numbers. A file
        # that was replaced by a rename differs in both.
        same_inode = self.inode == other.inode or self.inode_ns == other.inode_ns
        return self[:2] == other[:2] and same_inode


def read_file(path: str, offset: int, length: int) -> tuple[bytes, FileStatus]:
    """Reads up to `length` bytes in one call; returns the bytes, and the status after the read."""
    into, status = np.empty(length, np.uint8), (ctypes.c_int64 * 4)()
    count = _library().read_file(os.fsencode(path), offset, length, into.ctypes.data, status)
    if count < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return into[:count].tobytes(), FileStatus(status[0], status[1], status[2], status[3] % 2**63)


def crc32c(content: bytes) -> int:
    """Returns the CRC-32C of bytes, as used in TFRecord files."""
    return _library().crc32c(content, len(content))


@functools.cache
def checksum_lanes() -> int:
    """Returns how many lanes the CPU multiplies in parallel for checksums; 0 if unsupported."""
    return _library().parts_at_a_time()


@functools.cache
def _library() -> Any:
    number, address = ctypes.c_int64, ctypes.c_void_p
    records = [address, address, number, address, number]
    try:
        library = ctypes.CDLL(str(LIBRARY), use_errno=True)
        # Declare all types, because by default `ctypes` truncates addresses to 32 bits.
        for name, result, arguments in (
            ("gather_records", None, records),
            ("check_records", None, [*records, address, number]),
            ("map_pages", number, [address, number]),
            ("parts_at_a_time", number, []),
            ("read_file", number, [ctypes.c_char_p, number, number, address, address]),
            ("crc32c", number, [ctypes.c_char_p, number]),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (AttributeError, OSError) as error:
        raise ImportError(
            f"The library of datacache must be built for this machine. Received: {error}. Run in "
            "tfposeidon's folder: pip install ."
        ) from error
    return library

"""Runs operations that would hold the GIL for long: in C if compiled, otherwise in NumPy.

`ctypes` releases the GIL during each call, so that several threads copy batches concurrently.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

LIBRARY = Path(__file__).with_name("_records.so")
log = logging.getLogger("datacache")


def gather(
    records: np.ndarray,
    indices: np.ndarray,
    into: np.ndarray | None,
    checksums: np.ndarray | None = None,
) -> None:
    """Copies `records[indices[i]]` to `into[i]`, updates `checksums[i]` with it, or does both."""
    indices = np.ascontiguousarray(indices, np.int64)
    # The library does not check bounds: an invalid index would access memory outside of `records`.
    if indices.size and (indices.min() < 0 or indices.max() >= len(records)):
        raise IndexError(
            f"`indices` must be in 0..{len(records) - 1}. Received: "
            f"{indices.min()}..{indices.max()}"
        )
    library = _compiled()
    if library is None or (checksums is not None and not checksum_lanes()):
        _gather_in_python(records, indices, into, checksums)
    elif indices.size:
        target = None if into is None else into.ctypes.data
        record_bytes = records.nbytes // len(records)
        given = records.ctypes.data, record_bytes, indices.ctypes.data, len(indices)
        if checksums is not None:
            library.check_records(target, *given, checksums.ctypes.data, checksum_lanes())
        elif into is not None:
            library.gather_records(target, *given)


def _gather_in_python(
    records: np.ndarray, indices: np.ndarray, into: np.ndarray | None, checksums: np.ndarray | None
) -> None:
    if into is not None:
        # Do not use mode="raise", with which NumPy would copy to a buffer first. `gather` has
        # checked the indices.
        np.take(records, indices, axis=0, out=into, mode="clip")
    if checksums is not None:
        for i, index in enumerate(indices.tolist()):
            # Use the copy if there is one, because another process may rewrite the record
            # concurrently. Use a slice, because a scalar cannot be viewed as bytes.
            record = records[index : index + 1] if into is None else into[i : i + 1]
            checksums[i] = zlib.crc32(record.view(np.uint8).data, int(checksums[i]))


def populate_pages(pages: np.ndarray, write: bool = False) -> bool:
    """Creates the page tables of a part of a mapping; returns whether they were created."""
    library = _compiled()
    # The library returns 0 before Linux 5.14.
    size = -(-pages.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    return library is not None and bool(library.map_pages(pages.ctypes.data, size, write))


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
        # Require only the inode or the change time to be equal: a file that was only moved has
        # another change time, and some file systems change inode numbers at any time. A file that
        # was replaced by a rename differs in both.
        same_inode = self.inode == other.inode or self.inode_ns == other.inode_ns
        return self[:2] == other[:2] and same_inode


def read_file(path: str, offset: int, length: int) -> tuple[bytes, FileStatus]:
    """Reads up to `length` bytes in one call; returns them and the file's status afterwards."""
    # Python would make four system calls and release the GIL at each. Of 32 reading threads, most
    # would wait for the GIL.
    library = _compiled()
    if library is None:
        with open(path, "rb") as stream:
            stream.seek(offset)
            content, about = stream.read(length), os.fstat(stream.fileno())
        return content, FileStatus.of(about)
    into, status = np.empty(length, np.uint8), (ctypes.c_int64 * 4)()
    count = library.read_file(os.fsencode(path), offset, length, into.ctypes.data, status)
    if count < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return into[:count].tobytes(), FileStatus(status[0], status[1], status[2], status[3] % 2**63)


def crc32c(content: bytes) -> int:
    """Returns the CRC-32C of bytes, as used in TFRecord files."""
    if library := _compiled():
        return library.crc32c(content, len(content))
    checksum = 0xFFFFFFFF
    for byte in content:
        checksum = checksum >> 8 ^ _crc32c_table()[(checksum ^ byte) & 0xFF]
    return checksum ^ 0xFFFFFFFF


@functools.cache
def _crc32c_table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [value >> 1 ^ (0x82F63B78 * (value & 1)) for value in table]
    return table


@functools.cache
def checksum_lanes() -> int:
    """Returns how many lanes the CPU multiplies in parallel for checksums; 0 if unsupported."""
    return library.parts_at_a_time() if (library := _compiled()) else 0


@functools.cache
def _compiled() -> Any:
    """Loads the compiled library; logs a warning and returns `None` if that fails."""
    cause = f"{LIBRARY} is missing"
    if LIBRARY.exists():
        try:
            library = ctypes.CDLL(str(LIBRARY), use_errno=True)
            number, address = ctypes.c_int64, ctypes.c_void_p
            records = [address, address, number, address, number]
            # Declare all types, because by default `ctypes` truncates addresses to 32 bits.
            for name, result, arguments in (
                ("gather_records", None, records),
                ("check_records", None, [*records, address, number]),
                ("map_pages", number, [address, number, number]),
                ("parts_at_a_time", number, []),
                ("read_file", number, [ctypes.c_char_p, number, number, address, address]),
                ("crc32c", number, [ctypes.c_char_p, number]),
            ):
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
            return library
        except (AttributeError, OSError) as error:
            # The library is outdated, or was compiled for another processor or a newer C library.
            cause = f"{LIBRARY} cannot be loaded ({error})"
    log.warning(
        "datacache: copies and reads run in Python, which is slower: %s. Build the library: "
        "pip install .",
        cause,
    )
    return None

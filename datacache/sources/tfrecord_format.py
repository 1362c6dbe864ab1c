"""Random access to the records of TFRecord files."""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import threading
from collections.abc import Callable

import numpy as np

from datacache.native import FileStatus, crc32c
from datacache.pool.index import Index
from datacache.sources.files import read_listed, refuse_changed

LENGTH_BYTES, HEADER_BYTES, CHECKSUM_BYTES = 8, 12, 4
"""Bytes of a TFRecord: of its length, of the length with its checksum, and of the checksum after
the content."""


class TfRecords:
    """Records of a TFRecord file by index."""

    def __init__(self, path: str, skip: int, take: int, listed: FileStatus) -> None:
        self._path, self._skip, self._listed = path, skip, listed
        self._lock = threading.Lock()
        # Offset of the content and length of each record, zeros if unknown. They are private to
        # this process until a store for them exists.
        self._entries = np.zeros((take, 2), np.int64)
        self._lock_index: Callable[[], contextlib.AbstractContextManager[None]] = (
            contextlib.nullcontext
        )

    @classmethod
    def known(cls, path: str, entries: np.ndarray, listed: FileStatus) -> TfRecords:
        """Returns all records of a file from their known offsets and lengths."""
        records = cls(path, 0, len(entries), listed)
        records._entries = entries
        return records

    def keep_index(self, index: Index, number: int, end: int) -> None:
        """Uses the records' entries of a shared index, and adds new ones to it."""
        known, self._entries = self._entries, index.entries[end - len(self._entries) : end]
        self._lock_index = functools.partial(index.locked_part, number)
        if known.any() and not self._entries.any():
            self._note(known)

    def read(self, record: int) -> bytes:
        """Returns the content of a record."""
        found = self._record(record)
        if found is None:
            with self._lock, self._lock_index():
                # Another thread or process may have found it by now.
                found = self._record(record)
                if found is None:
                    self._note(find_records(self._path, self._skip, len(self._entries)))
                    found = self._record(record)
        if found is None:
            refuse_changed(self._path, FileStatus.of(os.stat(self._path)), self._listed)
            raise OSError(f"{self._path} ends before record {record}")
        content, checksum = found[HEADER_BYTES:-CHECKSUM_BYTES], found[-CHECKSUM_BYTES:]
        checksums = found[LENGTH_BYTES:HEADER_BYTES], checksum
        if checksums != (masked_checksum(found[:LENGTH_BYTES]), masked_checksum(content)):
            raise OSError(f"{self._path} is damaged at record {record}")
        return content

    def _record(self, record: int) -> bytes | None:
        """Returns a record with its framing, or `None` if its offset is unknown."""
        offset, length = self._entries[record - self._skip].tolist()
        if not HEADER_BYTES <= offset <= offset + length <= self._listed.size - CHECKSUM_BYTES:
            return None
        found = read_listed(
            self._path,
            offset - HEADER_BYTES,
            HEADER_BYTES + length + CHECKSUM_BYTES,
            self._listed,
        )
        # An invalid index points to something else.
        return found if found[:LENGTH_BYTES] == struct.pack("<Q", length) else None

    def _note(self, entries: np.ndarray) -> None:
        # An entry is valid once it has an offset, and other processes read while this one writes.
        self._entries[:, 1] = entries[:, 1]
        self._entries[:, 0] = entries[:, 0]


def masked_checksum(content: bytes) -> bytes:
    """Returns the checksum of TFRecord files for a content or its length."""
    checksum = crc32c(content)
    return struct.pack("<I", ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def find_damage(path: str) -> str | None:
    """Returns a description of a file's first damage, or `None`."""
    try:
        records = TfRecords.known(path, find_all_records(path), FileStatus.of(os.stat(path)))
        for record in range(len(records._entries)):
            records.read(record)
    except OSError as error:
        return str(error)
    return None


def find_all_records(path: str) -> np.ndarray:
    """Returns offset and length of all records' contents, `[records, 2]` int64, in bytes.

    It reads only the headers of records.
    """
    size, offset = os.path.getsize(path), 0
    entries: list[tuple[int, int]] = []
    with open(path, "rb", buffering=0) as stream:
        while offset < size:
            header = os.pread(stream.fileno(), HEADER_BYTES, offset)
            if not any(header):
                # The file was extended beyond the written data; no checksum is 0.
                raise OSError(f"{path} has zeros where record {len(entries)} should begin")
            (length,) = struct.unpack("<Q", header[:LENGTH_BYTES].ljust(LENGTH_BYTES, b"\0"))
            entries.append((offset + HEADER_BYTES, length))
            offset += HEADER_BYTES + length + CHECKSUM_BYTES
    if offset != size:
        raise OSError(f"{path} ends within record {len(entries) - 1}")
    return np.array(entries, np.int64).reshape(-1, 2)


def find_records(path: str, skip: int, take: int) -> np.ndarray:
    """Returns offset and length of records' contents, `[take, 2]` int64, in bytes.

    Rows are zeros if the file ends before them. It reads only the headers of records.
    """
    size, offset = os.path.getsize(path), 0
    entries = np.zeros((take, 2), np.int64)
    with open(path, "rb") as stream:
        for record in range(skip + take):
            if offset + HEADER_BYTES > size:
                break
            stream.seek(offset)
            (length,) = struct.unpack("<Q", stream.read(LENGTH_BYTES))
            if record >= skip:
                entries[record - skip] = offset + HEADER_BYTES, length
            offset += HEADER_BYTES + length + CHECKSUM_BYTES
    return entries

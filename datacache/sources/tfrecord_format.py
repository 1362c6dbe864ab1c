"""Reads records of TFRecord files by index."""

from __future__ import annotations

import os
import struct
import threading

import numpy as np

from datacache.native import FileStatus, crc32c
from datacache.sources.source import read_listed, refuse_changed

LENGTH_BYTES, HEADER_BYTES, CHECKSUM_BYTES = 8, 12, 4
"""Sizes in bytes of the parts of a TFRecord: the length, the length with its checksum, and the
checksum after the content."""


class TfRecords:
    """Records of a TFRecord file by index.

    `entries` are the offset and length of each record's content, `[records, 2]` int64. Without
    `entries`, the first read searches the file for its records.
    """

    def __init__(
        self, path: str, skip: int, take: int, listed: FileStatus, entries: np.ndarray | None = None
    ) -> None:
        self.path, self.skip, self.take, self.listed = path, skip, take, listed
        self._entries, self._lock = entries, threading.Lock()

    def read(self, record: int) -> bytes:
        # Only one thread searches the file.
        with self._lock:
            if self._entries is None:
                refuse_changed(self.path, FileStatus.of(os.stat(self.path)), self.listed)
                self._entries = find_records(self.path)
            entries = self._entries
        if record >= len(entries):
            raise OSError(f"{self.path} ends before record {record}")
        offset, length = entries[record].tolist()
        size = HEADER_BYTES + length + CHECKSUM_BYTES
        found = read_listed(self.path, offset - HEADER_BYTES, size, self.listed)
        content, checksum = found[HEADER_BYTES:-CHECKSUM_BYTES], found[-CHECKSUM_BYTES:]
        checksums = found[LENGTH_BYTES:HEADER_BYTES], checksum
        if checksums != (masked_checksum(found[:LENGTH_BYTES]), masked_checksum(content)):
            raise OSError(f"{self.path} is damaged at record {record}")
        return content


def masked_checksum(content: bytes) -> bytes:
    """Returns the checksum that TFRecord files store for a content or its length, 4 bytes."""
    checksum = crc32c(content)
    return struct.pack("<I", ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def find_damage(path: str) -> str | None:
    """Returns a description of a file's first damage, or `None`."""
    try:
        entries, listed = find_records(path), FileStatus.of(os.stat(path))
        records = TfRecords(path, 0, len(entries), listed, entries)
        for record in range(len(entries)):
            records.read(record)
    except OSError as error:
        return str(error)
    return None


def find_records(path: str) -> np.ndarray:
    """Returns the offset and length of each record's content in bytes, `[records, 2]` int64."""
    entries: list[tuple[int, int]] = []
    size, begin = os.path.getsize(path), 0
    with open(path, "rb", buffering=0) as stream:
        while begin < size:
            header = os.pread(stream.fileno(), HEADER_BYTES, begin)
            if not any(header):
                # Zeros are not a valid header, so the file was extended beyond the written data.
                raise OSError(f"{path} has zeros where record {len(entries)} should begin")
            (length,) = struct.unpack("<Q", header[:LENGTH_BYTES].ljust(LENGTH_BYTES, b"\0"))
            entries.append((begin + HEADER_BYTES, length))
            begin += HEADER_BYTES + length + CHECKSUM_BYTES
    if begin > size:
        raise OSError(f"{path} ends within record {len(entries) - 1}")
    return np.array(entries, np.int64).reshape(-1, 2)

"""Random access to the records of TFRecord files, whose offsets are stored with their samples."""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from datacache.errors import NoRoomError
from datacache.native import FileStatus, crc32c
from datacache.pool.folder import INDEX
from datacache.sources.source import read_listed, refuse_changed
from datacache.system.access import Directory
from datacache.system.descriptors import Descriptor, closed_on_fork, lock_byte
from datacache.system.room import means_full, reserve

LENGTH_BYTES, HEADER_BYTES, CHECKSUM_BYTES = 8, 12, 4
"""Bytes of a TFRecord: of its length, of the length with its checksum, and of the checksum after
the content."""
ENTRY_BYTES = 16
"""Bytes of an offset and a length."""


class Index:
    """The `index` file of a store, shared by all processes.

    `entries` has offset and length of each record in its file, `[records, 2]` int64. No record
    starts at 0, which marks an unknown offset.
    """

    def __init__(self, folder: Path, records: int) -> None:
        self._folder = folder
        size = records * ENTRY_BYTES
        with self._open() as handle:
            try:
                # Both do nothing for a complete file, and complete the file of a killed process.
                os.ftruncate(handle.fileno(), size)
                reserve(handle, 0, size)
            except OSError as error:
                if not means_full(error):
                    raise
                raise NoRoomError(
                    f"A record index needs {size} bytes. Received: {folder}, without this space."
                ) from error
            self.entries = np.ndarray((records, 2), np.int64, mmap.mmap(handle.fileno(), size))

    @contextlib.contextmanager
    def locked_part(self, part: int) -> Iterator[None]:
        """Locks a part of the index against concurrent searches for its records."""
        with contextlib.ExitStack() as stack:
            # If the store has been removed, there is no lock, and each process searches on its own.
            with contextlib.suppress(FileNotFoundError):
                lock_byte(stack.enter_context(closed_on_fork(self._open)), part, wait=True)
            yield

    def _open(self) -> Descriptor:
        with Directory(self._folder, "removed") as directory:
            return directory.open(INDEX, make=True)


class TfRecords:
    """Records of a TFRecord file by index, of which `entries` has known offsets and lengths."""

    def __init__(
        self, path: str, skip: int, take: int, listed: FileStatus, entries: np.ndarray | None = None
    ) -> None:
        self._path, self._skip, self._listed = path, skip, listed
        self._lock = threading.Lock()
        # Offset of the content and length of each record, zeros if unknown. They are private to
        # this process until a store for them exists.
        self._entries = np.zeros((take, 2), np.int64) if entries is None else entries
        self._lock_index: Callable[[], contextlib.AbstractContextManager[None]] = (
            contextlib.nullcontext
        )

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
        size = HEADER_BYTES + length + CHECKSUM_BYTES
        found = read_listed(self._path, offset - HEADER_BYTES, size, self._listed)
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
        entries, listed = find_all_records(path), FileStatus.of(os.stat(path))
        records = TfRecords(path, 0, len(entries), listed, entries)
        for record in range(len(entries)):
            records.read(record)
    except OSError as error:
        return str(error)
    return None


def _headers(path: str) -> Iterator[tuple[int, int, bool]]:
    """Yields offset and length of each record's content, and whether its header is written."""
    size, offset = os.path.getsize(path), 0
    with open(path, "rb", buffering=0) as stream:
        while offset < size:
            header = os.pread(stream.fileno(), HEADER_BYTES, offset)
            (length,) = struct.unpack("<Q", header[:LENGTH_BYTES].ljust(LENGTH_BYTES, b"\0"))
            yield offset + HEADER_BYTES, length, any(header)
            offset += HEADER_BYTES + length + CHECKSUM_BYTES


def find_all_records(path: str) -> np.ndarray:
    """Returns the offset and length of each record's content in bytes, `[records, 2]` int64."""
    entries: list[tuple[int, int]] = []
    end = 0
    for offset, length, is_written in _headers(path):
        if not is_written:
            # The file was extended beyond the written data; no checksum is 0.
            raise OSError(f"{path} has zeros where record {len(entries)} should begin")
        entries.append((offset, length))
        end = offset + length + CHECKSUM_BYTES
    if end != os.path.getsize(path):
        raise OSError(f"{path} ends within record {len(entries) - 1}")
    return np.array(entries, np.int64).reshape(-1, 2)


def find_records(path: str, skip: int, take: int) -> np.ndarray:
    """Returns offsets and lengths of some records; zeros if the file ends before them."""
    size, entries = os.path.getsize(path), np.zeros((take, 2), np.int64)
    for row, (offset, length, _) in enumerate(itertools.islice(_headers(path), skip, skip + take)):
        # A damaged length may not even fit into 64 bits.
        if offset + length <= size:
            entries[row] = offset, length
    return entries

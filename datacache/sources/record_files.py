"""Reads samples from records in files by their index, such as examples in TFRecord files."""

from __future__ import annotations

import glob
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from datacache.native import FileStatus, crc32c
from datacache.sources.source import (
    RandomSource,
    SourceError,
    contents_digest,
    digest,
    read_listed,
    refuse_changed,
)

LENGTH_BYTES, HEADER_BYTES, CHECKSUM_BYTES = 8, 12, 4
"""Sizes in bytes of the parts of a TFRecord: the length, the length with its checksum, and the
checksum after the content."""
SEARCHES = 32
"""Number of files searched concurrently: on a network file system, each read waits for a reply."""


class RecordSource(RandomSource):
    """Records of files by index."""

    def __init__(self, files: Sequence[Any], identity: dict[str, Any]) -> None:
        self._files, self._ends = files, np.cumsum([file.take for file in files])
        described = [
            (os.path.basename(file.path), file.skip, file.take, *file.listed[:2]) for file in files
        ]
        self.identity = identity | {
            "files": digest(described),
            "contents": contents_digest(len(files), lambda i: (files[i].path, files[i].listed)),
        }
        self.signature: Sequence[Any] = [tf.TensorSpec([], tf.string)]

    def __len__(self) -> int:
        return int(self._ends[-1])

    @override
    def name(self, sample: int) -> str:
        file, record = self._locate(sample)
        return f"record {record} of {os.path.basename(self._files[file].path)}"

    @override
    def read(self, sample: int) -> list[np.ndarray]:
        file, record = self._locate(sample)
        return [np.array(self._files[file].read(record), object)]

    def _locate(self, sample: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._ends, sample, side="right"))
        before = int(self._ends[file - 1]) if file else 0
        return file, sample - before + self._files[file].skip


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
        if checksums != (_masked_checksum(found[:LENGTH_BYTES]), _masked_checksum(content)):
            raise OSError(f"{self.path} is damaged at record {record}")
        return content


class RecordFilesSource(RecordSource):
    """Records of TFRecord files; see `from_tfrecords`."""

    def __init__(self, paths: Sequence[str], features: Mapping[str, Any] | None) -> None:
        self._features = None if features is None else dict(features)
        with ThreadPoolExecutor(SEARCHES) as threads:
            files = list(threads.map(_searched, paths))
        if not any(file.take for file in files):
            raise SourceError(
                f"A source must have samples. Received: {len(paths)} TFRecord file(s) without "
                f"records, the first of them {os.path.basename(paths[0])}. Pass other files."
            )
        super().__init__(files, {"kind": "tfrecords", "features": repr(features)})

    def __str__(self) -> str:
        return f"{len(self._files)} TFRecord file(s)"

    @override
    def decode(self, *stored: Any) -> Any:
        if self._features is None:
            return stored[0]
        return tf.io.parse_single_example(stored[0], self._features)


def from_tfrecords(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    features: Mapping[str, Any] | None = None,
) -> RecordFilesSource:
    """Creates a source from the examples in TFRecord files.

    `preprocess` receives a dictionary of the features of an example, or without `features` the
    bytes of a record. Records are read by index. Opening the source reads the header of each
    record, which takes a few microseconds on a local disk. Checksums within the files are verified,
    as by `tf.data`.

    Args:
      files: Pattern such as `"/data/train-*"`, the path of one file, or a sequence of paths. Files
        that match a pattern are sorted by name.
      features: Features by name, as for `tf.io.parse_single_example`; `None` disables parsing.

    Returns:
      Source of all records, file by file.

    Raises:
      SourceError: If no file is found, no file has a record, or a file is compressed, truncated or
        not a TFRecord file.

    Example::

        features = {
            "image/encoded": tf.io.FixedLenFeature([], tf.string),
            "image/class/label": tf.io.FixedLenFeature([], tf.int64),
        }
        source = datacache.from_tfrecords("/data/imagenet/train-*", features)
    """
    if isinstance(files, str | os.PathLike):
        pattern = os.path.expanduser(files)
        # An existing file takes precedence over a pattern.
        paths = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern))
    else:
        paths = [os.path.expanduser(path) for path in files]
    if not paths:
        raise SourceError(
            f"`files` must match at least one file. Received: files={files!r}, which matches none. "
            "Pass a pattern or the path of existing files."
        )
    return RecordFilesSource(paths, features)


def _searched(path: str) -> TfRecords:
    try:
        # Read the status before the search, so that readers detect a change in between.
        listed = FileStatus.of(os.stat(path))
        entries = find_records(path)
        return TfRecords(path, 0, len(entries), listed, entries)
    except OSError as error:
        raise SourceError(
            f"TFRecord files must be complete and uncompressed. Received: {error}. Copy or write "
            f"{path} again."
        ) from error


def _masked_checksum(content: bytes) -> bytes:
    """Returns the checksum that TFRecord files store for a content or its length, 4 bytes."""
    checksum = crc32c(content)
    return struct.pack("<I", ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF)


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

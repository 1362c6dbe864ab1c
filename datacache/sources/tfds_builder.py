"""Splits that tensorflow-datasets has prepared, read by number straight from their files."""

from __future__ import annotations

import os
import struct
import threading
from typing import Any

import numpy as np
import tensorflow as tf

from datacache.sources.source import SourceError, digest

LENGTH, CHECKED_LENGTH, CHECKSUM = 8, 12, 4
"""Bytes of a TFRecord's length, of that with its checksum, and of the checksum behind the content."""


class TfdsSource:
    """See `from_tfds`."""

    def __init__(self, builder: Any, split: str, decoders: Any) -> None:
        self._features, self._decoders = builder.info.features, decoders
        instructions = builder.info.splits[split].file_instructions
        read = _SHARDS.get(builder.info.file_format.value)
        if read is None:
            raise SourceError(
                f"Splits must be in {' or '.join(_SHARDS)} files. Received: {builder.info.file_format.value} for "
                f"{builder.info.full_name}. Prepare it with one of those as `file_format`."
            )
        self._shards = [(read(part.filename), part.skip) for part in instructions]
        self._names = [os.path.basename(part.filename) for part in instructions]
        self._ends = np.cumsum([part.examples_in_shard if part.take < 0 else part.take for part in instructions])
        files = [(os.path.basename(p.filename), os.path.getsize(p.filename), p.skip, p.take) for p in instructions]
        times = [os.stat(p.filename).st_mtime_ns for p in instructions]
        name = builder.info.full_name
        self.identity = {"kind": "tfds", "name": name, "files": digest([files, times]), "decoders": repr(decoders)}
        self.signature = [tf.TensorSpec([], tf.string)]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __str__(self) -> str:
        return f"{self.identity['name']} of tensorflow-datasets"

    def name(self, sample: int) -> str:
        shard, record = self._place(sample)
        return f"record {record} of {self._names[shard]}"

    def read(self, sample: int) -> list[np.ndarray]:
        shard, record = self._place(sample)
        return [np.array(self._shards[shard][0].read(record), object)]

    def decode(self, *stored: Any) -> Any:
        return self._features.deserialize_example(stored[0], decoders=self._decoders)

    def _place(self, sample: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._ends, sample, side="right"))
        before = int(self._ends[shard - 1]) if shard else 0
        return shard, sample - before + self._shards[shard][1]


def from_tfds(builder: Any, split: str, *, decoders: Any = None, **arguments: Any) -> TfdsSource:
    """A split of a tensorflow-datasets builder: `preprocess` receives the dictionary of its features.

    Records are read by number from the files that `download_and_prepare` left (TFRecord or ArrayRecord); where
    TFRecords begin is found once per shard and process.

    Args:
      builder: Its name, or the builder itself.
      split: With slices, as in `tfds.load`: "train", "train[:80%]".
      decoders: As in `tfds.load`; `tfds.decode.SkipDecoding()` leaves images to `preprocess`.
      arguments: For `tfds.builder`, with a name: `data_dir`, `config`.

    Raises:
      ImportError: If tensorflow-datasets is missing.
      SourceError: If the split is not prepared, or in files that cannot be read by number.
    """
    if isinstance(builder, str):
        try:
            import tensorflow_datasets as tfds
        except ModuleNotFoundError as error:
            raise ImportError(
                f"from_tfds needs tensorflow-datasets ({error}). Run: pip install tfposeidon[tfds]"
            ) from error
        builder = tfds.builder(builder, **arguments)
    if not builder.is_prepared():
        raise SourceError(
            f"A split must be prepared before it is cached. Received: {builder.info.full_name}, not prepared in "
            f"{builder.data_path}. Call builder.download_and_prepare() once, or pass `data_dir`."
        )
    return TfdsSource(builder, split, decoders)


class _TfRecords:
    """A file of TFRecords by number."""

    def __init__(self, path: str) -> None:
        self._path, self._lock = path, threading.Lock()
        self._offsets: list[tuple[int, int]] = []

    def read(self, record: int) -> bytes:
        with self._lock:
            if not self._offsets:
                self._offsets = _offsets(self._path)
        if record >= len(self._offsets):
            raise OSError(f"{self._path} ends before record {record}: it has {len(self._offsets)}")
        offset, length = self._offsets[record]
        with open(self._path, "rb") as stream:
            stream.seek(offset)
            content = stream.read(length)
        if len(content) < length:
            raise OSError(f"{self._path} ends within record {record}")
        return content


class _ArrayRecords:
    """A file of ArrayRecords by number."""

    def __init__(self, path: str) -> None:
        self._path, self._lock = path, threading.Lock()
        self._reader: Any = None

    def read(self, record: int) -> bytes:
        from array_record.python.array_record_module import ArrayRecordReader

        with self._lock:
            if self._reader is None:
                self._reader = ArrayRecordReader(self._path)
        return self._reader.read([record])[0]


_SHARDS: dict[str, Any] = {"tfrecord": _TfRecords, "array_record": _ArrayRecords}


def _offsets(path: str) -> list[tuple[int, int]]:
    """Where each record's content begins, and its bytes."""
    size, found, offset = os.path.getsize(path), [], 0
    with open(path, "rb") as stream:
        while offset + CHECKED_LENGTH <= size:
            stream.seek(offset)
            (length,) = struct.unpack("<Q", stream.read(LENGTH))
            found.append((offset + CHECKED_LENGTH, length))
            offset += CHECKED_LENGTH + length + CHECKSUM
    return found

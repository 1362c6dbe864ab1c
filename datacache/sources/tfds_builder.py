"""Splits that tensorflow-datasets has prepared, read by number straight from their files."""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from datacache.native import read_file
from datacache.pool.index import Index
from datacache.sources.source import SourceError, digest

LENGTH, CHECKED_LENGTH, CHECKSUM = 8, 12, 4
"""Bytes of a TFRecord's length, of that with its checksum, and of the checksum behind the content."""


class TfdsSource:
    """See `from_tfds`."""

    def __init__(self, builder: Any, split: Any, decoders: Any) -> None:
        self._features, self._decoders = _partly(builder.info.features, decoders)
        parts, read = _parts(builder, split), _shard_type(builder)
        self._shards = [(read(part.filename, part.skip, part.take), part.skip) for part in parts]
        self._names = [os.path.basename(part.filename) for part in parts]
        self._ends = np.cumsum([part.take for part in parts])
        # What decoders do is in the graph, and their names in Python are another in each process.
        files = [
            (os.path.basename(part.filename), part.skip, part.take, *_state(part.filename))
            for part in parts
        ]
        self.identity = {"kind": "tfds", "name": builder.info.full_name, "files": digest(files)}
        self.signature: Sequence[Any] = [tf.TensorSpec([], tf.string)]

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

    def keep_index(self, index: Index) -> None:
        """See `IndexedSource`."""
        for number, ((shard, _), end) in enumerate(
            zip(self._shards, self._ends.tolist(), strict=True)
        ):
            shard.keep_index(index, number, end)

    def decode(self, *stored: Any) -> Any:
        return self._features.deserialize_example(stored[0], decoders=self._decoders)

    def _place(self, sample: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._ends, sample, side="right"))
        before = int(self._ends[shard - 1]) if shard else 0
        return shard, sample - before + self._shards[shard][1]


def from_tfds(builder: Any, split: Any, *, decoders: Any = None, **arguments: Any) -> TfdsSource:
    """A split of a tensorflow-datasets builder: `preprocess` receives the dictionary of its features.

    Records are read by number from the files that `download_and_prepare` left (TFRecord or ArrayRecord); where
    TFRecords begin is found once per shard and node, and kept beside the pool. Checksums of ArrayRecords are looked
    at, those within TFRecords are not.

    Args:
      builder: Its name, or the builder itself.
      split: With slices, as in `tfds.load`: "train", "train[:80%]".
      decoders: As in `tfds.load`; `tfds.decode.SkipDecoding()` leaves images to `preprocess`.
      arguments: For `tfds.builder`, with a name: `data_dir`, `config`.

    Raises:
      ImportError: If tensorflow-datasets is missing.
      SourceError: If the split is not prepared, or in files that cannot be read by number, or has no samples.
      ValueError: If there are arguments for a builder that is there already.
    """
    if isinstance(builder, str):
        try:
            import tensorflow_datasets as tfds
        except ModuleNotFoundError as error:
            raise ImportError(
                f"from_tfds needs tensorflow-datasets ({error}). Run: pip install tfposeidon[tfds]"
            ) from error
        builder = tfds.builder(builder, **arguments)
    elif arguments:
        raise ValueError(
            f"A builder's arguments go with its name. Received: {', '.join(arguments)} for {builder.info.full_name}, "
            "which is a builder. Give them to it."
        )
    if not builder.is_prepared():
        raise SourceError(
            f"A split must be prepared before it is cached. Received: {builder.info.full_name}, not prepared in "
            f"{builder.data_path}. Call builder.download_and_prepare() once, or pass `data_dir`."
        )
    return TfdsSource(builder, split, decoders)


def _partly(features: Any, decoders: Any) -> tuple[Any, Any]:
    """Features and decoders of what `tfds.decode.PartialDecoding` leaves."""
    import tensorflow_datasets as tfds

    if isinstance(decoders, tfds.decode.PartialDecoding):
        return decoders.extract_features(features), decoders.decoders
    return features, decoders


def _parts(builder: Any, split: Any) -> Sequence[Any]:
    """The files of a split, and which records of each."""
    splits = builder.info.splits
    try:
        parts = splits[split].file_instructions
    except (AssertionError, KeyError, ValueError) as error:
        raise SourceError(
            f"A split must be one of {', '.join(splits)}, or a slice as 'train[:80%]'. Received: split={split!r} for "
            f"{builder.info.full_name}."
        ) from error
    if not parts:
        raise SourceError(
            f"A source must have samples. Received: none for split={split!r} of {builder.info.full_name}. Take a "
            "larger slice."
        )
    return parts


def _shard_type(builder: Any) -> Any:
    form = builder.info.file_format.value
    if form not in _SHARDS:
        raise SourceError(
            f"Splits must be in {' or '.join(_SHARDS)} files. Received: {form} for {builder.info.full_name}. Prepare "
            "it with one of those as `file_format`."
        )
    return _SHARDS[form]


def _state(path: str) -> tuple[int, int]:
    """Bytes and time of change."""
    try:
        about = os.stat(path)
    except OSError as error:
        raise SourceError(
            f"A split's files must be there. Received: {error}. Prepare it anew."
        ) from error
    return about.st_size, about.st_mtime_ns


class _TfRecords:
    """Records of a TFRecord file by number: so many from `skip` on."""

    def __init__(self, path: str, skip: int, take: int) -> None:
        self._path, self._skip = path, skip
        self._lock, self._size = threading.Lock(), 0
        # Of nobody else, until there is a pool beside which they are kept.
        self._entries = np.zeros((take, 2), np.int64)
        self._alone: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def keep_index(self, index: Index, number: int, end: int) -> None:
        known, self._entries = self._entries, index.entries[end - len(self._entries) : end]
        self._alone = functools.partial(index.locked_part, number)
        if known.any() and not self._entries.any():
            self._note(known)

    def read(self, record: int) -> bytes:
        content = self._content(record)
        if content is None:
            with self._lock, self._alone():
                # Somebody else may have looked by now; what a file did not have may be there when it is tried again.
                self._size = os.path.getsize(self._path)
                content = self._content(record)
                if content is None:
                    self._note(_entries(self._path, self._skip, len(self._entries)))
                    content = self._content(record)
        if content is None:
            raise OSError(f"{self._path} ends before record {record}")
        if len(content) < self._entries[record - self._skip, 1]:
            raise OSError(f"{self._path} ends within record {record}")
        return content

    def _content(self, record: int) -> bytes | None:
        """`None` if it is not known where it is, or something else is there."""
        offset, length = self._entries[record - self._skip].tolist()
        if not CHECKED_LENGTH <= offset <= offset + length <= self._size:
            return None
        content = read_file(self._path, offset - CHECKED_LENGTH, CHECKED_LENGTH + length)
        return content[CHECKED_LENGTH:] if content[:LENGTH] == struct.pack("<Q", length) else None

    def _note(self, entries: np.ndarray) -> None:
        # An entry counts once it has an offset.
        self._entries[:, 1] = entries[:, 1]
        self._entries[:, 0] = entries[:, 0]


class _ArrayRecords:
    """A file of ArrayRecords by number."""

    def __init__(self, path: str, skip: int, take: int) -> None:
        del skip, take
        self._path, self._lock = path, threading.Lock()
        self._reader: Any = None

    def keep_index(self, index: Index, number: int, end: int) -> None:
        """Nothing to keep: these files have an index of their own."""

    def read(self, record: int) -> bytes:
        try:
            reader = self._opened()
            # A file that is missing or cut at a block has none, which is no error to the reader.
            if record >= reader.num_records():
                raise IndexError(f"it has {reader.num_records()} records")
            return reader.read([record])[0]
        except (IndexError, RuntimeError, ValueError) as error:
            # A reader that failed once fails for good.
            self._reader = None
            raise OSError(f"{self._path} cannot be read at record {record}: {error}") from error

    def _opened(self) -> Any:
        from array_record.python.array_record_module import ArrayRecordReader

        with self._lock:
            if self._reader is None:
                self._reader = ArrayRecordReader(self._path)
            return self._reader


_SHARDS: dict[str, Any] = {"tfrecord": _TfRecords, "array_record": _ArrayRecords}


def _entries(path: str, skip: int, take: int) -> np.ndarray:
    """Where the content of each record begins, and its bytes: `[take, 2]` int64, zeros where the file ends before."""
    size, offset = os.path.getsize(path), 0
    entries = np.zeros((take, 2), np.int64)
    with open(path, "rb") as stream:
        for record in range(skip + take):
            if offset + CHECKED_LENGTH > size:
                break
            stream.seek(offset)
            (length,) = struct.unpack("<Q", stream.read(LENGTH))
            if record >= skip:
                entries[record - skip] = offset + CHECKED_LENGTH, length
            offset += CHECKED_LENGTH + length + CHECKSUM
    return entries

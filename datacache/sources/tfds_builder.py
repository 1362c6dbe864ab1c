"""Reads splits that tensorflow-datasets has prepared, by index and directly from their files."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from datacache.native import FileStatus
from datacache.sources.record_files import RecordSource, TfRecords
from datacache.sources.source import SourceError, refuse_changed


class TfdsSource(RecordSource):
    """Records of a split; see `from_tfds`."""

    def __init__(self, builder: Any, split: Any, decoders: Any) -> None:
        self._features, self._decoders = _select_features(builder.info.features, decoders)
        shard_type = _shard_type(builder)
        files = [
            shard_type(str(one.filename), one.skip, one.take, FileStatus.of(os.stat(one.filename)))
            for one in _file_instructions(builder, split)
        ]
        # Leave decoders out of the identity, because the traced graph shows their effect, and their
        # names in Python differ between processes.
        super().__init__(files, {"kind": "tfds", "name": builder.info.full_name})

    def __str__(self) -> str:
        return f"{self.identity['name']} of tensorflow-datasets"

    @override
    def decode(self, *stored: Any) -> Any:
        return self._features.deserialize_example(stored[0], decoders=self._decoders)


def from_tfds(builder: Any, split: Any, *, decoders: Any = None, **arguments: Any) -> TfdsSource:
    """Creates a source from a split of a tensorflow-datasets builder.

    `preprocess` receives the dictionary of the builder's features. Records are read by index from
    the files that `download_and_prepare` wrote (TFRecord or ArrayRecord). Each process searches a
    TFRecord file for its records when it first reads one of them. Checksums within the files are
    verified.

    Args:
      builder: Name of a builder, or the builder itself.
      split: Split, with slices as in `tfds.load`: "train", "train[:80%]".
      decoders: Decoders of features; see `tfds.load`. With `tfds.decode.SkipDecoding()`,
        `preprocess` receives encoded images.
      **arguments: Arguments of `tfds.builder` for a name, such as `data_dir` and `config`.

    Returns:
      Source of the samples of the split, in the order of its files.

    Raises:
      ImportError: If tensorflow-datasets is missing.
      SourceError: If the split does not exist, is not prepared, has no samples, or has files that
        cannot be read by index.
      ValueError: If a builder object is passed with arguments for a name.

    Example::

        source = datacache.from_tfds("mnist", "train[:80%]", data_dir="/data/tfds")
        cache = datacache.Cache(source, lambda features: (features["image"], features["label"]))
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
            "Arguments of a builder can be passed only with its name. Received: "
            f"{', '.join(arguments)} with {builder.info.full_name}, which is a builder object. "
            "Pass the arguments when you create the builder."
        )
    if not builder.is_prepared():
        raise SourceError(
            "A split must be prepared before it is cached. Received: "
            f"{builder.info.full_name}, not prepared in {builder.data_path}. Call "
            "builder.download_and_prepare() once, or pass `data_dir`."
        )
    try:
        return TfdsSource(builder, split, decoders)
    except OSError as error:
        raise SourceError(
            f"The files of a split must exist. Received: {error}. Prepare the split again: "
            "builder.download_and_prepare()."
        ) from error


def _select_features(features: Any, decoders: Any) -> tuple[Any, Any]:
    """Returns the features and decoders that a `tfds.decode.PartialDecoding` selects."""
    # Import the package here, because it is optional.
    import tensorflow_datasets as tfds

    if isinstance(decoders, tfds.decode.PartialDecoding):
        return decoders.extract_features(features), decoders.decoders
    return features, decoders


def _file_instructions(builder: Any, split: Any) -> Sequence[Any]:
    """Returns the files of a split, each with the records that belong to the split."""
    splits = builder.info.splits
    try:
        parts = splits[split].file_instructions
    except (AssertionError, KeyError, ValueError) as error:
        raise SourceError(
            f"A split must be one of {', '.join(splits)}, or a slice such as 'train[:80%]'. "
            f"Received: split={split!r} for {builder.info.full_name}."
        ) from error
    if not parts:
        raise SourceError(
            f"A source must have samples. Received: 0 samples for split={split!r} of "
            f"{builder.info.full_name}. Use a larger slice."
        )
    return parts


def _shard_type(builder: Any) -> Any:
    form = builder.info.file_format.value
    if form not in _SHARDS:
        raise SourceError(
            f"The files of a split must be {' or '.join(_SHARDS)} files. Received: {form} for "
            f"{builder.info.full_name}. Prepare the split with one of these as `file_format`."
        )
    return _SHARDS[form]


class _ArrayRecords:
    """Records of an ArrayRecord file by index."""

    def __init__(self, path: str, skip: int, take: int, listed: FileStatus) -> None:
        self.path, self.skip, self.take, self.listed = path, skip, take, listed
        self._reader, self._lock = None, threading.Lock()

    def read(self, record: int) -> bytes:
        try:
            reader = self._opened()
            # The reader reports no error for a file that is missing or truncated at a block. Such
            # a file has no records.
            if record >= reader.num_records():
                raise IndexError(f"the file has {reader.num_records()} records")
            return reader.read([record])[0]
        except SourceError:
            raise
        except (IndexError, RuntimeError, ValueError) as error:
            # Drop the reader, because all its later reads would fail too.
            self._reader = None
            raise OSError(f"{self.path} cannot be read at record {record}: {error}") from error

    def _opened(self) -> Any:
        # Import the package here, because only files of this format need it.
        from array_record.python.array_record_module import ArrayRecordReader

        with self._lock:
            if self._reader is None:
                reader = ArrayRecordReader(self.path)
                # Check only once, because a later replacement does not change the open file.
                refuse_changed(self.path, FileStatus.of(os.stat(self.path)), self.listed)
                self._reader = reader
            return self._reader


_SHARDS: dict[str, Any] = {"tfrecord": TfRecords, "array_record": _ArrayRecords}

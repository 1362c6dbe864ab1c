"""Defines the interface of sources, and reads their files, which must not change while in use."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

import numpy as np

from datacache.native import FileStatus, read_file

SAMPLED_BLOCKS = 64
"""Number of blocks whose contents distinguish sources with files of equal names, sizes and times,
which are common in container images and archives."""
LEAST_BLOCKS = 3
"""Smallest number of blocks of each sampled file: its start, its middle and its end."""
BLOCK_BYTES = 2**16
READERS = 32
"""Number of files read concurrently: on a network file system, each read waits for a reply."""


class SourceError(RuntimeError):
    """Raised if a source is missing, empty, unreadable or changed."""


class Source(Protocol):
    """Interface to stored samples by index; a source also has `read` or `stream`.

    Sources of equal `identity` share cached samples, so `identity` must contain everything that
    determines the samples, except the location of the data, as JSON-serializable values. Names,
    sizes and times of files may be equal in different archives, so add a version or a digest.
    `signature` contains the `tf.TypeSpec` of each component of a stored sample.
    """

    identity: Any
    signature: Sequence[Any]

    def __len__(self) -> int:
        """Returns the number of samples."""

    def name(self, sample: int) -> str:
        """Returns the name of a sample for messages, such as the path of its file."""

    def decode(self, *stored: Any) -> Any:
        """Returns the input of `preprocess`, computed from components by TensorFlow ops only."""


@runtime_checkable
class RandomSource(Source, Protocol):
    """Source that can read any sample by its index."""

    def read(self, sample: int) -> list[np.ndarray]:
        """Returns a stored sample's components; must be thread-safe. `OSError` causes a retry."""


@runtime_checkable
class StreamSource(Source, Protocol):
    """Source that only supports sequential reads."""

    def stream(self) -> Iterator[list[np.ndarray]]:
        """Yields the components of all stored samples, in order, from the first sample."""


def stored_components(source: Source, sample: int, read: Sequence[Any]) -> list[np.ndarray]:
    """Returns the components of a sample, converted to the types of its source's signature."""
    if len(read) != len(source.signature):
        raise SourceError(
            "A sample must have as many components as its source's signature. Received: "
            f"{len(read)} components for {source.name(sample)}, expected {len(source.signature)}. "
            "Correct the sample or the `signature` of the source."
        )
    return [
        _stored(value, spec, source, sample)
        for value, spec in zip(read, source.signature, strict=True)
    ]


def _stored(value: Any, spec: Any, source: Source, sample: int) -> np.ndarray:
    wanted, is_text = _numpy_type(spec.dtype)
    dtype = getattr(value, "dtype", None)
    # Do not convert values that have the type already, such as the contents of a file.
    if dtype == wanted and (not is_text or (value.ndim == 0 and isinstance(value.item(), bytes))):
        return value
    # Refuse NumPy's `S` dtype, because it strips trailing null bytes.
    if is_text and (dtype is None or dtype.kind != "S"):
        texts = np.array(value, object)
        if all(isinstance(text, (str, bytes)) for text in texts.flat):
            return np.vectorize(
                lambda text: text.encode() if isinstance(text, str) else text, [object]
            )(texts)
    elif not is_text:
        array = np.asarray(value)
        if array.dtype.kind != "O":
            converted = array.astype(wanted, copy=False)
            if np.can_cast(array.dtype, wanted, "same_kind") or (converted == array).all():
                return converted
    raise SourceError(
        f"A component must match the signature of its source. Received: {value!r:.100} for "
        f"{source.name(sample)}, expected {spec.dtype.name}. Convert the value in the source, or "
        "remove the sample."
    )


@functools.cache
def _numpy_type(dtype: Any) -> tuple[np.dtype[Any], bool]:
    """Returns NumPy's dtype for a dtype of TensorFlow, and whether it is the dtype of texts."""
    # The result is cached, because TensorFlow's conversion takes as long as reading a small sample.
    return np.dtype(dtype.as_numpy_dtype), dtype.name == "string"


def digest(content: Any) -> str:
    """Returns the SHA-256 of a JSON-serializable value, in hexadecimal."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def array_digest(array: np.ndarray) -> str:
    """Returns the SHA-256 of an array's type, shape and content, in hexadecimal."""
    # The bytes of an object array are pointers.
    content = repr(array.tolist()).encode() if array.dtype == object else array.tobytes()
    return digest([str(array.dtype), array.shape, hashlib.sha256(content).hexdigest()])


def read_listed(path: str, offset: int, length: int, listed: FileStatus) -> bytes:
    """Reads a part of a file; raises `SourceError` if it has changed since it was listed."""
    content, now = read_file(path, offset, length)
    refuse_changed(path, now, listed)
    return content


def refuse_changed(path: str, now: FileStatus, listed: FileStatus) -> None:
    """Raises `SourceError` for a file that has changed since it was listed."""
    if not now.is_of(listed):
        raise SourceError(
            f"Files must not change while a cache reads them. Received: {path}, changed or "
            f"replaced since it was listed ({listed.size} bytes then, {now.size} bytes now). Open "
            "the cache again: samples of changed files are stored separately."
        )


def contents_digest(count: int, file: Callable[[int], tuple[str, FileStatus]]) -> str:
    """Returns the SHA-256 of some blocks of some files, in hexadecimal.

    Cost: reads blocks of 64 KiB from at most 64 files: three blocks of each file, or about 64 in
    total if there are few files.
    """
    chosen = np.linspace(0, count - 1, min(count, SAMPLED_BLOCKS)).astype(int).tolist()
    blocks = max(LEAST_BLOCKS, SAMPLED_BLOCKS // len(chosen))

    def sample(index: int) -> bytes:
        path, listed = file(index)
        begins = np.linspace(0, max(0, listed.size - BLOCK_BYTES), blocks).astype(int).tolist()
        parts = [(begin, BLOCK_BYTES) for begin in begins]
        if listed.size <= blocks * BLOCK_BYTES:
            parts = [(0, listed.size)]
        content = b"".join(read_listed(path, *part, listed) for part in parts)
        return hashlib.sha256(content).digest()

    with ThreadPoolExecutor(READERS) as threads:
        try:
            return hashlib.sha256(b"".join(threads.map(sample, chosen))).hexdigest()
        except OSError as error:
            raise SourceError(
                f"Files of a source must be readable. Received: {error}. Check the file and the "
                "mount."
            ) from error


def check_source(source: Any) -> None:
    """Raises `SourceError` for an object that is not a source, or a source without samples."""
    reader = "stream" if hasattr(source, "stream") else "read"
    required = ("identity", "signature", "name", "decode", "__len__", reader)
    missing = [name for name in required if not hasattr(source, name)]
    if missing:
        raise SourceError(
            "A source must implement the protocol datacache.sources.source.Source. Received: "
            f"{type(source).__name__} without {', '.join(missing)}. Use from_folder, "
            "from_tfrecords, from_tfds or from_dataset, or add these attributes."
        )
    if len(source) == 0:
        raise SourceError(f"A source must have samples. Received: {source} with 0 samples.")

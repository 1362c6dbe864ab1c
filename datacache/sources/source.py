"""Interface of the sources of samples."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np


class SourceError(RuntimeError):
    """Error of a source that is missing, empty or unreadable."""


class Source(Protocol):
    """Samples as they are stored, by index; sources also have `read` or `stream`.

    Sources of equal `identity` share their samples, so it must hold everything that determines
    them, as values for JSON, except the location of the data. Names, sizes and times of files do
    not distinguish two folders of an archive: add a part, a version, or a digest of contents.
    `signature` is the `tf.TypeSpec` of each component of a stored sample. A source of records may
    have `keep_index(index)`, which stores their offsets in an `Index` that processes share.
    """

    identity: Any
    signature: Sequence[Any]

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def name(self, sample: int) -> str:
        """Returns a user's name for a sample, for messages."""
        ...

    def decode(self, *stored: Any) -> Any:
        """Returns the input of `preprocess` from stored components, by TensorFlow ops only."""
        ...


@runtime_checkable
class RandomSource(Source, Protocol):
    """Source that can read any sample by its index."""

    def read(self, sample: int) -> list[np.ndarray]:
        """Returns a stored sample's components; thread-safe, and retried on `OSError`."""
        ...


@runtime_checkable
class StreamSource(Source, Protocol):
    """Source that only supports sequential reads."""

    def stream(self) -> Iterator[list[np.ndarray]]:
        """Yields the components of all stored samples, in order from the first one."""
        ...


def stored_components(source: Source, sample: int, read: Sequence[Any]) -> list[np.ndarray]:
    """Returns the components of a sample in the form of its source's signature."""
    if len(read) != len(source.signature):
        raise SourceError(
            "A sample must have as many components as its source's signature. Received: "
            f"{len(read)} components for {source.name(sample)}, expected {len(source.signature)}. "
            "Correct the sample or the signature."
        )
    return [
        _stored(value, spec, source, sample)
        for value, spec in zip(read, source.signature, strict=True)
    ]


def _stored(value: Any, spec: Any, source: Source, sample: int) -> np.ndarray:
    wanted, is_text = _numpy_type(spec.dtype)
    dtype = getattr(value, "dtype", None)
    # The usual case: a file is one text.
    if dtype == wanted and (not is_text or (value.ndim == 0 and isinstance(value.item(), bytes))):
        return value
    # NumPy's dtype for bytes has dropped trailing zeros.
    if is_text and (dtype is None or dtype.kind != "S"):
        texts = np.array(value, object)
        if all(isinstance(text, (str, bytes)) for text in texts.flat):
            return np.vectorize(_as_bytes, [object])(texts)
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
    """Returns the type of arrays for a type of TensorFlow, and whether it is of texts."""
    # Cached, because TensorFlow's conversion takes as long as reading a small sample.
    return np.dtype(dtype.as_numpy_dtype), dtype.name == "string"


def _as_bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def digest(content: Any) -> str:
    """Returns the SHA-256 of a value for JSON, in hexadecimal."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def array_digest(array: np.ndarray) -> str:
    """Returns the SHA-256 of an array's type, shape and content, in hexadecimal."""
    # The bytes of an object array are pointers.
    content = repr(array.tolist()).encode() if array.dtype == object else array.tobytes()
    return digest([str(array.dtype), array.shape, hashlib.sha256(content).hexdigest()])

"""Interface of the sources of samples."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np


class SourceError(RuntimeError):
    """A source that is missing, empty, or cannot be read."""


class Source(Protocol):
    """Samples as they are stored, by index.

    A source also has `read` (`RandomSource`) or `stream` (`StreamSource`).

    Attributes:
      identity: All that the samples depend on, as JSON can hold it: another identity is another
        cache, and sources of the same identity share their samples. Names, sizes and times of files
        do not tell apart two folders of an archive; give a part or a version that does, or a digest
        of contents. The place of the data does not belong in it.
      signature: `tf.TypeSpec` of each component of a stored sample.
    """

    identity: Any
    signature: Sequence[Any]

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def name(self, sample: int) -> str:
        """Returns what a user would call a sample, for messages.

        Args:
          sample: Index of the sample.
        """
        ...

    def decode(self, *stored: Any) -> Any:
        """Returns what `preprocess` receives; made of TensorFlow ops only, as it is traced.

        Args:
          *stored: Components of a stored sample, tensors with the types of `signature`.
        """
        ...


@runtime_checkable
class RandomSource(Source, Protocol):
    """Source that can read any sample by its index."""

    def read(self, sample: int) -> list[np.ndarray]:
        """Returns the components of a stored sample; called by many threads at a time.

        Args:
          sample: Index of the sample.

        Raises:
          OSError: If it cannot be read; it is tried again a few times.
        """
        ...


@runtime_checkable
class StreamSource(Source, Protocol):
    """Source that has its samples one after the other only."""

    def stream(self) -> Iterator[list[np.ndarray]]:
        """Yields the components of all stored samples, in order from the first one."""
        ...


@runtime_checkable
class IndexedSource(Source, Protocol):
    """Source that searches its files for the begins of records, which can be kept beside a pool."""

    def keep_index(self, index: Any) -> None:
        """Uses what an index knows, and adds to it what the source finds out.

        Args:
          index: A `datacache.pool.index.Index` that the processes of a node share.
        """
        ...


def stored_components(source: Source, sample: int, read: Sequence[Any]) -> list[np.ndarray]:
    """Returns the components of a sample as the signature of its source says them."""
    if len(read) != len(source.signature):
        raise SourceError(
            "A sample must have the components of its source's signature. Received: "
            f"{len(read)} for {source.name(sample)}, not {len(source.signature)}."
        )
    return [
        _stored(value, spec, source, sample)
        for value, spec in zip(read, source.signature, strict=True)
    ]


def _stored(value: Any, spec: Any, source: Source, sample: int) -> np.ndarray:
    wanted, is_text = _numpy_type(spec.dtype)
    dtype = getattr(value, "dtype", None)
    # Most are: a file is one text.
    if dtype == wanted and (not is_text or (value.ndim == 0 and isinstance(value.item(), bytes))):
        return value
    # NumPy's own type for bytes has lost zeros at their end.
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
        f"A component must be what the signature of its source says. Received: {value!r:.100} for "
        f"{source.name(sample)}, not {spec.dtype.name}. Convert it where it is read, or leave it "
        "out."
    )


@functools.cache
def _numpy_type(dtype: Any) -> tuple[np.dtype[Any], bool]:
    """Returns the type of arrays for a type of TensorFlow, and whether it is of texts."""
    # Kept, because asking TensorFlow takes as long as reading a small sample.
    return np.dtype(dtype.as_numpy_dtype), dtype.name == "string"


def _as_bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def digest(content: Any) -> str:
    """Returns the SHA-256 of anything that JSON can hold, in hexadecimal."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def array_digest(array: np.ndarray) -> str:
    """Returns the SHA-256 of an array's type, shape and content, in hexadecimal."""
    # The bytes of an object array are pointers.
    content = repr(array.tolist()).encode() if array.dtype == object else array.tobytes()
    return digest([str(array.dtype), array.shape, hashlib.sha256(content).hexdigest()])

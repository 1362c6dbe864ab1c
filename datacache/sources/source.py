"""What every source of samples has."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np


class SourceError(RuntimeError):
    """A source that is missing, empty, or cannot be read."""


class Source(Protocol):
    """Samples as they are stored, by number.

    Attributes:
      identity: What the samples depend on, for JSON: another identity is another cache.
      signature: `tf.TypeSpec`s of a stored sample's components.
    """

    identity: Any
    signature: Sequence[Any]

    def __len__(self) -> int:
        """How many samples there are."""
        ...

    def name(self, sample: int) -> str:
        """What a user would call it, for messages."""
        ...

    def decode(self, *stored: Any) -> Any:
        """What `preprocess` receives, from the components of a stored sample; TensorFlow ops only."""
        ...


@runtime_checkable
class RandomSource(Source, Protocol):
    """A source that reads any sample at once."""

    def read(self, sample: int) -> list[np.ndarray]:
        """The components of a stored sample.

        Raises:
          OSError: If it cannot be read.
        """
        ...


@runtime_checkable
class StreamSource(Source, Protocol):
    """A source that has samples one after the other only."""

    def stream(self) -> Iterator[list[np.ndarray]]:
        """All stored samples from the first on."""
        ...


@runtime_checkable
class IndexedSource(Source, Protocol):
    """A source that looks for where its records begin, which may be kept beside a pool."""

    def keep_index(self, index: Any) -> None:
        """Takes what is known from there, and puts there what it finds out: a `datacache.pool.index.Index`."""
        ...


def digest(content: Any) -> str:
    """SHA-256 of what JSON can hold, in hexadecimal."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

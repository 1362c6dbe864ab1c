"""Interface of the sources of samples."""

from __future__ import annotations

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
        cache.
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


def digest(content: Any) -> str:
    """Returns the SHA-256 of anything that JSON can hold, in hexadecimal.

    Args:
      content: Anything that JSON can hold; the order of keys in dictionaries makes no difference.
    """
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

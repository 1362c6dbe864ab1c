"""Which position is that of which dataset: each dataset of a cache has its own."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, TypeVar

import keras
import tensorflow as tf

from datacache.batches import EpochIterator

Data = TypeVar("Data")


class Positions:
    """The positions of the datasets that a cache has made, found by what is iterated over."""

    def __init__(self) -> None:
        self._made: list[EpochIterator] = []
        self._of: weakref.WeakKeyDictionary[Any, EpochIterator] = weakref.WeakKeyDictionary()

    def add(self, data: Data, epochs: EpochIterator) -> Data:
        """Notes whose position it is; returns the dataset."""
        self._made.append(epochs)
        self._of[data] = epochs
        return data

    def of(self, data: Any = None) -> EpochIterator:
        """The position of a dataset.

        Args:
          data: What the cache made, or what `map`, `prefetch` and the like made of it. With one dataset only, it is
            that one, whatever is given.

        Raises:
          RuntimeError: If the cache has made no dataset, or several, and `data` is not of one of them.
        """
        if not self._made:
            raise RuntimeError(
                "Positions are those of a dataset. Received: a cache without one. Call dataset() first."
            )
        found = [self._of[made] for made in _made_of(data) if made in self._of]
        candidates = found or self._made
        if len(candidates) > 1:
            which = (
                f"data made of {len(found)} of them"
                if found
                else f"data={data!r:.100}, which is of none of them"
            )
            raise RuntimeError(
                f"It must be said which dataset is trained on, where a cache has made several. Received: a cache with "
                f"{len(self._made)}, and {which}. Pass that one, or what `map` made of it: CachePosition(cache, data), "
                "cache.counted(data), cache.state_dict(data)."
            )
        return candidates[0]


def _made_of(data: Any) -> Iterator[Any]:
    """The data, and all datasets that it takes elements from."""
    if isinstance(data, tf.data.Dataset):
        for below in data._inputs():
            yield from _made_of(below)
    if isinstance(data, (tf.data.Dataset, keras.utils.PyDataset)):
        yield data

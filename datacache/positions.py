"""Positions of the datasets of a cache: each dataset has its own."""

from __future__ import annotations

import math
import weakref
from typing import Any, TypeVar

import keras
import tensorflow as tf

from datacache.epochs import EpochIterator
from datacache.from_tfposeidon import graphs
from datacache.graphs import ONE_TO_ONE

Data = TypeVar("Data")
SAME_STEPS = ONE_TO_ONE | {"FlatMapDataset", "RepeatDataset", "TakeDataset", "TensorDataset"}
"""Kinds of datasets with the same steps as the cache's dataset, which consists of the last kind."""


class Positions:
    """Epoch iterators of the datasets of a cache, found by the data in training."""

    def __init__(self) -> None:
        self._made: list[EpochIterator] = []
        # Weak, so that the memory of a dataset's batches is freed when the script drops the
        # dataset.
        self._of: weakref.WeakKeyDictionary[Any, EpochIterator] = weakref.WeakKeyDictionary()

    def add(self, data: Data, epochs: EpochIterator) -> Data:
        """Registers the epoch iterator of a dataset, and returns the dataset."""
        self._made.append(epochs)
        self._of[data] = epochs
        return data

    def of(self, data: Any = None) -> EpochIterator:
        """Returns the epoch iterator of a dataset."""
        if not self._made:
            raise RuntimeError(
                "A position belongs to a dataset of the cache. Received: a cache without a "
                "dataset. Call cache.dataset() or cache.pydataset() first."
            )
        made_of = [data] if isinstance(data, keras.utils.PyDataset) else graphs.datasets(data)
        found = [self._of[made] for made in made_of if made in self._of]
        candidates = found or self._made
        if len(candidates) > 1:
            which = (
                f"data derived from {len(found)} of them"
                if found
                else f"data={data!r:.100}, which is derived from none of them"
            )
            raise RuntimeError(
                "`data` must identify the dataset in training if a cache has created several. "
                f"Received: a cache with {len(self._made)} datasets, and {which}. Pass the dataset "
                "in training, or the result of its `map`: CachePosition(cache, data), "
                "cache.counted(data), cache.state_dict(data)."
            )
        return candidates[0]


def length(data: Any) -> float | None:
    """Returns the number of steps of data, infinity if they repeat, or `None` if it is unknown."""
    if isinstance(data, keras.utils.PyDataset):
        return len(data)
    if not isinstance(data, tf.data.Dataset):
        return None
    if others := {graphs.kind_of(one) for one in graphs.datasets(data)} - SAME_STEPS:
        raise RuntimeError(
            "`data` must have the steps of the cache's dataset in the same order. Received: data "
            f"with {min(others)}. Remove operations that shuffle, skip, filter or rebatch."
        )
    steps = int(data.cardinality())
    # TensorFlow's constants are negative.
    return {tf.data.INFINITE_CARDINALITY: math.inf, tf.data.UNKNOWN_CARDINALITY: None}.get(
        steps, steps
    )

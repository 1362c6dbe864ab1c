"""Any `tf.data.Dataset`, which is read from its beginning once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from datacache.pool.layout import as_array
from datacache.sources.source import SourceError, StreamSource


class DatasetSource(StreamSource):
    """Elements of a dataset, see `from_dataset`.

    Args:
      dataset: The dataset, whose number of elements is known.
      key: Name of all that the elements depend on.

    Attributes:
      identity: All that the samples depend on; see `Source`.
      signature: `tf.TypeSpec` of each component; see `Source`.

    Raises:
      SourceError: If the number of elements is unknown, infinite or 0.
    """

    def __init__(self, dataset: tf.data.Dataset, key: str) -> None:
        self._dataset, self._spec = dataset, dataset.element_spec
        self._samples = int(dataset.cardinality())
        # TensorFlow's constants for infinite and unknown cardinalities are negative.
        if self._samples <= 0:
            what = {tf.data.INFINITE_CARDINALITY: "infinitely many", 0: "no"}.get(
                self._samples, "unknown many"
            )
            raise SourceError(
                f"A dataset must have a known number of samples. Received: one with {what}. Use "
                "take(n), or apply(tf.data.experimental.assert_cardinality(n))."
            )
        self.signature = tf.nest.flatten(self._spec)
        self.identity = {
            "kind": "dataset",
            "key": key,
            "samples": self._samples,
            "spec": repr(self._spec),
        }

    def __len__(self) -> int:
        return self._samples

    def __str__(self) -> str:
        return f"dataset {self.identity['key']!r}"

    @override
    def name(self, sample: int) -> str:
        return f"element {sample} of the dataset"

    @override
    def stream(self) -> Iterator[list[np.ndarray]]:
        count = 0
        for element in self._dataset.as_numpy_iterator():
            yield [as_array(array) for array in tf.nest.flatten(element)]
            count += 1
        if count != self._samples:
            raise SourceError(
                "A dataset must have as many samples as it says. Received: "
                f"{count}, not {self._samples}."
            )

    @override
    def decode(self, *stored: Any) -> Any:
        return tf.nest.pack_sequence_as(self._spec, stored)


def from_dataset(dataset: tf.data.Dataset, *, key: str) -> DatasetSource:
    """Makes a source of the elements of a dataset, in place of `dataset.cache()`.

    One process of each node reads the dataset from its beginning, before the first batch.
    `preprocess` receives an element.

    Args:
      dataset: Dataset that has the same elements in the same order each time: not batched, not
        repeated, not shuffled.
      key: Name, in your words, of all that the elements depend on: the data and its version.
        Another key is another cache.

    Returns:
      Source of all elements, in the order of the dataset.

    Raises:
      SourceError: If the number of elements is unknown, infinite or 0.

    Example:
      >>> source = from_dataset(tf.data.Dataset.range(3), key="range(3)")
      >>> len(source), [int(element) for (element,) in source.stream()]
      (3, [0, 1, 2])
    """
    return DatasetSource(dataset, key)

"""Reads samples from any `tf.data.Dataset`, sequentially from its beginning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from datacache.from_tfposeidon import pipelines
from datacache.graphs import processors_of_order, shuffling, warn_of_draws
from datacache.pool.spec import as_array
from datacache.sources.source import SourceError, StreamSource, array_digest, digest

FIRST = 4
"""Number of elements read whenever a dataset is opened, to distinguish it from other datasets."""


class DatasetSource(StreamSource):
    """Elements of a dataset; see `from_dataset`."""

    def __init__(self, dataset: tf.data.Dataset, key: str) -> None:
        options = tf.data.Options()
        options.deterministic = True
        self._dataset, self._spec = dataset.with_options(options), dataset.element_spec
        self._samples = int(dataset.cardinality())
        if self._samples <= 0:
            what = {
                tf.data.INFINITE_CARDINALITY: "infinitely many samples. Use take(n).",
                tf.data.UNKNOWN_CARDINALITY: "an unknown number of samples. Use "
                "apply(tf.data.experimental.assert_cardinality(n)).",
            }.get(self._samples, "no samples. Pass other data.")
            raise SourceError(
                "A dataset must have a known, finite number of samples above 0. Received: a "
                f"dataset with {what}"
            )
        if unsteady := shuffling(dataset):
            raise SourceError(
                "A dataset must have the same elements in the same order each time. Received: a "
                f"dataset with {unsteady}."
            )
        graphs = pipelines.function_graphs(dataset)
        draws = {op for one in graphs for op in pipelines.drawing_ops(pipelines.op_names(one))}
        warn_of_draws("the dataset", draws)
        self.signature = tf.nest.flatten(self._spec)
        first = list(self._read(FIRST))
        self._digests = list(map(_digests, first))
        if draws:
            # Keep only components that are equal in two reads, unlike random components.
            pairs = zip(self._digests, map(_digests, self._read(FIRST)), strict=True)
            self._digests = [
                [one for one, other in zip(*pair, strict=True) if one == other] for pair in pairs
            ]
        self._first = None if draws else first[0]
        self.identity = {
            "kind": "dataset",
            "key": key,
            "samples": self._samples,
            "spec": repr(self._spec),
            "first": list(map(digest, self._digests)),
        }
        if count := processors_of_order(dataset):
            self.identity["processors"] = count

    def __len__(self) -> int:
        return self._samples

    def __str__(self) -> str:
        return f"dataset {self.identity['key']!r}"

    @override
    def name(self, sample: int) -> str:
        return f"element {sample} of the dataset"

    @override
    def stream(self) -> Iterator[list[np.ndarray]]:
        # Yield the stored first element, so that its reader need not open the dataset again.
        if self._first is not None:
            yield self._first
        for count, components in enumerate(self._read(self._samples + 1)):
            looked_at = self._first is not None and count < FIRST
            if looked_at and _digests(components) != self._digests[count]:
                raise SourceError(
                    "A dataset must have the same elements in the same order each time. Received: "
                    f"element {count}, which differs from the first read. Shuffle and use random "
                    "ops only after the cache."
                )
            if count or self._first is None:
                yield components

    def _read(self, count: int) -> Iterator[list[np.ndarray]]:
        """Yields the components of the first `count` elements."""
        number = 0
        try:
            for element in self._dataset.take(count).as_numpy_iterator():
                yield [as_array(array) for array in tf.nest.flatten(element)]
                number += 1
        except tf.errors.OpError as error:
            raise SourceError(
                "A dataset must be readable to its end. Received: "
                f"{error.message.splitlines()[0]}, after {number} elements. Correct the data, or "
                "remove the element; from_tfrecords names damaged files. Cached samples are "
                "retained."
            ) from error

    @override
    def decode(self, *stored: Any) -> Any:
        return tf.nest.pack_sequence_as(self._spec, stored)


def from_dataset(dataset: tf.data.Dataset, *, key: str) -> DatasetSource:
    """Creates a source from the elements of a dataset, as a replacement for `dataset.cache()`.

    One process of each node reads the dataset from its beginning, before the first batch.
    `preprocess` receives an element.

    Args:
      dataset: Dataset that yields the same elements in the same order each time: not batched, not
        repeated, not shuffled.
      key: Name of your choice that identifies everything that determines the elements, such as
        data, split and version. A different key, or different first elements, select a different
        cache.

    Returns:
      Source of all elements, in the order of the dataset.

    Raises:
      SourceError: If the number of elements is unknown, infinite or 0, the dataset shuffles, or its
        first elements cannot be read.

    Example:
      >>> source = from_dataset(tf.data.Dataset.range(3), key="range(3)")
      >>> len(source), [int(element) for (element,) in source.stream()]
      (3, [0, 1, 2])
    """
    return DatasetSource(dataset, key)


def _digests(components: list[np.ndarray]) -> list[str]:
    return list(map(array_digest, components))

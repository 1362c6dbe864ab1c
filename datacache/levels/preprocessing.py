"""From stored samples to cached ones, many in one call: TensorFlow decodes them side by side, Python waits."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import tensorflow as tf

from datacache.levels.fingerprint import Traced
from datacache.pool.layout import Arrays
from datacache.sources.source import Source, SourceError

AT_A_TIME = 8
"""Samples of one call that are decoded at a time; several readers call."""


class Preprocessing:
    """A traced function on lists of samples.

    Args:
      source: Of the samples.
      traced: From the components of one to those to keep.
      variable_shapes: Whether results may differ in shape.
    """

    def __init__(self, source: Source, traced: Traced, variable_shapes: bool) -> None:
        self._function, self._name = traced.function, source.name
        alike = not variable_shapes and all(
            spec.shape.is_fully_defined() for spec in source.signature
        )
        self._many = _over_many(source, traced) if alike else None

    def __call__(self, stored: list[Arrays], samples: np.ndarray) -> list[Arrays]:
        """The samples made of stored ones.

        Args:
          stored: Their components.
          samples: Their numbers, for messages.

        Raises:
          SourceError: If the function fails on one; it names the sample.
        """
        if self._many is not None and len(stored) > 1:
            # Where that fails they go one by one, to say which it was, or what differs between them.
            with contextlib.suppress(tf.errors.OpError):
                columns = [np.stack(column) for column in zip(*stored, strict=True)]
                return [
                    list(parts)
                    for parts in zip(*(part.numpy() for part in self._many(*columns)), strict=True)
                ]
        pairs = zip(stored, samples.tolist(), strict=True)
        return [self._one(components, sample) for components, sample in pairs]

    def _one(self, components: Arrays, sample: int) -> Arrays:
        try:
            return [part.numpy() for part in self._function(*components)]
        except tf.errors.OpError as error:
            # Before it stands where in the script each op was traced.
            cause = error.message.rsplit("\n\n", 1)[-1].splitlines()[0].rstrip(".")
            raise SourceError(
                f"`preprocess` must take every sample. Received: {cause} for {self._name(sample)}. Mend it, or "
                "leave it out."
            ) from error


def _over_many(source: Source, traced: Traced) -> Any:
    results = [tf.TensorSpec(spec.shape, spec.dtype) for spec in tf.nest.flatten(traced.structure)]

    def over_many(*columns: tf.Tensor) -> Any:
        return tf.map_fn(
            lambda parts: traced.function(*parts),
            columns,
            fn_output_signature=results,
            parallel_iterations=AT_A_TIME,
        )

    columns = [tf.TensorSpec([None, *spec.shape], spec.dtype) for spec in source.signature]
    with tf.device("CPU:0"):
        # Traced here: readers that come first together would each do it.
        return tf.function(over_many, columns, autograph=False).get_concrete_function()

"""Preprocessing of many samples in one call, which TensorFlow runs in parallel without Python."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import tensorflow as tf

from datacache.pool.layout import Arrays
from datacache.sources.source import Source, SourceError
from datacache.tiers.fingerprint import TracedPreprocess

PARALLEL_ITERATIONS = 8
"""Samples that one call decodes in parallel; several windows are decoded at the same time."""


class Preprocessing:
    """Traced function that takes lists of samples."""

    def __init__(self, source: Source, traced: TracedPreprocess, variable_shapes: bool) -> None:
        self._function, self._name = traced.function, source.name
        # Samples of different shapes do not fit in one tensor.
        same_shapes = not variable_shapes and all(
            spec.shape.is_fully_defined() for spec in source.signature
        )
        self._batched = _trace_batched(source, traced) if same_shapes else None

    def __call__(self, stored: list[Arrays], indices: np.ndarray) -> list[Arrays]:
        """Returns the cached samples of stored ones."""
        if self._batched is not None and len(stored) > 1:
            # After a failure, retry one by one: the error of a batch does not identify the sample.
            with contextlib.suppress(tf.errors.OpError):
                columns = [np.stack(column) for column in zip(*stored, strict=True)]
                made = [part.numpy() for part in self._batched(*columns)]
                return [list(parts) for parts in zip(*made, strict=True)]
        pairs = zip(stored, indices.tolist(), strict=True)
        return [self._one(components, sample) for components, sample in pairs]

    def _one(self, components: Arrays, sample: int) -> Arrays:
        try:
            return [part.numpy() for part in self._function(*components)]
        except tf.errors.OpError as error:
            # The last paragraph has the cause; those before locate each op's trace in the script.
            cause = error.message.rsplit("\n\n", 1)[-1].splitlines()[0].rstrip(".")
            raise SourceError(
                "`preprocess` must accept every sample. Received: "
                f"{cause} for {self._name(sample)}. Correct `preprocess`, or remove the sample."
            ) from error


def _trace_batched(source: Source, traced: TracedPreprocess) -> Any:
    results = [tf.TensorSpec(spec.shape, spec.dtype) for spec in tf.nest.flatten(traced.structure)]

    def preprocess_batch(*columns: tf.Tensor) -> Any:
        return tf.map_fn(
            lambda components: traced.function(*components),
            columns,
            fn_output_signature=results,
            parallel_iterations=PARALLEL_ITERATIONS,
        )

    columns = [tf.TensorSpec([None, *spec.shape], spec.dtype) for spec in source.signature]
    with tf.device("CPU:0"):
        # Trace now: several threads that call it first would each trace it.
        return tf.function(preprocess_batch, columns, autograph=False).get_concrete_function()

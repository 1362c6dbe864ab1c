"""Comparison of the data that ranks give to `fit`, and the size of the global batch.

A script that forgets to share its data trains all ranks on the same samples without an error. A few
samples of each rank reveal that before the first step.
"""

from __future__ import annotations

import logging
import zlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.inputs import pipelines
from tfposeidon.inputs.shares import is_array
from tfposeidon.training import session

log = logging.getLogger("tfposeidon")


def compare(model: keras.Model, arguments: dict[str, Any]) -> None:
    """Logs the global batch size of a model's first `fit`, and warns if all ranks' data are equal.

    All ranks call it together, with the arguments of `fit`.
    """
    if session.of(model).has_begun:
        return
    data = _Given()
    try:
        data.read(arguments)
    except Exception as error:  # noqa: BLE001 - data of users may raise anything, also in `fit`.
        log.debug("tfposeidon: the data of ranks are not compared: %s", error)
    ranks = exchange_objects([data.batch_size, data.samples], runtime.wire(), "tp.given_data")
    sizes = [size for size, _ in ranks]
    if None not in sizes and session.of(model).is_in_step:
        first = f"{len(sizes)} ranks x {sizes[0]}"
        terms = first if len(set(sizes)) == 1 else " + ".join(map(str, sizes))
        calls = [one.gradient_accumulation_steps or 1 for one in session.of(model).optimizers]
        if (steps := max(calls, default=1)) > 1:
            terms = f"({terms}) x {steps} accumulated steps"
        total = sum(sizes) * steps
        runtime.say("tfposeidon: global batch %d = %s; learning rate unchanged", total, terms)
    if data.samples and all(samples == data.samples for _, samples in ranks):
        runtime.say(
            "tfposeidon: all ranks pass the same data to fit, by its length and some samples. Pass "
            "each rank its share: tp.shard(data)."
        )


class _Given:
    """Data that a rank passes to `fit`: batch size, and length and checksums of some samples.

    Both are `None` if they are unknown, or if reading the data calls Python.
    """

    def __init__(self) -> None:
        self.batch_size: int | None = None
        self.samples: list[Any] | None = None

    def read(self, arguments: dict[str, Any]) -> None:
        """Reads both from the arguments of `fit`."""
        x = arguments["x"]
        if isinstance(x, tf.data.Dataset):
            variant = tf.data.experimental.to_variant(x)
            size = int(tf.raw_ops.ComputeBatchSize(input_dataset=variant))
            self.batch_size = size if size > 0 else None
            self.samples = _of_dataset(x)
        elif isinstance(x, keras.utils.PyDataset):
            self._read_batches(x)
        else:
            self._read_arrays(arguments)

    def _read_batches(self, x: keras.utils.PyDataset) -> None:
        if x.num_batches == 0:
            return
        leaves = _arrays(x[0])
        self.batch_size = len(leaves[0]) if leaves else None
        self.samples = [x.num_batches, *map(_checksum, leaves)]

    def _read_arrays(self, arguments: dict[str, Any]) -> None:
        leaves = _arrays([arguments[name] for name in ("x", "y", "sample_weight")])
        if not leaves or not leaves[0].shape[0]:
            return
        if arguments["batch_size"] or not arguments["steps_per_epoch"]:
            self.batch_size = arguments["batch_size"] or 32
        rows = leaves[0].shape[0]
        self.samples = [rows] + [
            _checksum(getattr(leaf, "iloc", leaf)[row])
            for leaf in leaves
            for row in (0, rows // 2, rows - 1)
        ]


def _arrays(data: Any) -> list[Any]:
    return [leaf for leaf in keras.tree.flatten(data) if is_array(leaf)]


def _checksum(value: Any) -> int:
    array = np.asarray(value)
    # An array of objects contains addresses.
    content = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
    return zlib.crc32(content)


def _of_dataset(dataset: tf.data.Dataset) -> list[Any] | None:
    """Returns the number and the first of the samples that a dataset shuffles or batches."""
    steps = pipelines.chain(dataset)
    end = next((i for i, step in enumerate(steps) if pipelines.groups(step)), len(steps))
    read = steps[: min(end, pipelines.first_random(steps))]
    # A share, an opaque dataset, or one that calls Python, which counts epochs or ends for good.
    if pipelines.is_share(dataset) or not read or _calls_python(read[-1]):
        return None
    found = [int(read[-1].cardinality())]
    for sample in read[-1].take(1):
        found += map(_checksum, tf.nest.flatten(sample, expand_composites=True))
    return found


def _calls_python(dataset: tf.data.Dataset) -> bool:
    steps = pipelines.unwrapped_datasets(dataset)
    return any(
        node.op in pipelines.PYTHON_OPS for step in steps for node in pipelines.nodes_of_step(step)
    )

"""Compares arguments of `fit` across ranks: the data, and callbacks that write files.

A script that does not shard its data trains all ranks on the same samples without an error. This
module compares a few samples of each rank, and warns of equal data before the first step.

Unchanged Keras scripts give every rank the same paths. If callbacks of several ranks write to the
same path, only the lowest of these ranks retains its callback, and broadcasts the state that
`BackupAndRestore` restores.
"""

from __future__ import annotations

import functools
import logging
import os
import types
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.inputs import pipelines
from tfposeidon.inputs.shares import is_array
from tfposeidon.training import entries, session

log = logging.getLogger("tfposeidon")

_PATHS = {
    keras.callbacks.ModelCheckpoint: "filepath",
    keras.callbacks.CSVLogger: "filename",
    keras.callbacks.TensorBoard: "log_dir",
    keras.callbacks.BackupAndRestore: "backup_dir",
    keras.callbacks.OrbaxCheckpoint: "directory",
}
"""Maps callbacks that write files to the attribute that holds the path."""


# ------------------------------------------------------------------ data


def compare_data(model: keras.Model, arguments: dict[str, Any]) -> None:
    """Logs the global batch size of a model's first `fit`; warns of equal data. Collective."""
    if session.of(model).has_begun:
        return
    found: list[Any] = []
    # Read the first batch outside of `try`: after an error, the generator has no more batches.
    batch = first_batch(arguments)
    try:
        found.extend(_read(arguments, batch))
    except Exception as error:  # noqa: BLE001 - users' data may raise any error; `fit` reports it.
        log.debug("tfposeidon: the data of ranks are not compared: %s", error)
    batch_size, own = (*found, None, None)[:2]
    ranks = exchange_objects([batch_size, own], runtime.wire(), "tp.given_data")
    sizes = [size for size, _ in ranks]
    if None not in sizes and session.of(model).is_in_step:
        first = f"{len(sizes)} ranks x {sizes[0]}"
        terms = first if len(set(sizes)) == 1 else " + ".join(map(str, sizes))
        steps = max(one.gradient_accumulation_steps or 1 for one in session.of(model).optimizers)
        if steps > 1:
            terms = f"({terms}) x {steps} accumulated steps"
        total = sum(sizes) * steps
        runtime.log_once("tfposeidon: global batch %d = %s; learning rate unchanged", total, terms)
    if own and all(samples == own for _, samples in ranks):
        runtime.log_once(
            "tfposeidon: all ranks appear to pass the same data to fit: the lengths and some "
            "samples are equal. Pass each rank its share: tp.shard(data)."
        )


def first_batch(arguments: dict[str, Any]) -> tuple[Any, Any, Any] | None:
    """Returns a generator's first batch, and puts it back for `fit`; `None` if there is none."""
    rest = arguments["x"]
    if not isinstance(rest, types.GeneratorType) or (first := next(rest, None)) is None:
        return None

    def restored() -> Iterator[Any]:
        yield first
        # `yield from` would close the user's generator, which the next `fit` continues.
        for batch in rest:  # noqa: UP028
            yield batch

    arguments["x"] = restored()
    return keras.utils.unpack_x_y_sample_weight(first)


def _read(arguments: dict[str, Any], batch: Any) -> Iterator[int | list[Any] | None]:
    """Yields the batch size, and the number of samples or batches with checksums of samples.

    Each of the two is `None` if it is unknown, such as the samples of a dataset that calls Python.
    """
    x = arguments["x"]
    if isinstance(x, tf.data.Dataset):
        variant = tf.data.experimental.to_variant(x)
        size = int(tf.raw_ops.ComputeBatchSize(input_dataset=variant))
        yield size if size > 0 else None
        yield _samples_of_dataset(x)
        return
    if isinstance(x, keras.utils.PyDataset) and x.num_batches != 0:
        batch = x[0]
    if leaves := _arrays(batch):
        yield len(leaves[0])
        yield [getattr(x, "num_batches", None), *map(_checksum, leaves)]
        return
    leaves = _arrays([arguments[name] for name in ("x", "y", "sample_weight")])
    if rows := leaves[0].shape[0] if leaves else 0:
        yield arguments["batch_size"] or (None if arguments["steps_per_epoch"] else 32)
        yield [rows] + [
            _checksum(getattr(leaf, "iloc", leaf)[row])
            for leaf in leaves
            for row in (0, rows // 2, rows - 1)
        ]


def _arrays(data: Any) -> list[Any]:
    return [leaf for leaf in keras.tree.flatten(data) if is_array(leaf)]


def _checksum(value: Any) -> int:
    array = np.asarray(value)
    # The bytes of an array of objects are addresses, which differ between processes.
    content = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
    return zlib.crc32(content)


def _samples_of_dataset(dataset: tf.data.Dataset) -> list[Any] | None:
    """Returns the number of samples, and the first one's checksums, before any shuffle or batch.

    Returns `None` if the dataset has a `shard` step or calls Python.
    """
    steps = pipelines.chain(dataset)
    end = next((i for i, step in enumerate(steps) if pipelines.groups(step)), len(steps))
    read = steps[: min(end, pipelines.first_random(steps))]
    if pipelines.is_share(dataset) or not read:
        return None
    nodes = (
        node
        for step in pipelines.unwrapped_datasets(read[-1])
        for node in pipelines.nodes_of_step(step)
    )
    # Do not read the dataset if it calls Python code, which may count epochs, or may not restart.
    if any(node.op in pipelines.PYTHON_OPS for node in nodes):
        return None
    found = [int(read[-1].cardinality())]
    for sample in read[-1].take(1):
        found += map(_checksum, tf.nest.flatten(sample, expand_composites=True))
    return found


# ------------------------------------------------------------------ callbacks that write files


def with_one_writer(callbacks: Sequence[Any]) -> list[Any]:
    """Returns the callbacks of `fit` that run on this rank; collective.

    If several ranks pass callbacks of the same class with the same path, only the lowest of these
    ranks runs its callback. If the class is `BackupAndRestore`, its backup resumes all ranks.
    """
    mine = [_written(callback) for callback in callbacks]
    ranks: dict[str | None, list[int]] = {}
    for rank, paths in enumerate(exchange_objects(mine, runtime.wire(), "tp.files")):
        for path in filter(None, paths):
            ranks.setdefault(path, []).append(rank)
    for path, several in ranks.items():
        if len(several) > 1:
            runtime.log_once(
                "tfposeidon: only rank %d writes %s, because several ranks share this path.",
                several[0],
                path,
            )
    kept = []
    for callback, path in zip(callbacks, mine, strict=True):
        writer, *others = ranks.get(path, [runtime.rank()])
        if writer == runtime.rank():
            kept.append(callback)
        if others and isinstance(callback, keras.callbacks.BackupAndRestore):
            kept.append(ResumeTogether(writer))
    return kept


def _written(callback: Any) -> str | None:
    """Returns the class and path of a Keras callback that writes files; `None` for others."""
    base = next((base for base in _PATHS if isinstance(callback, base)), None)
    if base is None:
        return None
    hooks = [name for name in dir(base) if name.startswith("on_")]
    if any(getattr(type(callback), hook) is not getattr(base, hook) for hook in hooks):
        # A subclass with its own hooks may have work to do on every rank.
        return None
    path = os.fspath(getattr(callback, _PATHS[base]))
    return f"{base.__name__} {path if '://' in path else os.path.abspath(path)}"


class ResumeTogether(keras.callbacks.Callback):
    """Keras callback that resumes all ranks from the backup that one rank has restored."""

    def __init__(self, writer: int) -> None:
        super().__init__()
        self._writer = writer

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        own = session.of(self.model)
        epoch = exchange_objects(own.resumed_epoch, runtime.wire(), "tp.backup")[self._writer]
        if epoch is not None:
            entries.broadcast_state(self.model, runtime.wire(), self._writer, with_own_inner=True)
            own.resume_at(epoch, 0)


@functools.cache
def warn_if_all_save() -> None:
    """Warns once if a rank other than the leader saves a model, because ranks may share a path."""
    if runtime.rank() != runtime.leader():
        log.warning(
            "tfposeidon: rank %d saves a model. Ranks that save to the same path at the same "
            "time may corrupt the file: save only where tp.rank() == 0, or use a different path "
            "on each rank.",
            runtime.rank(),
        )

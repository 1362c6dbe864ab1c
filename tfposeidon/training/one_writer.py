"""Keras callbacks that write files: where ranks share a path, one of them writes.

Unchanged Keras scripts give every rank the same paths. `fit` removes such callbacks on all ranks
but the lowest, and shares the state that `BackupAndRestore` restores.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from typing import Any

import keras
from typing_extensions import override

from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.training import entries, session

log = logging.getLogger("tfposeidon")

_PATHS = {
    keras.callbacks.ModelCheckpoint: "filepath",
    keras.callbacks.CSVLogger: "filename",
    keras.callbacks.TensorBoard: "log_dir",
    keras.callbacks.BackupAndRestore: "backup_dir",
    keras.callbacks.OrbaxCheckpoint: "directory",
}
"""Callbacks that write files, and their path attributes."""


def with_one_writer(callbacks: Sequence[Any]) -> list[Any]:
    """Returns the callbacks of `fit` that run on this rank; collective.

    Of ranks whose callbacks of one kind share a path, the lowest retains its callback. A shared
    `BackupAndRestore` resumes all ranks from the files of the lowest.
    """
    mine = [_written(callback) for callback in callbacks]
    everybody = exchange_objects(mine, runtime.wire(), "tp.files")
    ranks: dict[str, list[int]] = {}
    for rank, paths in enumerate(everybody):
        for path in filter(None, paths):
            ranks.setdefault(path, []).append(rank)
    for path, several in ranks.items():
        if len(several) > 1:
            runtime.say(
                "tfposeidon: only rank %d writes %s, because several ranks share this path.",
                several[0],
                path,
            )
    kept = []
    for callback, path in zip(callbacks, mine, strict=True):
        shared = len(ranks.get(path or "", ())) > 1
        if shared and isinstance(callback, keras.callbacks.BackupAndRestore):
            kept.append(SharedBackup(callback, ranks[str(path)][0]))
        elif not shared or ranks[str(path)][0] == runtime.rank():
            kept.append(callback)
    return kept


@functools.cache
def warn_if_all_save() -> None:
    """Warns once if another rank than the lowest saves a model: ranks might share the path."""
    if runtime.rank() != runtime.spokesman():
        log.warning(
            "tfposeidon: rank %d saves a model. Ranks that save to the same path at the same "
            "time may corrupt the file: save only where tp.rank() == 0, or use a different path "
            "on each rank.",
            runtime.rank(),
        )


def _written(callback: Any) -> str | None:
    """Returns kind and path of a Keras callback that writes, comparable across ranks."""
    base = next((base for base in _PATHS if isinstance(callback, base)), None)
    if base is None:
        return None
    hooks = [name for name in dir(base) if name.startswith("on_")]
    if any(getattr(type(callback), hook) is not getattr(base, hook) for hook in hooks):
        # A subclass with its own hooks may have work to do on every rank.
        return None
    path = os.fspath(getattr(callback, _PATHS[base]))
    return f"{base.__name__} {path if '://' in path else os.path.abspath(path)}"


class SharedBackup(keras.callbacks.Callback):
    """Keras callback that runs `BackupAndRestore` on one rank, and broadcasts restored values."""

    def __init__(self, backup: keras.callbacks.BackupAndRestore, writer: int) -> None:
        super().__init__()
        self._backup, self._writer = backup, writer
        self._writes = runtime.rank() == writer

    @override
    def set_params(self, params: Any) -> None:
        super().set_params(params)
        self._backup.set_params(params)

    @override
    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self._backup.set_model(model)

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        if self._writes:
            self._backup.on_train_begin(logs)
        own = session.of(self.model)
        epoch = exchange_objects(own.resumed_epoch, runtime.wire(), "tp.backup")[self._writer]
        if epoch is not None:
            entries.share(self.model, runtime.wire(), self._writer, with_own_inner=True)
            own.resume_at(epoch, 0)

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._writes:
            self._backup.on_train_batch_end(batch, logs)

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._writes:
            self._backup.on_epoch_end(epoch, logs)

    @override
    def on_train_end(self, logs: Any = None) -> None:
        if self._writes:
            self._backup.on_train_end(logs)

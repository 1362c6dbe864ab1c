"""Saves a job so that it can go on as if nothing had happened."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_callbacks._model_state import optimizers, replicated_variables
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.exchange import replicas
from tfposeidon.exchange.agreement import as_json, first_difference
from tfposeidon.state.rank_state import Piece, redistributed
from tfposeidon.state.snapshots import Snapshot, SnapshotError, Snapshots, listed, numbered
from tfposeidon.training import layer_state, session

_LAYER = "layer."


class Checkpoint(keras.callbacks.Callback):
    """Saves model, optimizers and per-rank state; resumes from the newest snapshot that is whole.

    What is equal on all ranks is saved once, by rank 0, with what preprocessing layers have learnt; gradients being
    accumulated, residuals, moving statistics, seeds and metrics are saved per rank. On another number of ranks the
    sums of accumulated gradients and residuals are kept. A resumed run equals an uninterrupted one if the data
    come in the same order: batches of a half-done epoch are read and passed over. Callbacks that keep
    memories of their own (EarlyStopping) start theirs anew.

    Training goes on while files are written: what is saved counts as soon as all ranks have found it whole, some
    steps later, and at the latest when the next is due or training ends.

    Put it last, so that it sees what other callbacks did at the end of the epoch. For a file to hand
    on, use `model.save`.

    Args:
      folder: Seen by all ranks; made if it is missing.
      every_n_steps: Also save within epochs, after each so many steps.
      keep: How many snapshots to keep.
      resume: Go on from the newest one in `folder`, if there is any.

    Raises:
      SnapshotError: If a snapshot cannot be written or read, or is of another model.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every_n_steps: int | None = None,
        keep: int = 2,
        resume: bool = True,
    ) -> None:
        super().__init__()
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(
                f"`every_n_steps` must be at least 1. Received: every_n_steps={every_n_steps}"
            )
        if keep < 1:
            raise ValueError(f"`keep` must be at least 1. Received: keep={keep}")
        self.folder = folder
        self.every_n_steps = every_n_steps
        self.keep = keep
        self.resume = resume
        self._steps = 0
        self._epoch = 0
        self._pending_metrics: list[np.ndarray] = []
        self._waited = self._look_at = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._session = session.of(self.model)
        self._session.begin_where_asked()
        self._files = Snapshots(self.folder, runtime.wire(), self.keep)
        snapshot = self._files.read_latest() if self.resume else None
        if snapshot is not None:
            self._restore(snapshot)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        if self._pending_metrics:
            # Keras set them back a moment ago.
            _assign(self._metrics(), self._pending_metrics)
            self._pending_metrics = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._skipping = self._session.is_skipping

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._skipping:
            return
        before, self._steps = self._steps, self._steps + self.model.steps_per_execution
        self._look_after_it()
        if self.every_n_steps and self._steps // self.every_n_steps > before // self.every_n_steps:
            self._write(self._epoch, batch + 1)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._write(epoch + 1, 0)

    def on_train_end(self, logs: Any = None) -> None:
        self._files.finish()
        # Keras would begin the next fit there, too.
        self._session.begin_where_asked()

    # ---------------------------------------------------------------- writing

    def _write(self, epoch: int, batches: int) -> None:
        meta = {
            "epoch": epoch,
            "batches": batches,
            "steps": self._steps,
            "variables": as_json(replicas.describe_any(self._shared())),
            "optimizers": [self._described(optimizer) for optimizer in optimizers(self.model)],
        }
        metrics = self._metrics() if batches else []
        own = numbered(_values(self._own()), "own") | numbered(_values(metrics), "metric")
        own |= numbered(_values(self._summed()), "sum") | {
            "pieces": _text([p.to_dict() for p in self._pieces()])
        }
        self._files.start(meta, self._written_once() if runtime.rank() == 0 else {}, own)
        self._waited, self._look_at = 0, 1

    def _look_after_it(self) -> None:
        """Looks whether the files are whole after 1, 2, 4, ... steps: on all ranks alike, and rarely."""
        self._waited += 1
        if self._waited == self._look_at:
            self._look_at = 0 if self._files.poll() else 2 * self._look_at

    def _written_once(self) -> dict[str, np.ndarray]:
        layers = {f"{_LAYER}{name}": value for name, value in layer_state.read(self.model).items()}
        return numbered(_values(self._shared()), "shared") | layers

    def _described(self, optimizer: Any) -> dict[str, Any]:
        """Its scheme, and where among the model's variables those are that it trains; `None` if nobody knows yet."""
        policy = keras.saving.serialize_keras_object(getattr(optimizer, "policy", None))
        if not optimizer.built:
            return {"scheme": policy, "trains": None}
        places = {id(variable): place for place, variable in enumerate(self.model.variables)}
        strange = [
            variable.path
            for variable in optimizer._trainable_variables
            if id(variable) not in places
        ]
        if strange:
            raise SnapshotError(
                f"Checkpoint saves variables of the model. Received: an optimizer that trains {strange[0]!r}, which is "
                "not among them. Assign its layer to an attribute of the model."
            )
        return {
            "scheme": policy,
            "trains": [places[id(variable)] for variable in optimizer._trainable_variables],
        }

    def _shared(self) -> list[Any]:
        return replicated_variables(self.model)

    def _own(self) -> list[Any]:
        return list(self.model.non_trainable_variables)

    def _summed(self) -> list[Any]:
        return [
            v
            for optimizer in optimizers(self.model)
            for v in getattr(optimizer, "rank_variables", [])
        ]

    def _pieces(self) -> list[Piece]:
        return [
            replace(piece, name=f"{piece.name} of optimizer {number}" if number else piece.name)
            for number, optimizer in enumerate(optimizers(self.model))
            for piece in getattr(optimizer, "rank_pieces", [])
        ]

    def _metrics(self) -> list[Any]:
        return [variable for metric in self.model.metrics for variable in metric.variables]

    # --------------------------------------------------------------- restoring

    def _restore(self, snapshot: Snapshot) -> None:
        self._build_optimizers(snapshot)
        self._check(snapshot)
        _assign(self._shared(), listed(snapshot.shared, "shared"))
        own = snapshot.own.get(runtime.rank(), next(iter(snapshot.own.values())))
        _assign(self._own(), listed(own, "own"))
        layers = {name: value for name, value in snapshot.shared.items() if name.startswith(_LAYER)}
        layer_state.assign(
            self.model, {name.removeprefix(_LAYER): value for name, value in layers.items()}
        )
        self._restore_schemes(snapshot)
        _assign(self._summed(), self._redistributed(snapshot))
        self._pending_metrics = listed(own, "metric")
        self._steps = snapshot.meta["steps"]
        self._session.resume_at(snapshot.meta["epoch"], snapshot.meta["batches"])
        runtime.say(
            "tfposeidon: resumed from %s at epoch %d, batch %d.",
            self.folder,
            snapshot.meta["epoch"],
            snapshot.meta["batches"],
        )

    def _build_optimizers(self, snapshot: Snapshot) -> None:
        """Those that learn in a step what they train, such as a GAN's: for what they trained when they were saved."""
        variables = self.model.variables
        for optimizer, saved in self._with_saved(snapshot):
            if not optimizer.built and saved["trains"] and max(saved["trains"]) < len(variables):
                optimizer.build([variables[place] for place in saved["trains"]])

    def _restore_schemes(self, snapshot: Snapshot) -> None:
        """Under a schedule of schemes, those that made the saved state."""
        for optimizer, saved in self._with_saved(snapshot):
            policy = keras.saving.deserialize_keras_object(saved["scheme"])
            if self._session.has_scheme_changes and policy != optimizer.policy:
                optimizer.change_scheme(policy)
                self._session.retrace()

    def _with_saved(self, snapshot: Snapshot) -> list[tuple[Any, dict[str, Any]]]:
        found, saved = optimizers(self.model), snapshot.meta["optimizers"]
        if len(found) != len(saved):
            raise SnapshotError(
                f"A checkpoint must be of the same model and optimizer. Received: {len(saved)} optimizer(s) in "
                f"{self.folder}, {len(found)} in the model. Use another folder, or Checkpoint(..., resume=False)."
            )
        return list(zip(found, saved, strict=True))

    def _redistributed(self, snapshot: Snapshot) -> list[np.ndarray]:
        """State whose sum over ranks counts: this rank's own, or its part of the sum on another layout."""
        pieces = self._pieces()
        same = snapshot.same_layout and _saved_pieces(snapshot.own[runtime.rank()]) == pieces
        if all(exchange_objects(same, runtime.wire(), "tp.same_pieces")):
            return listed(snapshot.own[runtime.rank()], "sum")
        everybody = self._files.read_all_ranks(snapshot)
        saved = [
            list(zip(_saved_pieces(own), listed(own, "sum"), strict=True))
            for own in everybody.values()
        ]
        try:
            return redistributed(saved, list(zip(pieces, _values(self._summed()), strict=True)))
        except ValueError as error:
            raise SnapshotError(
                f"A checkpoint must be of the same schemes. Received: {error}. Use those it was made with, or "
                "Checkpoint(..., resume=False)."
            ) from error

    def _check(self, snapshot: Snapshot) -> None:
        difference = first_difference(
            snapshot.meta["variables"], as_json(replicas.describe_any(self._shared()))
        )
        if difference:
            place, saved, built = difference
            raise SnapshotError(
                f"A checkpoint must be of the same model and optimizer. The first difference is variable {place}: "
                f"{saved} in {self.folder}, {built} in the model. Use another folder, or Checkpoint(..., resume=False)."
            )


def _text(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def _saved_pieces(own: dict[str, np.ndarray]) -> list[Piece]:
    return [Piece.from_dict(content) for content in json.loads(own["pieces"].tobytes())]


def _values(variables: Sequence[Any]) -> list[np.ndarray]:
    tensors = [tf.convert_to_tensor(v) for v in variables]
    # NumPy's files do not know bfloat16; float32 holds all of it.
    return [(tf.cast(t, tf.float32) if t.dtype == tf.bfloat16 else t).numpy() for t in tensors]


def _assign(variables: Sequence[Any], values: Sequence[np.ndarray]) -> None:
    pairs = itertools.zip_longest(variables, values)
    if any(v is None or value is None or not _fits(v, value) for v, value in pairs):
        raise SnapshotError(
            f"A checkpoint must be of the same model and optimizer. Received: {len(values)} arrays for "
            f"{len(variables)} variables, or other shapes. Use another folder, or Checkpoint(..., resume=False)."
        )
    for variable, value in zip(variables, values, strict=True):
        variable.assign(tf.cast(value, variable.dtype))


def _fits(variable: Any, value: np.ndarray) -> bool:
    # Some state grows from step to step.
    return tf.TensorShape(variable.shape).is_compatible_with(value.shape)

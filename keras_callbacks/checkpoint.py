"""Saves a job so that it can resume as if it had not been interrupted.

A snapshot contains replicated state once, written by rank 0, and the state of each rank. If the
number of ranks changes, gradients and residuals are redistributed, and their sums are preserved.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from keras_callbacks.rank_callback import RankCallback
from tfposeidon import checks
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.exchange.replicas import describe_any, first_different_variable, variables_as_json
from tfposeidon.gradients import indices_of, of_tensorflow
from tfposeidon.optimizers.wrapper import leaves
from tfposeidon.schemes.names import register_all
from tfposeidon.state import snapshots
from tfposeidon.state.placement import (
    Placement,
    StateDescription,
    another_seed,
    is_seed,
    redistribute,
    saved_descriptions,
    with_names,
)
from tfposeidon.state.snapshots import Snapshot, SnapshotError, assign_values, mismatch, values_of
from tfposeidon.training import entries, session

_OWN = (Placement.AVERAGED, Placement.LOCAL, Placement.PARTIAL)
"""Placements of the state that each rank saves separately."""
_LAYER = "layer."
"""Prefix of the array names of layer state outside of variables."""


class Checkpoint(RankCallback):
    """Saves the model, its optimizers and per-rank state in snapshots, and resumes from them.

    The callback saves at the end of each epoch, and optionally within epochs. Every rank needs it:
    rank 0 saves the state that is equal on all ranks (weights, optimizer state, adapted
    preprocessing layers), and every rank saves the state that differs between ranks (accumulated
    gradients, residuals, moving statistics, seeds, metrics).

    When `fit` begins, all ranks resume from the newest complete snapshot. A resumed run equals an
    uninterrupted one if the data come in the same order: the batches of an unfinished epoch that
    were trained on before are read and skipped. (If `fit` shuffles, the order differs, and a log
    line warns of it.) On another number of ranks, the sums of accumulated gradients and residuals
    are preserved, and training resumes between epochs. Within an epoch, a rank would skip other
    samples than those already trained on, unless `CachePosition` tracks a cache with the same
    global batch. The measurements of `scheme="auto"` are saved, too: on the same nodes, a
    resumed run follows the same plan. Callbacks with their own state (`EarlyStopping`) start from
    their initial state.

    Training continues while files are written. A snapshot is valid once all ranks have confirmed
    that it is complete, which takes some steps, at most until the next snapshot or the end of
    training.

    Put this callback last, so that snapshots include the effects of other callbacks. With
    `LocalUpdates`, ranks continue from weights that other callbacks have assigned. To publish a
    model, use `model.save`.

    Args:
      folder: Folder that all ranks share; created if it is missing.
      every_n_steps: Number of steps between snapshots within epochs, at least 1; `None` (default)
        saves at the end of epochs only.
      keep: Number of snapshots to retain, at least 1 (default 2); older ones are deleted.
      resume: True (default) to resume from the newest snapshot in `folder`, if any; False to start
        a new run; `"epoch"` to restart the epoch of the snapshot, whose first samples are then
        trained on twice.

    Raises:
      ValueError: If `every_n_steps` or `keep` is below 1, or `resume` has another value.
      SnapshotError: In `fit`, on all ranks, if a snapshot cannot be written or read, belongs to
        another model, or was saved within an epoch with another number of ranks or of steps.

    Memory: a copy, in host memory, of the state that a rank saves, until its files are written.

    >>> import keras_callbacks
    >>> callbacks = [keras_callbacks.Checkpoint("/data/checkpoints", every_n_steps=1000)]
    """

    acts_at_server = True
    """With a server of global weights (`ElasticAveraging`), only the server saves."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every_n_steps: int | None = None,
        keep: int = 2,
        resume: bool | Literal["epoch"] = True,
    ) -> None:
        super().__init__()
        if resume not in (True, False, "epoch"):
            raise ValueError(
                f'`resume` must be True, False or "epoch". Received: resume={resume!r}. Leave it '
                "out to resume from the newest snapshot."
            )
        if every_n_steps is not None:
            checks.check_number("every_n_steps", every_n_steps, checks.AT_LEAST_1)
        checks.check_integer("keep", keep, 1)
        self.folder, self.every_n_steps = folder, every_n_steps
        self.keep, self.resume = keep, resume
        # Snapshot that `epoch_to_resume` has loaded; the next `fit` restores it.
        self._read: Snapshot | None = None
        self._steps = self._epoch = 0
        self._pending_metrics: list[np.ndarray] = []

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        self._session = session.of(self.model)
        self._session.reset_initial_epoch()
        if self.every_n_steps:
            self._session.check_in_step(f"Checkpoint(every_n_steps={self.every_n_steps})")
        # This communicator contains the ranks whose state is saved: all ranks, or only a server.
        self._wire = self._session.wire
        self._files = snapshots.Snapshots(self.folder, self._wire, self.keep)
        snapshot, self._read = self._read or self._newest(self._files), None
        self._epoch = 0
        if snapshot is not None:
            self._restore(snapshot)

    def epoch_to_resume(self) -> int:
        """Returns the epoch at which the next `fit` resumes; 0 if there is no snapshot.

        All ranks must call this method together. The next `fit` resumes from the same snapshot.

        Returns:
          Index of the epoch, from 0.

        Raises:
          SnapshotError: On all ranks, if there are snapshots and none is readable, or the newest
            belongs to another release.
        """
        # All ranks read the snapshot, because the ranks that save are unknown before `fit`.
        self._read = self._newest(snapshots.Snapshots(self.folder, runtime.wire(), self.keep))
        return 0 if self._read is None else int(self._read.meta["epoch"])

    def _newest(self, files: snapshots.Snapshots) -> Snapshot | None:
        return files.read_latest() if self.resume else None

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        pending, self._pending_metrics = self._pending_metrics, []
        # Restore metrics in this hook, because Keras resets them just before it.
        if pending and len(self.model.metrics_variables) == len(pending):
            assign_values(self.model.metrics_variables, pending)
        elif pending:
            # With `run_eagerly`, for example, Keras builds metrics only in the first step.
            runtime.log_once(
                "tfposeidon: the metrics of this epoch exclude the batches that were trained on "
                "before the job resumed."
            )

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, logs)
        if self._session.was_skipped:
            return
        before, self._steps = self._steps, self._steps + self.model.steps_per_execution
        # Ranks that do not execute steps together wait for the files at the end of the epoch.
        if self._session.knows_lengths or self._session.is_in_step:
            self._files.poll_at_step()
        if self.every_n_steps and self._steps // self.every_n_steps > before // self.every_n_steps:
            self._write(self._epoch, batch + 1)

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        # `on_job_failure` saves this epoch if the job fails before the next epoch begins.
        self._epoch = epoch + 1
        self._write(self._epoch, 0)

    def on_job_failure(self) -> None:
        """Saves the current state if a server loses a worker within an epoch."""
        self._write(self._epoch, 0)
        self._files.finish()

    @override
    def on_train_end(self, logs: Any = None) -> None:
        self._files.finish()
        # Otherwise Keras would start the next `fit` at the epoch of the snapshot, too.
        self._session.reset_initial_epoch()

    # ---------------------------------------------------------------- writing

    def _write(self, epoch: int, batches: int) -> None:
        meta = {
            "epoch": epoch,
            "batches": batches,
            "steps": self._steps,
            "steps_per_epoch": self.params.get("steps"),
            "variables": self._variables(),
            "optimizers": list(map(self._optimizer_meta, entries.held_optimizers(self.model))),
        }
        # If ranks train local weights, save the global weights.
        with self._session.global_weights():
            pairs = list(entries.parts(self.model))
            own = {
                **{one: values_of(entries.variables_of(self.model, one)) for one in _OWN},
                # Between epochs, metrics are not saved: Keras resets them when an epoch starts.
                "metric": values_of(self.model.metrics_variables if batches else []),
                "sum": values_of([variable for variable, _ in pairs]),
                "pieces": [np.asarray(json.dumps([dataclasses.asdict(one) for _, one in pairs]))],
                **self._layers(Placement.LOCAL),
            }
            shared: snapshots.Arrays = {}
            if self._wire.topology.rank == 0:
                shared = self._layers(Placement.REPLICATED)
                shared["shared"] = values_of(entries.replicated_variables(self.model))
            self._files.start(meta, shared, own)

    def _variables(self) -> list[list[Any]]:
        return variables_as_json(describe_any(entries.replicated_variables(self.model)))

    def _layers(self, placement: Placement) -> snapshots.Arrays:
        found = entries.read_layers(self.model, placement)
        return {f"{_LAYER}{name}": [value] for name, value in found.items()}

    def _optimizer_meta(self, held: Any) -> dict[str, Any]:
        """Returns an optimizer's scheme, plans, and the indices of its variables in the model."""
        optimizer = session.without_loss_scale(held)
        policy = keras.saving.serialize_keras_object(getattr(optimizer, "policy", None))
        if not held.built:
            return {"scheme": policy, "trains": None, "lists": [], "planning": None}
        exchange = getattr(optimizer, "exchange", None)
        planning = exchange and exchange.plans.to_dict()
        indices = indices_of(self.model.variables)
        # Keras has no public attribute for these variables.
        trained = optimizer._trainable_variables
        unknown = [v.path for v in trained if of_tensorflow(v).ref() not in indices]
        if unknown:
            raise SnapshotError(
                "Checkpoint requires an optimizer that trains only variables of the model. "
                f"Received: {unknown[0]!r}, which is not a variable of the model. Assign its layer "
                "to an attribute of the model."
            )
        # Each list contains variables that a step exchanges together.
        lists = exchange.plans.lists if exchange else []
        return {
            "scheme": policy,
            "classes": _classes(held),
            "trains": [indices[of_tensorflow(variable).ref()] for variable in trained],
            "lists": [[indices[variable.ref()] for variable in one] for one in lists],
            "planning": planning,
        }

    # --------------------------------------------------------------- restoring

    def _restore(self, snapshot: Snapshot) -> None:
        # Build optimizers first, because the comparison would miss variables of unbuilt optimizers.
        self._build_optimizers(snapshot)
        self._check(snapshot)
        batches = 0 if self.resume == "epoch" else snapshot.meta["batches"]
        if batches:
            self._check_samples(snapshot)
        if batches and self._session.shuffles:
            runtime.log_once(
                "tfposeidon: `fit` shuffles the data in another order than the interrupted run, so "
                "the %d skipped batches differ from the batches that were trained on before. Pass "
                'shuffle=False to fit, or use Checkpoint(..., resume="epoch").',
                batches,
            )
        assign_values(entries.replicated_variables(self.model), snapshot.shared["shared"])
        own = self._assign_own(snapshot)
        arrays = snapshot.shared | snapshot.own.get(self._wire.topology.rank, {})
        layers = {k.removeprefix(_LAYER): v[0] for k, v in arrays.items() if k.startswith(_LAYER)}
        entries.assign_layers(self.model, layers)
        # Restore schemes first, because they create the per-rank variables.
        self._restore_schemes(snapshot)
        pairs = list(entries.parts(self.model))
        assign_values([variable for variable, _ in pairs], self._redistributed(snapshot, pairs))
        self._pending_metrics = own["metric"] if batches else []
        self._steps, self._epoch = snapshot.meta["steps"], snapshot.meta["epoch"]
        self._session.resume_at(self._epoch, batches)
        text = "tfposeidon: resumed from %s at epoch %d, batch %d."
        runtime.log_once(text, self.folder, self._epoch, batches)

    def _check_samples(self, snapshot: Snapshot) -> None:
        """Raises `SnapshotError` if resuming within an epoch would skip other samples."""
        compared = {"steps per epoch": (snapshot.meta["steps_per_epoch"], self.params.get("steps"))}
        if not self._session.knows_position:
            ranks = sum(map(len, snapshot.meta["nodes"]))
            compared["ranks"] = (ranks, self._wire.topology.size)
        for what, (before, now) in compared.items():
            if None not in (before, now) and before != now:
                raise SnapshotError(
                    "To resume within an epoch, each step must read the same samples as before. "
                    f"Received: a snapshot at batch {snapshot.meta['batches']} with {before} "
                    f"{what} in {self.folder}, and {now} in this run. Restart the epoch with "
                    'Checkpoint(..., resume="epoch"), or read a datacache.Cache with '
                    "keras_callbacks.CachePosition, whose order depends only on the global batch."
                )

    def _assign_own(self, snapshot: Snapshot) -> snapshots.Arrays:
        """Restores the state of this rank's layers, and returns the rank's saved arrays."""
        # A rank that the saved job did not have uses the averaged state of another rank, retains
        # its recurrent states, and receives seeds that no other rank has.
        rank, saved = self._wire.topology.rank, snapshot.own
        own = saved[rank] if rank in saved else next(iter(saved.values()))
        averaged, local, partial = (entries.variables_of(self.model, one) for one in _OWN)
        assign_values(averaged, own["averaged"])
        if rank in saved:
            assign_values(local, own["local"])
        else:
            if len(local) != len(own["local"]):
                raise mismatch(f"{len(own['local'])} local values for {len(local)}")
            for variable, value in zip(local, own["local"], strict=True):
                if is_seed(variable):
                    variable.assign(another_seed(tf.constant(value), rank))
        values = own["partial"]
        if not snapshot.same_layout:
            summands = zip(*(arrays["partial"] for arrays in saved.values()), strict=True)
            totals = [np.sum(of_ranks, axis=0) for of_ranks in summands]
            values = list(map(np.zeros_like, totals)) if rank else totals
        assign_values(partial, values)
        return own

    def _build_optimizers(self, snapshot: Snapshot) -> None:
        """Builds optimizers for the variables that they trained when they were saved."""
        # Some optimizers, for example in a GAN, receive their variables only in their first step.
        variables = self.model.variables
        for held, saved in self._with_saved(snapshot):
            # If an index is out of range, the model differs, and `_check` raises an error.
            if not held.built and saved["trains"] and max(saved["trains"]) < len(variables):
                held.build([variables[index] for index in saved["trains"]])

    def _restore_schemes(self, snapshot: Snapshot) -> None:
        """Restores the saved schemes if a callback changes schemes, and the saved plans."""
        # Import all schemes first, because an older release may have had them in other modules.
        register_all()
        for held, saved in self._with_saved(snapshot):
            optimizer = session.without_loss_scale(held)
            policy = keras.saving.deserialize_keras_object(saved["scheme"])
            if self._session.has_scheme_changes and policy != optimizer.policy:
                optimizer.change_scheme(policy)
                self._session.retrace()
            planning = with_names(saved["planning"], self._names(snapshot))
            exchange: Any = getattr(optimizer, "exchange", None)
            if planning and exchange and exchange.plans.resume(planning):
                self._session.retrace()
            # Create these exchangers, so that each residual returns to the step that computed it.
            for indices in saved["lists"] if exchange else []:
                exchange.exchanger([self.model.variables[index] for index in indices])

    def _with_saved(self, snapshot: Snapshot) -> list[tuple[Any, dict[str, Any]]]:
        found, saved = entries.held_optimizers(self.model), snapshot.meta["optimizers"]
        if len(found) != len(saved):
            raise mismatch(f"{len(saved)} optimizer(s) in {self.folder}, {len(found)} in the model")
        return list(zip(found, saved, strict=True))

    def _redistributed(
        self, snapshot: Snapshot, pairs: list[tuple[Any, StateDescription]]
    ) -> list[np.ndarray]:
        """Returns the values of per-rank optimizer state, whose sum over ranks is preserved."""
        names, mine = self._names(snapshot), snapshot.own.get(self._wire.topology.rank, {})
        now = [description for _, description in pairs]
        same = snapshot.same_layout and saved_descriptions(mine["pieces"][0], names) == now
        # All ranks must take the same branch, because `read_all_ranks` is collective.
        if all(exchange_objects(same, self._wire, "tp.same_pieces")):
            return mine["sum"]
        saved = [
            list(zip(saved_descriptions(own["pieces"][0], names), own["sum"], strict=True))
            for own in self._files.read_all_ranks(snapshot).values()
        ]
        try:
            return redistribute(saved, [(piece, values_of([one])[0]) for one, piece in pairs])
        except ValueError as error:
            raise SnapshotError(
                f"A checkpoint must match the schemes of the optimizer. Received: {error}. Use the "
                "schemes that it was saved with, or Checkpoint(..., resume=False)."
            ) from error

    def _names(self, snapshot: Snapshot) -> dict[str, str]:
        """Returns current paths of variables by saved paths, which differ in a loaded model."""
        pairs = zip(snapshot.meta["variables"], self._variables(), strict=False)
        return {saved: path for (saved, _, _), (path, _, _) in pairs}

    def _check(self, snapshot: Snapshot) -> None:
        for held, meta in self._with_saved(snapshot):
            before, now = meta.get("classes", _classes(held)), _classes(held)
            if before != now:
                # Compare classes, because other optimizers may have state of the same shapes.
                found = f"{', '.join(before)} in {self.folder}, {', '.join(now)} in the model"
                raise mismatch(found)
        if difference := first_different_variable(snapshot.meta["variables"], self._variables()):
            index, saved, built = difference
            raise mismatch(f"variable {index}: {saved} in {self.folder}, {built} in the model")


def _classes(held: Any) -> list[str]:
    """Returns the class names of the optimizers within an optimizer's wrappers."""
    return [type(leaf).__name__ for leaf in leaves(held)]

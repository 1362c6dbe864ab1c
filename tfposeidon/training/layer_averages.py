"""State of layers, averaged over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from typing_extensions import override

from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.exchange import replicas
from tfposeidon.state.placement import Placement
from tfposeidon.training import session
from tfposeidon.training.entries import variables_of

SAVING = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.OrbaxCheckpoint,
)
"""Callbacks that save weights, with `save_freq` possibly within an epoch."""


class LayerAverages(keras.callbacks.Callback):
    """Keras callback that averages layer state once per epoch, before validation if there is any.

    Validation changes no such state. Partial state is summed at the end of the epoch.
    """

    _is_due = True

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._is_due = True

    @override
    def on_test_begin(self, logs: Any = None) -> None:
        self._average()

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._average()
        collect(self.model)

    def _average(self) -> None:
        # Where only some ranks validate, the others take part at the end of the epoch.
        if self._is_due:
            self._is_due = False
            average(self.model)


def average(model: keras.Model) -> None:
    """Averages layer state over ranks where it differs; collective."""
    wire = session.of(model).wire
    averaged = variables_of(model, Placement.AVERAGED)
    if averaged and wire.topology.size > 1:
        # Equal values, as of frozen layers, stay as they are: their mean may be another number.
        own = replicas.checksum(averaged, on_device=True)
        if len(set(exchange_objects(own, wire, "tp.layer_state"))) > 1:
            replicas.average(averaged, wire)


def collect(model: keras.Model) -> None:
    """Sums partial state on rank 0 and clears it on others; collective."""
    replicas.collect(variables_of(model, Placement.PARTIAL), session.of(model).wire)


def check_saves(model: keras.Model, callbacks: Sequence[Any]) -> None:
    """Refuses callbacks that save within an epoch while layer state differs between ranks.

    Collective: if one rank has such a callback, it raises on all.
    """
    own = variables_of(model, Placement.AVERAGED, Placement.PARTIAL)
    if not own or not session.of(model).is_in_step:
        # With local weights, such callbacks see global weights and state.
        return
    within = [one for one in callbacks if isinstance(one, SAVING) and one.save_freq != "epoch"]
    mine = [f"{type(one).__name__}(save_freq={one.save_freq})" for one in within]
    ranks = exchange_objects(mine, runtime.wire(), "tp.saves")
    if found := [one for names in ranks for one in names]:
        raise ValueError(
            "Callbacks must save at the end of an epoch if the state of layers is averaged there. "
            f"Received: {found[0]}, and {own[0].path!r}, which differs between ranks within an "
            'epoch. Use save_freq="epoch", or keras_callbacks.Checkpoint(every_n_steps=...).'
        )


def refuse_synchronized(model: Any) -> None:
    """Refuses layers that Keras would synchronize in each step, which it cannot here."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized:
            raise ValueError(
                "BatchNormalization must not be synchronized: a rank normalizes its samples by "
                f"the statistics of its own batch. Received: {layer.name!r}, a "
                "BatchNormalization(synchronized=True). Leave `synchronized` out: `fit` averages "
                "the moving statistics. For few samples on each rank, use GroupNormalization."
            )

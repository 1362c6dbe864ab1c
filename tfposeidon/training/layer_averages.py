"""State of layers, averaged over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from typing_extensions import override

from tfposeidon.communication.wire import exchange_objects
from tfposeidon.exchange import replicas
from tfposeidon.state.placement import Placement
from tfposeidon.training import session
from tfposeidon.training.entries import variables_of


class LayerAverages(keras.callbacks.Callback):
    """Keras callback that averages layer state once per epoch, before validation if there is any.

    Validation changes no such state.
    """

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._is_due = True

    @override
    def on_test_begin(self, logs: Any = None) -> None:
        self._average()

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._average()

    def _average(self) -> None:
        # Where only some ranks validate, the others take part at the end of the epoch.
        if self._is_due:
            self._is_due = False
            average(self.model)


def average(model: keras.Model) -> None:
    """Averages layer state over ranks where it differs, and sums partial state; collective."""
    wire = session.of(model).wire
    averaged = variables_of(model, Placement.AVERAGED)
    if averaged and wire.topology.size > 1:
        # Equal values, as of frozen layers, stay as they are: their mean may be another number.
        own = replicas.checksum(averaged, on_device=True)
        if len(set(exchange_objects(own, wire, "tp.layer_state"))) > 1:
            replicas.average(averaged, wire)
    replicas.collect(variables_of(model, Placement.PARTIAL), wire)


def check_saves(model: keras.Model, callbacks: Sequence[Any]) -> None:
    """Refuses callbacks that save within an epoch while layer state differs between ranks."""
    saving = keras.callbacks.ModelCheckpoint | keras.callbacks.BackupAndRestore
    within = [one for one in callbacks if isinstance(one, saving) and one.save_freq != "epoch"]
    if within and (own := variables_of(model, Placement.AVERAGED, Placement.PARTIAL)):
        raise ValueError(
            "Callbacks must save at the end of an epoch if the state of layers is averaged there. "
            f"Received: {type(within[0]).__name__}(save_freq={within[0].save_freq}), and "
            f"{own[0].path!r}, which differs between ranks within an epoch. Use "
            'save_freq="epoch", or keras_callbacks.Checkpoint(every_n_steps=...).'
        )

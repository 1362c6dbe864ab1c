"""Where each rank trains weights of its own, callbacks see what is equal on all ranks."""

from __future__ import annotations

from typing import Any

import keras
from typing_extensions import override

from tfposeidon.training import session


class ShowCentre(keras.callbacks.Callback):
    """Shows the centre at the end of epochs and of training; the next train step hides it.

    Weights that are assigned between two epochs or two calls of `fit`, as by `EarlyStopping` or
    `load_weights`, are where all ranks go on from.
    """

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        self._session = session.of(self.model)
        self._centres = self._session.centres
        # A broadcast may follow, and what other callbacks restore.
        self._centres.go_on_from_assigned(are_equal=False)
        self._centres.note()

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._centres.show()
        # To tell whether others are assigned: `Checkpoint` looks before it saves, and `AgreedStop`
        # when an epoch begins.
        self._centres.note()

    @override
    def on_train_end(self, logs: Any = None) -> None:
        self._centres.go_on_from_assigned()
        self._centres.note()
        for optimizer in self._session.optimizers:
            optimizer.end_fit()

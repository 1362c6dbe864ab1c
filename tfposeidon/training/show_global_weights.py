"""Where each rank trains weights of its own, callbacks see those that are equal on all ranks."""

from __future__ import annotations

from typing import Any

import keras
from typing_extensions import override

from tfposeidon.training import session


class ShowGlobalWeights(keras.callbacks.Callback):
    """Shows the global weights in validation, and at the end of epochs and of training.

    Weights that are assigned between two epochs or two calls of `fit`, as by `EarlyStopping` or
    `load_weights`, are those from which all ranks go on.
    """

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        self._local_weights = session.of(self.model).local_weights
        # A broadcast may follow, and the state that other callbacks restore.
        self._local_weights.restart_if_assigned(are_equal=False)

    @override
    def on_test_begin(self, logs: Any = None) -> None:
        self._local_weights.show()

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._local_weights.show()

    @override
    def on_train_end(self, logs: Any = None) -> None:
        self._local_weights.end_fit()

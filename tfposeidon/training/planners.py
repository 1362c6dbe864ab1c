"""Callback that passes the events of `fit` to the callbacks of its optimizers' planners."""

from __future__ import annotations

from typing import Any

import keras
from typing_extensions import override

from tfposeidon.training import session


class PlannerCallbacks(keras.callbacks.Callback):
    """Keras callback that runs `Planner.callback`, once for all optimizers of the model.

    A schedule may change the planner of an optimizer, and a train step may contain more optimizers
    than were found before, so each epoch adds the callbacks that are missing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._callbacks: dict[type, keras.callbacks.Callback] = {}

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        for optimizer in session.optimizers_of(self.model):
            kind = optimizer.exchange.plans.planner.callback
            if kind is not None and kind not in self._callbacks:
                self._callbacks[kind] = kind()
                self._callbacks[kind].set_params(self.params)
                self._callbacks[kind].set_model(self.model)
        for callback in self._callbacks.values():
            callback.on_epoch_begin(epoch, logs)

    @override
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        for callback in self._callbacks.values():
            callback.on_train_batch_begin(batch, logs)

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        for callback in self._callbacks.values():
            callback.on_train_batch_end(batch, logs)

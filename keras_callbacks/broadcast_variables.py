"""Starts all ranks alike."""

from __future__ import annotations

from typing import Any

import keras

from keras_callbacks.model_state import replicated_variables
from tfposeidon import replicas, runtime


class BroadcastVariables(keras.callbacks.Callback):
    """Gives every rank the root's model, optimizer state and seed generators when training begins.

    Put it before `Checkpoint`, which then restores what is each rank's own.

    Args:
      root_rank: Whose state everybody gets.

    Raises:
      RuntimeError: If ranks built different models; it names the first variable that differs.
    """

    def __init__(self, root_rank: int = 0) -> None:
        super().__init__()
        self.root_rank = root_rank

    def on_train_begin(self, logs: Any = None) -> None:
        variables = [*replicated_variables(self.model), *self.model.non_trainable_variables]
        replicas.broadcast(variables, runtime.wire(), self.root_rank)
        scatter = getattr(self.model.optimizer, "scatter_state", None)
        if scatter is not None:
            scatter(self.root_rank)

"""Starts all ranks alike."""

from __future__ import annotations

from typing import Any

import keras

from keras_callbacks._model_state import optimizers, replicated_variables
from tfposeidon.communication import runtime
from tfposeidon.exchange import replicas
from tfposeidon.training import layer_state


class BroadcastVariables(keras.callbacks.Callback):
    """Gives every rank the root's model, optimizer states and seed generators when training begins.

    So it does with what preprocessing layers of the model have learnt by `adapt` and keep outside of variables:
    statistics, bins, vocabularies. Layers outside of the model, in a `tf.data` pipeline, it does not know: adapt them
    to the same data on every rank.

    Put it before `Checkpoint`, which then restores what is each rank's own.

    Args:
      root_rank: Whose state everybody gets.

    Raises:
      RuntimeError: If ranks built different models; it names the first variable that differs.
      ValueError: If layers hold tables that differ and cannot be sent.
    """

    def __init__(self, root_rank: int = 0) -> None:
        super().__init__()
        self.root_rank = root_rank

    def on_train_begin(self, logs: Any = None) -> None:
        variables = [*replicated_variables(self.model), *self.model.non_trainable_variables]
        replicas.broadcast(variables, runtime.wire(), self.root_rank)
        layer_state.broadcast(self.model, runtime.wire(), self.root_rank)
        for optimizer in optimizers(self.model):
            scatter = getattr(optimizer, "scatter_state", None)
            if scatter is not None:
                scatter(self.root_rank)

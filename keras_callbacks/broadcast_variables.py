"""Makes all ranks start with the same model."""

from __future__ import annotations

from typing import Any

import keras
from typing_extensions import override

from keras_callbacks._model_state import optimizers, replicated_variables
from tfposeidon.communication import runtime
from tfposeidon.exchange import replicas
from tfposeidon.training import layer_state


class BroadcastVariables(keras.callbacks.Callback):
    """Gives every rank the model and optimizer state of one rank when training begins.

    Seed generators and moving statistics are part of it, and so is what preprocessing layers of the
    model have learnt by `adapt` and keep outside of variables: statistics, bins, vocabularies.
    Layers that are not part of the model, such as those in a `tf.data` pipeline, are not found:
    adapt them to the same data on every rank. State that differs between ranks by design, such as
    the residuals of sparse schemes, is left alone.

    Put it first, and in particular before `Checkpoint`, which then restores what is each rank's
    own.

    Args:
      root_rank: Rank whose state all others receive; the same on every rank.

    Raises:
      RuntimeError: In `fit`, on all ranks, if they built different models; the message names the
        first variable that differs. Also if the model has no weights yet.
      ValueError: In `fit`, on all ranks, if layers hold tables that differ and cannot be assigned.

    Cost: one broadcast for each variable, once per `fit`.

    >>> import keras_callbacks
    >>> callbacks = [keras_callbacks.BroadcastVariables()]
    """

    def __init__(self, root_rank: int = 0) -> None:
        super().__init__()
        self.root_rank = root_rank

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        variables = [*replicated_variables(self.model), *self.model.non_trainable_variables]
        replicas.broadcast(variables, runtime.wire(), self.root_rank)
        layer_state.broadcast(self.model, runtime.wire(), self.root_rank)
        for optimizer in optimizers(self.model):
            # Keras's own optimizers keep nothing at servers.
            scatter = getattr(optimizer, "scatter_state", None)
            if scatter is not None:
                scatter(self.root_rank)

"""Brings state that servers keep together, for what saves on one rank."""

from __future__ import annotations

from typing import Any

import keras

from keras_callbacks._model_state import optimizers


class GatherState(keras.callbacks.Callback):
    """Gathers the optimizers' states on one rank after each epoch, where `ShardedServer(update="server")` cut it.

    All ranks have it, before what saves: `ModelCheckpoint` on that rank then writes an ordinary file.
    `keras_callbacks.Checkpoint` does not need it.

    Args:
      rank: Who saves.

    Memory: of the whole states, on that rank's host.
    """

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.rank = rank

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for optimizer in optimizers(self.model):
            gather = getattr(optimizer, "gather_state", None)
            if gather is not None:
                gather(self.rank)

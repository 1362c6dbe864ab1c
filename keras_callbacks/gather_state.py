"""Gathers sharded optimizer state on the rank that saves."""

from __future__ import annotations

from typing import Any

import keras
from typing_extensions import override

from tfposeidon.training.entries import optimizers


class GatherState(keras.callbacks.Callback):
    """Gathers the optimizer state on one rank after each epoch, for callbacks that save there.

    `tfposeidon.ShardedOptimizer` distributes its state over all ranks. With this callback,
    `keras.callbacks.ModelCheckpoint` on that rank writes an ordinary file. All ranks need this
    callback, because each rank sends its part. Put it before the callback that saves. Other
    optimizers and `keras_callbacks.Checkpoint` do not need it.

    Args:
      rank: Rank that saves (default 0); the same on every rank.

    Memory: the whole optimizer state in that rank's host memory.

    Example:
      >>> import keras, keras_callbacks, tfposeidon as tp
      >>> callbacks = [keras_callbacks.GatherState()]
      >>> if tp.rank() == 0:
      ...     callbacks.append(keras.callbacks.ModelCheckpoint("model.keras"))
    """

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.rank = rank

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for optimizer in optimizers(self.model):
            # Other optimizers hold their whole state on each rank.
            if hasattr(optimizer, "gather_state"):
                optimizer.gather_state(self.rank)

"""Tells a cache which epoch is trained, and how far."""

from __future__ import annotations

from typing import Any

import keras


class CachePosition(keras.callbacks.Callback):
    """Keeps a `datacache.Cache` in step with `fit`, so that `cache.state_dict()` is where training is.

    An epoch of `fit` is the epoch of that number of the cache, in its order: a job that goes on with another
    `initial_epoch`, or from a `Checkpoint`, sees the samples that it would have seen.

    Args:
      cache: Whose dataset is given to `fit`.
    """

    def __init__(self, cache: Any) -> None:
        super().__init__()
        self.cache = cache

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.cache.begin_epoch(epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.cache.count(self.model.steps_per_execution)

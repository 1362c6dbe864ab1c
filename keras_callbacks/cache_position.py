"""Tells a cache which epoch is trained, and how far."""

from __future__ import annotations

from typing import Any

import keras


class CachePosition(keras.callbacks.Callback):
    """Keeps a dataset of a `datacache.Cache` in step with `fit`, so that `cache.state_dict(data)` is where training is.

    An epoch of `fit` is the epoch of that number of the dataset, in its order: a job that goes on with another
    `initial_epoch`, or from a `Checkpoint`, sees the samples that it would have seen.

    Args:
      cache: Whose dataset is given to `fit`.
      data: What is given to `fit`: the dataset, or what `map` made of it. It may be left out where the cache has made
        one dataset only.

    Example:
      training, validation = cache.dataset(1024).map(augment), cache.dataset(1024, shuffle=False)
      model.fit(training, validation_data=validation, callbacks=[keras_callbacks.CachePosition(cache, training)])
    """

    def __init__(self, cache: Any, data: Any = None) -> None:
        super().__init__()
        self.cache, self.data = cache, data

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.cache.begin_epoch(epoch, self.data)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.cache.count(self.model.steps_per_execution, self.data)

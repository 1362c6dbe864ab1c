"""Keeps a cache's dataset in step with training."""

from __future__ import annotations

from typing import Any

import keras
from typing_extensions import override


class CachePosition(keras.callbacks.Callback):
    """Tells a `datacache.Cache` which epoch is trained and how many of its steps are done.

    Epoch `e` of `fit` then reads epoch `e` of the dataset, in that epoch's order: a job that goes
    on at another `initial_epoch`, or from a `Checkpoint`, sees the samples that it would have seen.
    And `cache.state_dict(data)` always says where training is. Every rank tells its own cache;
    nothing is sent.

    Args:
      cache: The `datacache.Cache` that made the dataset given to `fit`.
      data: The dataset given to `fit`: the cache's own, or what `map`, `prefetch` and the like made
        of it. May be left out where the cache has made one dataset only.

    Raises:
      RuntimeError: In `fit`, if the cache has made several datasets and `data` is none of them, or
        if the dataset begins within an epoch.

    Example::

        training = cache.dataset(global_batch=1024).map(augment)
        validation = cache.dataset(global_batch=1024, shuffle=False)
        position = keras_callbacks.CachePosition(cache, training)
        model.fit(training, validation_data=validation, callbacks=[position])
    """

    def __init__(self, cache: Any, data: Any = None) -> None:
        super().__init__()
        self.cache, self.data = cache, data

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.cache.begin_epoch(epoch, self.data)

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # One call stands for so many steps; what goes beyond the epoch's end is not counted.
        self.cache.count(self.model.steps_per_execution, self.data)

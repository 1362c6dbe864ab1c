"""Keeps a cache's dataset in step with training."""

from __future__ import annotations

from typing import Any

import keras
from typing_extensions import override


class CachePosition(keras.callbacks.Callback):
    """Tells a `datacache.Cache` which epoch is trained and how many of its steps are done.

    Epoch `e` of `fit` then reads epoch `e` of the dataset, in that epoch's order, or with
    `steps_per_epoch` goes on after `e` times so many steps: a job that goes on at another
    `initial_epoch`, or from a `Checkpoint`, sees the samples that it would have seen. And
    `cache.state_dict(data)` always says where training is. Every rank tells its own cache; nothing
    is sent.

    Args:
      cache: The `datacache.Cache` that made the dataset given to `fit`.
      data: The dataset given to `fit`: the cache's own, or what `map`, `prefetch` and the like made
        of it. May be left out where the cache has made one dataset only, and an epoch of `fit` is
        an epoch of it.

    Raises:
      RuntimeError: In `fit`, if the cache has made several datasets and `data` is none of them, if
        the dataset begins within an epoch, or the position does not follow from the epoch.

    Example:
      >>> import datacache, keras, keras_callbacks, tempfile
      >>> import tensorflow as tf
      >>> samples = tf.data.Dataset.from_tensor_slices((tf.zeros([8, 1]), tf.zeros([8])))
      >>> source = datacache.from_dataset(samples, key="zeros")
      >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
      >>> model.compile("sgd", "mse")
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     cache = datacache.Cache(source, memory=f"{folder}/memory")
      ...     training = cache.dataset(global_batch=4)
      ...     position = keras_callbacks.CachePosition(cache, training)
      ...     history = model.fit(
      ...         training, epochs=2, shuffle=False, callbacks=[position], verbose=0
      ...     )
      ...     cache.state_dict(training)["epoch"]
      2
    """

    knows_position = True
    """Batches are those of an order over all ranks, whatever their number."""

    def __init__(self, cache: Any, data: Any = None) -> None:
        super().__init__()
        self.cache, self.data = cache, data

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        self._is_first = True

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.cache.begin_epoch(
            epoch,
            self.data,
            self.params["steps"],
            steps_per_execution=self.model.steps_per_execution,
            is_first=self._is_first,
        )
        self._is_first = False

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # One call stands for so many steps; what goes beyond the data's end is not counted.
        self.cache.count(self.model.steps_per_execution, self.data)

    @override
    def on_train_end(self, logs: Any = None) -> None:
        self.cache.leave(self.data)

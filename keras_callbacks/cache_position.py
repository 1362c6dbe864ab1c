"""Synchronizes a cache's dataset with the position of training."""

from __future__ import annotations

from typing import Any

import keras
from typing_extensions import override


class CachePosition(keras.callbacks.Callback):
    """Sets the epoch and the step of training in a `datacache.Cache`.

    Epoch `e` of `fit` then reads epoch `e` of the dataset, in that epoch's order, or with
    `steps_per_epoch` starts after `e` times that number of steps. So a job that starts at another
    `initial_epoch`, or resumes from a `Checkpoint`, reads the same samples as an uninterrupted job.
    `cache.state_dict(data)` always contains the position of training. Every rank updates its own
    cache, without communication.

    Args:
      cache: The `datacache.Cache` that created the dataset passed to `fit`.
      data: The dataset passed to `fit`: the cache's own, or a result of `map`, `prefetch` and the
        like on it. Optional if the cache has created one dataset only, and an epoch of `fit` is an
        epoch of it.

    Raises:
      RuntimeError: In `fit`, if the cache has created several datasets and `data` is none of them,
        if the dataset starts within an epoch, or if the position does not follow from the epoch.

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
    """True: the order of batches spans all ranks, whatever their number."""

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
        # One call covers several steps; the cache ignores steps beyond the end of the data.
        self.cache.count(self.model.steps_per_execution, self.data)

    @override
    def on_train_end(self, logs: Any = None) -> None:
        self.cache.leave(self.data)

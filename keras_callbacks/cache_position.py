"""Synchronizes a cache's dataset with the position of training."""

from __future__ import annotations

from typing import Any

import keras
from typing_extensions import override

from tfposeidon.training import session


class CachePosition(keras.callbacks.Callback):
    """Sets the epoch and the step of training in a `datacache.Cache`.

    Epoch `e` of `fit` then reads epoch `e` of the dataset, in the order of that epoch. With
    `steps_per_epoch`, it starts after `e * steps_per_epoch` steps of the dataset. Therefore, a job
    that starts at another `initial_epoch`, or resumes from a `Checkpoint`, reads the same samples
    as an uninterrupted job. `cache.state_dict(data)` always contains the position of training.
    Every rank updates its own cache, without communication.

    Args:
      cache: The `datacache.Cache` that created the dataset passed to `fit`.
      data: The dataset passed to `fit`: a dataset that the cache created, or the result of methods
        such as `map` and `prefetch` on it. Optional if the cache has created only one dataset, and
        each epoch of `fit` reads one epoch of this dataset.

    Raises:
      RuntimeError: In `fit`, if the cache has created several datasets and `data` does not identify
        one of them, if the dataset starts within an epoch, or if the epoch does not determine the
        position.

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
    """True, because the order of samples does not depend on the number of ranks."""

    def __init__(self, cache: Any, data: Any = None) -> None:
        super().__init__()
        self.cache, self.data = cache, data
        # The elements are the epoch of `fit`, the cache's epoch and samples at its start, and the
        # cache's steps per epoch, which depend on the number of ranks.
        self._begin = keras.Variable([-1, 0, 0, 0], dtype="int64", name="begin", trainable=False)

    def state(self) -> list[tuple[Any, str]]:
        """Returns the position at which the current or next epoch starts, for `Checkpoint`."""
        return [(self._begin, "replicated")]

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        self._is_first = True
        # If the job resumes, `Checkpoint` then assigns the saved position.
        self._begin.assign([-1, 0, 0, 0])

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        saved_epoch, *begin, steps = self._begin.numpy().tolist()
        is_restored = self._is_first and saved_epoch == epoch
        if is_restored and session.of(self.model).is_skipping:
            now = self.cache.steps_per_epoch(self.data)
            if steps != now:
                raise RuntimeError(
                    "To resume within an epoch, epochs of the cache must have as many steps as "
                    f"before. Received: {now} steps on these ranks, {steps} in the snapshot. "
                    "Resume on as many ranks as before, or restart the epoch with "
                    'Checkpoint(..., resume="epoch").'
                )
        self.cache.begin_epoch(
            epoch,
            self.data,
            self.params["steps"],
            steps_per_execution=self.model.steps_per_execution,
            is_first=self._is_first,
            begin=tuple(begin) if is_restored else None,
        )
        self._is_first = False
        self._record(epoch)

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._record(epoch + 1)

    def _record(self, epoch: int) -> None:
        position = self.cache.state_dict(self.data)
        steps = self.cache.steps_per_epoch(self.data)
        self._begin.assign([epoch, position["epoch"], position["samples"], steps])

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # A call may cover several steps. The cache ignores steps beyond the end of the data.
        self.cache.count(self.model.steps_per_execution, self.data)

    @override
    def on_train_end(self, logs: Any = None) -> None:
        self.cache.leave(self.data)

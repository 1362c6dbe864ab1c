"""What a cache did in each epoch, for logs and TensorBoard."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects


class CacheStatistics(keras.callbacks.Callback):
    """Adds what a `datacache.Cache` counted in an epoch to its logs, summed over ranks, and to TensorBoard.

    - `cache_hits`: share of samples that were ready in memory.
    - `cache_source_megabytes`: read from the source.
    - `cache_wait_s`: seconds in which batches waited for samples, mean over ranks.
    - `cache_healed`: samples found torn, and made again.

    Args:
      cache: Whose dataset is given to `fit`.
      log_dir: Where rank 0 writes TensorBoard scalars, if given.
    """

    def __init__(self, cache: Any, log_dir: str | None = None) -> None:
        super().__init__()
        self.cache, self.log_dir = cache, log_dir
        self._writer: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        if self.log_dir and runtime.rank() == 0:
            self._writer = tf.summary.create_file_writer(str(self.log_dir))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._before = self.cache.stats().to_dict()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        mine = {
            name: value - self._before[name] for name, value in self.cache.stats().to_dict().items()
        }
        ranks = exchange_objects(mine, runtime.wire(), "tp.cache")
        total = {name: sum(rank[name] for rank in ranks) for name in mine}
        values = {
            "cache_hits": total["memory_hits"]
            / max(1, total["memory_hits"] + total["memory_misses"]),
            "cache_source_megabytes": total["source_bytes"] / 1e6,
            "cache_wait_s": total["wait_s"] / len(ranks),
            "cache_healed": total["healed"],
        }
        if logs is not None:
            logs.update(values)
        if self._writer is not None:
            with self._writer.as_default():
                for name, value in values.items():
                    tf.summary.scalar(name.replace("cache_", "cache/"), value, step=epoch)

    def on_train_end(self, logs: Any = None) -> None:
        if self._writer is not None:
            self._writer.close()

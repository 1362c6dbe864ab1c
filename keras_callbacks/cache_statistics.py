"""Reports a cache's activity per epoch."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from keras_callbacks.rank_callback import RankCallback
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.training import session


class CacheStatistics(RankCallback):
    """Adds the counts of a `datacache.Cache` to the logs of each epoch.

    All ranks exchange their counts and report the same numbers:

    - `cache_hits`: share of samples that were ready in memory, in [0, 1].
    - `cache_source_megabytes`: megabytes that all ranks together read from the source.
    - `cache_wait_s`: seconds for which batches waited for samples, mean over ranks.
    - `cache_repaired`: number of corrupted samples that all ranks together repaired.

    Args:
      cache: The `datacache.Cache` whose dataset is passed to `fit`.

    Later callbacks in the list, such as `keras.callbacks.TensorBoard`, receive these logs.

    Cost: one exchange of a few hundred bytes per rank and epoch.

    Example:
      Within a script with a cache and its dataset:

          model.fit(training, callbacks=[keras_callbacks.CacheStatistics(cache)])
    """

    def __init__(self, cache: Any) -> None:
        super().__init__()
        self.cache = cache

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._before = self.cache.stats().to_dict()

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        counts = self.cache.stats().to_dict()
        own = {name: count - self._before[name] for name, count in counts.items()}
        ranks = exchange_objects(own, session.of(self.model).wire, "tp.cache")
        total = {name: sum(rank[name] for rank in ranks) for name in own}
        hits = total["memory_hits"]
        logs["cache_hits"] = hits / max(1, hits + total["memory_misses"])
        logs["cache_source_megabytes"] = total["source_bytes"] / 1e6
        # Ranks wait concurrently, so the mean is meaningful and the sum is not.
        logs["cache_wait_s"] = total["wait_s"] / len(ranks)
        logs["cache_repaired"] = total["healed"]

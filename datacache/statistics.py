"""Counts what a cache reads, exchanges and repairs."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Statistics:
    """Counts of one process since it opened a cache.

    Attributes:
      memory_hits: Number of requested samples that were ready in memory.
      memory_misses: Number of requested samples that were not ready in memory.
      decoded_hits: Number of samples found in the store of decoded samples on disk.
      disk_hits: Number of samples found in the store of stored samples on disk.
      source_reads: Number of samples read from the source.
      source_bytes: Number of bytes of the samples read from the source.
      received: Number of samples received from other nodes.
      sent: Number of samples sent to other nodes.
      unkept: Number of produced samples that did not fit in memory.
      healed: Number of corrupted samples that were regenerated.
      retries: Number of failed reads of the source that were retried.
      wait_s: Seconds for which batches waited for missing samples, summed over threads.
    """

    memory_hits: int = 0
    memory_misses: int = 0
    decoded_hits: int = 0
    disk_hits: int = 0
    source_reads: int = 0
    source_bytes: int = 0
    received: int = 0
    sent: int = 0
    unkept: int = 0
    healed: int = 0
    retries: int = 0
    wait_s: float = 0.0

    def to_dict(self) -> dict[str, float]:
        """Returns the counts by name, as JSON-serializable values."""
        return asdict(self)


class Counts:
    """Thread-safe counters."""

    def __init__(self) -> None:
        self._lock, self._counts = threading.Lock(), Counter[str]()

    def add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount  # type: ignore[assignment]

    def now(self) -> Statistics:
        with self._lock:
            return Statistics(**self._counts)

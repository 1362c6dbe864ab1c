"""Counters of a cache."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Statistics:
    """Counts of one process since it opened a cache.

    Attributes:
      memory_hits: Samples of batches that were ready in memory.
      memory_misses: Samples of batches that were not ready in memory.
      decoded_hits: Samples found in the store of decoded samples on disk.
      disk_hits: Samples whose stored bytes were on the local disk.
      source_reads: Samples read from the source.
      source_bytes: Bytes of the samples read from the source.
      received: Samples received from other nodes.
      sent: Samples sent to other nodes.
      unkept: Produced samples that did not fit in memory.
      healed: Corrupted samples that were repaired.
      retries: Failed reads of the source that were retried.
      wait_s: Seconds that batches waited for samples that were not in memory, summed over threads.

    Example:
      >>> Statistics(memory_hits=3).to_dict()["memory_hits"]
      3
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
        """Returns the counts by name, as values for JSON."""
        return asdict(self)


class Counts:
    """Thread-safe counters."""

    def __init__(self) -> None:
        self._lock, self._counts = threading.Lock(), Counter[str]()

    def add(self, **amounts: float) -> None:
        """Adds to counters."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount  # type: ignore[assignment]

    def now(self) -> Statistics:
        """Returns the current counts."""
        with self._lock:
            return Statistics(**self._counts)

"""What a cache counts."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Statistics:
    """Of one process since it opened the cache.

    Attributes:
      memory_hits: Samples that were ready in memory.
      memory_misses: Samples that were not.
      decoded_hits: Samples found ready on disk.
      disk_hits: Samples whose stored bytes were on the local disk.
      source_reads: Samples read from the source.
      source_bytes: Bytes of those.
      received: Samples that other nodes sent.
      sent: Samples sent to other nodes.
      unkept: Samples made that no level had room for.
      healed: Samples whose bytes were not those that were written, made again.
      retries: Reads of the source that failed and were tried again.
      wait_s: Seconds in which batches waited for samples that were not in memory.
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
        """For JSON."""
        return asdict(self)


class Counts:
    """Statistics in the making, from any thread."""

    def __init__(self) -> None:
        self._lock, self._counts = threading.Lock(), Counter[str]()

    def add(self, **amounts: float) -> None:
        """Adds to some of them."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount  # type: ignore[assignment]

    def now(self) -> Statistics:
        """So far."""
        with self._lock:
            return Statistics(**self._counts)

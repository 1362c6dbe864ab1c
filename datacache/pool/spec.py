"""Description of a store, which its header contains: its samples, their layout, and its files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from datacache.order import permutation
from datacache.pool.layout import Layout

WORD = np.dtype(np.uint64)
"""Dtype of the metadata word of each sample, which is stored next to the columns."""
HEAP_STATE_BYTES = 4 * 8
"""Bytes of the state that processes share for a heap."""


def owner_nodes(samples: int, nodes: int, seed: int) -> np.ndarray:
    """Returns the node that owns each sample, `[samples]` int64: equal numbers, up to one."""
    # At random, so that samples of a class, which are adjacent, are spread over all nodes.
    return _shuffled_positions(samples, seed) % nodes


@dataclass(frozen=True, kw_only=True)
class SampleShard:
    """Samples that a store retains: those that its node owns, of which `slots` fit."""

    # If not all fit, the choice depends on the seed and never changes. Evicting the least recently
    # used samples would have fewer hits: an epoch uses each sample once, so a sample would be
    # evicted just before its next use.
    samples: int
    slots: int
    seed: int = 0
    node: int = 0
    nodes: int = 1

    def slot_indices(self) -> np.ndarray:
        """Returns the slot of each sample, or -1 if it has none, `[samples]` int64."""
        # Slots follow the order of the samples, so that a pass in order reads memory in order.
        positions = _shuffled_positions(self.samples, self.seed)
        kept = (positions % self.nodes == self.node) & (positions // self.nodes < self.slots)
        return np.where(kept, np.cumsum(kept) - 1, -1)

    @property
    def kept_samples(self) -> int:
        """Number of samples that fit."""
        return min(self.slots, self.assigned_samples)

    @property
    def assigned_samples(self) -> int:
        """Number of samples that the node owns, whether they fit or not."""
        return len(range(self.node, self.samples, self.nodes))


def _shuffled_positions(samples: int, seed: int) -> np.ndarray:
    return np.argsort(permutation(samples, seed, samples), kind="stable")


@dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """Immutable description of a store; `source` is the user's name of the source."""

    layout: Layout
    shard: SampleShard
    # Limit of components that differ in size; it is not saved, because the file has this size.
    heap_bytes: int = 0
    source: str = ""

    @property
    def files(self) -> dict[str, int]:
        """Bytes of each file whose space is reserved when the store is created."""
        slots = self.shard.kept_samples
        files = {"samples": self.layout.offsets(slots)[-1], "words": WORD.itemsize * slots}
        return files | ({"end": HEAP_STATE_BYTES} if self.layout.varies else {})

    @property
    def growing_files(self) -> dict[str, int]:
        """Most bytes of each file whose space is reserved as it fills."""
        return {"heap": self.heap_bytes} if self.layout.varies else {}

    def to_dict(self) -> dict[str, Any]:
        """Returns the description as values for JSON."""
        # The keys are the format on disk, independent of the names of the attributes.
        return {"layout": asdict(self.layout), "part": asdict(self.shard), "source": self.source}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> PoolSpec:
        """Returns the description that `to_dict` wrote."""
        return cls(
            layout=Layout.from_dict(content["layout"]),
            shard=SampleShard(**content["part"]),
            source=content.get("source", ""),
        )

"""Samples that a store has space for, and the node that owns each sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from datacache.order import permutation


def owner_nodes(samples: int, nodes: int, seed: int) -> np.ndarray:
    """Returns the node that owns each sample, `[samples]` int64.

    Nodes own equal numbers of samples, up to one, drawn at random: samples of a class, which are
    adjacent, are spread over all nodes.

    Example:
      >>> np.bincount(owner_nodes(10, 4, seed=0)).tolist()
      [3, 3, 2, 2]
    """
    return _shuffled_positions(samples, seed) % nodes


@dataclass(frozen=True, kw_only=True)
class SampleShard:
    """Samples that a store retains: those that its node owns, as far as they fit.

    If not all fit, the choice depends on the seed and never changes. Evicting the least recently
    used samples would have fewer hits: an epoch uses each sample once, so a sample would be evicted
    just before its next use. `slots` is the number of samples that fit, and `nodes` is 1 if each
    node stores all.

    Example:
      >>> shard = SampleShard(samples=10, slots=3, node=1, nodes=2)
      >>> shard.assigned_samples, shard.kept_samples, sorted(shard.slot_indices().tolist())[-4:]
      (5, 3, [-1, 0, 1, 2])
    """

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
    """Returns the position of each sample in a permutation, `[samples]` int64."""
    return np.argsort(permutation(samples, seed, samples), kind="stable")

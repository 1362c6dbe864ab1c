"""Which samples a pool has room for, and which node each sample is at home on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from datacache.order import permutation


def owner_nodes(samples: int, nodes: int, seed: int) -> np.ndarray:
    """The node that each sample is at home on: `[samples]` int64, as many on each node but for one."""
    return _ranks(samples, seed) % nodes


@dataclass(frozen=True, kw_only=True)
class KeptSamples:
    """The samples that a pool keeps, for good: with too little room for all, a choice that depends on the seed.

    A cache that throws out what was not used for long would hit less: epochs use everything once in turn.

    Attributes:
      samples: How many there are.
      slots: How many there is room for.
      seed: Of the choice.
      node: The node whose samples are kept, if each keeps its own.
      nodes: How many nodes share the samples; 1 if each keeps all.
    """

    samples: int
    slots: int
    seed: int = 0
    node: int = 0
    nodes: int = 1

    def places(self) -> np.ndarray:
        """The slot of each sample, or -1 without room: `[samples]` int64, in the order of samples."""
        ranks = _ranks(self.samples, self.seed)
        kept = (ranks % self.nodes == self.node) & (ranks // self.nodes < self.slots)
        return np.where(kept, np.cumsum(kept) - 1, -1)

    @property
    def kept(self) -> int:
        """Samples that have room."""
        return min(self.slots, self.wanted)

    @property
    def wanted(self) -> int:
        """Slots with which all its samples would have room."""
        return len(range(self.node, self.samples, self.nodes))


def _ranks(samples: int, seed: int) -> np.ndarray:
    """The place of each sample in a permutation."""
    return np.argsort(permutation(samples, seed, samples), kind="stable")

"""Poseidon's key-value store: pairs of 2 MB, spread evenly over servers that are the nodes themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import tensorflow as tf

from tfposeidon import cost
from tfposeidon.cost import Cost
from tfposeidon.schemes import stages
from tfposeidon.schemes.base import State, VectorScheme
from tfposeidon.topology import Topology
from tfposeidon.wire import Wire

PAIR_BYTES = 2 * 2**20


@dataclass(frozen=True, kw_only=True)
class ShardedServer(VectorScheme):
    """Pushes gradients to the servers of their pairs and pulls the means from there.

    Every node is worker and server. A bucket is cut into as few equal pairs as stay within `pair_bytes`; the
    coordinator gives each pair of the model to the server that has least, so that all servers hold the same bytes,
    to one pair. Nodes of several ranks sum inside first, and each rank serves its shard of the node's pairs.

    With `update="server"` each rank keeps the optimizer's state for its own values only, applies the optimizer there,
    and pulls parameters in place of gradients: as many bytes, and a P-th of the memory and of the update's work.
    `DistributedOptimizer` sees to it, for optimizers whose rule works element by element.

    Args:
      pair_bytes: Of a pair, at most.
      update: Where the optimizer is applied: "worker", on every rank, or "server".
      placement: Pairs on each server, in the order of nodes; `None` spreads values evenly. For the coordinator.

    Raises:
      ValueError: If `pair_bytes` is not positive, or `update` is neither "worker" nor "server".

    Cost: 2 (P - 1) steps; over all buckets 2 d (P - 1) / P elements sent per node and as many received, for P nodes
    and d elements.
    Source: Zhang et al. 2017 (Poseidon), sections 4.1 and 5.1; pushing is an all-to-all with a local sum, pulling an
    all-gather. Differs: a bucket's pairs on one server follow one another and travel as one message.
    """

    name: ClassVar[str] = "ps"
    pair_bytes: int = PAIR_BYTES
    update: str = "worker"
    placement: tuple[int, ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.pair_bytes <= 0:
            raise ValueError(
                f"`pair_bytes` must be positive. Received: pair_bytes={self.pair_bytes}. Leave it out for 2 MB."
            )
        if self.update not in ("worker", "server"):
            raise ValueError(f'`update` must be "worker" or "server". Received: update={self.update!r}')

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ShardedServer:
        placement = config.get("placement")
        return cls(**config | {"placement": None if placement is None else tuple(placement)})

    def placed(self, length: int, itemsize: int, load: list[float]) -> ShardedServer:
        """With every pair of a bucket on the server that has least; adds its bytes to `load`, one entry a node."""
        pairs = max(1, math.ceil(length * itemsize / self.pair_bytes))
        placement = [0] * len(load)
        for _ in range(pairs):
            server = min(range(len(load)), key=load.__getitem__)
            placement[server] += 1
            load[server] += length * itemsize / pairs
        return replace(self, placement=tuple(placement))

    def exchange(self, gradient: tf.Tensor, state: State, wire: Wire, name: str) -> tuple[tf.Tensor, State]:
        node, across = self._levels(gradient.shape[0], wire.topology)
        return stages.mean_by_levels(gradient, node, across, wire, name, None), state

    def push(self, gradient: tf.Tensor, wire: Wire, name: str) -> tf.Tensor:
        """The first half of `exchange`: the mean of what this rank serves, `[n]` -> `[end - begin]` of `own_range`."""
        node, across = self._levels(gradient.shape[0], wire.topology)
        return stages.own_mean_by_levels(gradient, node, across, wire, name, None)

    def pull(self, own: tf.Tensor, length: int, wire: Wire, name: str) -> tf.Tensor:
        """The second half: from what every rank serves to all `[length]` values, the same bits on every rank."""
        node, across = self._levels(length, wire.topology)
        return stages.gather_by_levels(own, node, across, wire, name, None)

    def own_range(self, length: int, topology: Topology) -> tuple[int, int]:
        """Begin and end of what `topology.rank` serves of a bucket of `length` elements."""
        node, across = self._levels(length, topology)
        if across is None:
            return 0, 0
        begin = node.offset(topology.rank) + across.offset(topology.rank)
        return begin, begin + across.own(topology.rank)

    def cost(self, length: int, itemsize: int, topology: Topology) -> Cost:
        return stages.cost_by_levels(*self._levels(length, topology), itemsize, topology, None)

    def _levels(self, length: int, topology: Topology) -> tuple[stages.Shards, stages.Shards | None]:
        node, across = stages.levels(length, topology)
        if across is None or self.placement is None:
            return node, across
        sizes = iter(cost.shares(node.own(topology.rank), sum(self.placement)))
        # The group is in the order of ranks, the placement in that of nodes.
        servers = sorted(range(len(self.placement)), key=lambda node: topology.nodes[node][topology.position])
        lengths = [sum(next(sizes) for _ in range(self.placement[server])) for server in servers]
        return node, stages.Shards(across.group, tuple(lengths))

"""Poseidon's key-value store: gradients are sharded evenly over the nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tfposeidon import ranges
from tfposeidon.communication.topology import Topology
from tfposeidon.communication.wire import Wire
from tfposeidon.schemes import stages
from tfposeidon.schemes.base import Scheme, State
from tfposeidon.schemes.cost import Stage

PAIR_BYTES = 2 * 2**20
"""Size in bytes of Poseidon's key-value pairs (section 4.1)."""


@dataclass(frozen=True, kw_only=True)
class ParameterServer(Scheme):
    """Averages gradients by reduce-scatter and all-gather over shard owners (PS of Poseidon).

    Every node is both worker and shard owner. A bucket is split into equal parts, one per node.
    Nodes of several ranks sum inside first, and each rank owns a shard of the node's part.

    Every rank updates its variables with the means. `tfposeidon.ShardedOptimizer` keeps means and
    optimizer state with the shard owners, and gathers variables instead.

    Args:
      pair_bytes: Bytes, over all buckets, by which the shards of two owners may differ (default 2
        MiB). Parts differ by one element at most, which is always within this limit, so it has no
        effect.

    Raises:
      ValueError: If `pair_bytes` is not positive.

    Cost: 2 (P - 1) steps; over all buckets 2 d (P - 1) / P elements sent per node and as many
    received, for P nodes and d elements.
    Source: Zhang et al. 2017 (Poseidon), sections 4.1 and 5.1; push is an all-to-all with a local
    sum, pull an all-gather. Differs: every bucket is sharded over all nodes, where each of
    Poseidon's 2 MB pairs has one server. Horovod runs one exchange after another: with a bucket on
    one server, only that server's network connection would be busy.

    Example:
      >>> from tfposeidon import schemes
      >>> from tfposeidon.communication.topology import Topology
      >>> schemes.ParameterServer().own_range(10, Topology.regular(1, size=4, ranks_per_node=1))
      (3, 6)
    """

    name: ClassVar[str] = "ps"
    pair_bytes: int = PAIR_BYTES

    def __post_init__(self) -> None:
        ranges.check_number(
            "pair_bytes", self.pair_bytes, ranges.POSITIVE, "Leave it out for 2 MB."
        )

    @override
    def exchange(
        self, gradient: tf.Tensor, state: State, wire: Wire, name: str
    ) -> tuple[tf.Tensor, State]:
        return stages.mean_by_levels(gradient, wire, name, None), state

    def own_range(self, length: int, topology: Topology) -> tuple[int, int]:
        """Returns the shard that `topology.rank` owns.

        Args:
          length: Number of elements of the bucket.
          topology: Topology of the job.

        Returns:
          Start and end of the shard; (0, 0) if the rank owns none.
        """
        node, across = stages.shards_by_level(length, topology)
        if across is None:
            return 0, 0
        # The rank's shard of the node's vector is sharded again over the nodes.
        begin = node.offset_of(topology.rank) + across.offset_of(topology.rank)
        return begin, begin + across.length_of(topology.rank)

    @override
    def stages(self, length: int, itemsize: int, topology: Topology) -> tuple[Stage, ...]:
        return stages.stages_by_levels(length, itemsize, topology, None)

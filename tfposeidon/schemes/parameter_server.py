"""Poseidon's key-value store: gradients spread evenly over servers, which are the nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tfposeidon import ranges
from tfposeidon.communication.topology import Topology
from tfposeidon.communication.wire import Wire
from tfposeidon.schemes import stages
from tfposeidon.schemes.base import State, VectorScheme
from tfposeidon.schemes.cost import Stage

PAIR_BYTES = 2 * 2**20
"""Size of Poseidon's key-value pairs (section 4.1)."""


@dataclass(frozen=True, kw_only=True)
class ParameterServer(VectorScheme):
    """Pushes gradients to the servers of their parts and pulls the means from there.

    Every node is worker and server. A bucket is cut into equal parts, one for each server. Nodes of
    several ranks sum inside first, and each rank serves its shard of the node's part.

    Every rank updates its variables by the means. `tfposeidon.ShardedOptimizer` leaves means and
    optimizer state with their servers, and pulls variables.

    Args:
      pair_bytes: Bytes, over all buckets, that a server may hold more than another (default 2 MiB).
        Parts that differ by one element keep within it anyway, so it changes nothing.

    Raises:
      ValueError: If `pair_bytes` is not positive.

    Cost: 2 (P - 1) steps; over all buckets 2 d (P - 1) / P elements sent per node and as many
    received, for P nodes and d elements.
    Source: Zhang et al. 2017 (Poseidon), sections 4.1 and 5.1; pushing is an all-to-all with a
    local sum, pulling an all-gather. Differs: every bucket is spread over all servers, where
    Poseidon's pairs of 2 MB have one each. Horovod carries out one exchange after another: with a
    bucket on one server, that server's link alone would be at work.

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
        node, across = stages.shards_by_level(gradient.shape[0], wire.topology)
        return stages.mean_by_levels(gradient, node, across, wire, name, None), state

    def own_range(self, length: int, topology: Topology) -> tuple[int, int]:
        """Returns begin and end of what a rank serves of a bucket; (0, 0) for nothing.

        Args:
          length: Elements of the bucket.
          topology: Topology of the job; `topology.rank` is the rank in question.
        """
        node, across = stages.shards_by_level(length, topology)
        if across is None:
            return 0, 0
        # The rank's shard of the node's vector was cut again over the nodes.
        begin = node.offset_of(topology.rank) + across.offset_of(topology.rank)
        return begin, begin + across.length_of(topology.rank)

    @override
    def stages(self, length: int, itemsize: int, topology: Topology) -> tuple[Stage, ...]:
        node, across = stages.shards_by_level(length, topology)
        return stages.stages_by_levels(node, across, itemsize, topology, None)

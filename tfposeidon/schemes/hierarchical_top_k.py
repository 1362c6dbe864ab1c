"""HiTopKComm: sums inside the nodes, the largest of each shard across them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tfposeidon.communication.topology import Topology
from tfposeidon.schemes.sparse import SparseScheme


@dataclass(frozen=True, kw_only=True)
class HierarchicalTopK(SparseScheme):
    """Reduce-scatter in the node, selection on the shard, all-gather across nodes by position, all-gather in the node.

    The ranks at one position of every node exchange the largest elements of their shard, so that all n
    links of the node are busy at once and each element is selected once per node, from the sum of its ranks.
    The residual is that of the shard. What is gathered in the node are pairs or sums, whichever is fewer
    bytes.

    Args: `density`, `select`, `wire_dtype`, `error_feedback`, `momentum`, `warmup_steps` and `min_elements`: see
      `tfposeidon.schemes.sparse.SparseScheme`.

    Raises:
      ValueError: If an argument makes no sense.

    Cost: m nodes of n ranks, d elements, k = density d / n: (n - 1) d / n values per rank in the node for the
    scatter, (m - 1) k pairs across nodes, and in the node (n - 1) m k pairs or (n - 1) d / n values.
    Source: Shi et al. 2021 (CommLib), section 3.2, Algorithm 2. Differs: error feedback on the shard; indices
    and values in one message; the scatter is an all-to-all with a local sum (see `stages`); where pairs would
    be more bytes than the dense exchange, that is made.
    """

    name: ClassVar[str] = "hitopk"

    def _seen(self, topology: Topology) -> Topology:
        return topology

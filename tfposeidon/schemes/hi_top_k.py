"""HiTopKComm: sums inside the nodes, the largest elements of each shard across them."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from tfposeidon.communication.topology import Topology
from tfposeidon.schemes.sparse import SparseScheme


@dataclass(frozen=True, kw_only=True)
class HiTopK(SparseScheme):
    """Sums in the node, exchanges the largest elements across nodes, and gathers in the node.

    The ranks at one position of every node exchange the largest elements of their shard, so that
    all n links of the node are busy at once and each element is selected once per node, from the
    sum of its ranks. The residual is that of the shard. What is gathered in the node are pairs or
    sums, whichever is fewer bytes.

    Args:
      density: Share of elements that each node sends, in (0, 1] (default 0.01).
      select: Method of selection: `"mstopk"`, `"exact"` or `"dgc"` (default "mstopk"); see
        `tfposeidon.ops.top_k`.
      wire_dtype: Type of values on the wire: `None` for float32 (default), `"float16"` or
        `"bfloat16"`. Rounding errors join the residual.
      error_feedback: True (default) to add what is not sent to the next gradient. Otherwise it is
        lost.
      momentum: Coefficient of momentum correction, in [0, 1) (default 0: none). The optimizer's own
        must then be 0.
      warmup_steps: Steps over which the density falls exponentially from 1 to `density` (default
        0).
      min_elements: Variables with fewer elements are sent densely (default 4096): by `AllReduce`,
        or, with `momentum`, by this scheme at density 1.

    Raises:
      ValueError: If an argument is out of its range.

    Cost: m nodes of n ranks, d elements, k = density d / n: (n - 1) d / n values per rank in the
    node for the scatter, (m - 1) k pairs across nodes, and in the node (n - 1) m k pairs or
    (n - 1) d / n values.
    Source: Shi et al. 2021 (CommLib), section 3.2, Algorithm 2. Differs: error feedback on the
    shard; indices and values in one message; the scatter is an all-to-all with a local sum (see
    `stages`); where pairs would be more bytes than the dense exchange, that is made.

    Example:
      >>> from tfposeidon import schemes
      >>> from tfposeidon.communication.topology import Topology
      >>> scheme = schemes.HiTopK(density=0.001, momentum=0.9)
      >>> int(scheme.cost(10**6, itemsize=4, topology=Topology.regular(0, 8, 4)).cross_bytes)
      2000
    """

    @override
    def _layout_topology(self, topology: Topology) -> Topology:
        return topology

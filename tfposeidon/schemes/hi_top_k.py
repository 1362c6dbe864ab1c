"""HiTopKComm: sums inside the nodes, and exchanges each shard's largest elements across them."""

from __future__ import annotations

from dataclasses import dataclass

from tfposeidon.schemes.sparse import SparseScheme


@dataclass(frozen=True, kw_only=True)
class HiTopK(SparseScheme):
    """Sums in the node, exchanges the largest elements across nodes, and gathers in the node.

    The ranks at one position of every node exchange the largest elements of their shard. So all n
    network interfaces of a node are busy at once, and each element is selected once per node, from
    the sum of its ranks. The residual is that of the shard. The last stage gathers pairs or sums in
    the node, whichever is fewer bytes.

    Args:
      density: Share of elements that each node sends, in (0, 1] (default 0.01).
      select: Method of selection: `"mstopk"` (default), `"exact"` or `"dgc"`; see
        `tfposeidon.ops.top_k`.
      wire_dtype: Dtype in which values are sent: `None` for float32 (default), `"float16"` or
        `"bfloat16"`. Rounding errors are added to the residual. Values are sums over a node, not
        means: with float16 they become infinite beyond 65504; bfloat16 has no such limit.
      error_feedback: True (default) to add the elements that are not sent to the next gradient.
        Otherwise they are lost.
      momentum: Coefficient of momentum correction (Lin et al. 2018, section 3), in [0, 1) (default
        0: none). The optimizer's own must then be 0.
      warmup_steps: Steps over which the density falls exponentially from 1 to `density` (default
        0).
      min_elements: Variables with fewer elements are sent densely (default 4096): by `AllReduce`,
        or, with `momentum`, by this scheme at density 1.

    Raises:
      ValueError: If an argument is out of its range, or `momentum` is given without error feedback.

    Cost: m nodes of n ranks, d elements, k = density d / n: (n - 1) d / n values per rank in the
    node for the scatter, (m - 1) k pairs across nodes, and in the node (n - 1) m k pairs or (n - 1)
    d / n values.
    Source: Shi et al. 2021 (CommLib), section 3.2, Algorithm 2. Differs: error feedback on the
    shard; indices and values in one message; the scatter is an all-to-all with a local sum (see
    `stages`); where pairs would be more bytes than the dense exchange, values are sent densely.

    Example:
      >>> from tfposeidon import schemes
      >>> from tfposeidon.communication.topology import Topology
      >>> scheme = schemes.HiTopK(density=0.001, momentum=0.9)
      >>> int(scheme.cost(10**6, itemsize=4, topology=Topology.regular(0, 8, 4)).cross_bytes)
      2000
    """

"""NaiveAG: every rank sends its largest elements to all others."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from tfposeidon.communication.topology import Topology
from tfposeidon.schemes.sparse import SparseScheme


@dataclass(frozen=True, kw_only=True)
class TopK(SparseScheme):
    """Selects elements on every rank, gathers the pairs of all ranks, and sums them locally.

    Args:
      density: Share of elements that each rank sends, in (0, 1] (default 0.01).
      select: Method of selection: `"mstopk"`, `"exact"` (default) or `"dgc"`; see
        `tfposeidon.ops.top_k`.
      wire_dtype: Dtype in which values are sent: `None` for float32 (default), `"float16"` or
        `"bfloat16"`. Rounding errors are added to the residual.
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

    Cost: P ranks, d elements: (P - 1) density d pairs sent per rank.
    Source: Shi et al. 2021 (CommLib), section 2.2 (NaiveAG); Renggli et al. 2019. Differs: error
    feedback; where pairs would be more bytes than the dense exchange, values are sent densely.

    Example:
      >>> from tfposeidon import schemes
      >>> from tfposeidon.communication.topology import Topology
      >>> scheme = schemes.TopK(density=0.001)
      >>> int(scheme.cost(10**6, itemsize=4, topology=Topology.regular(0, 8, 4)).bytes)
      56000
    """

    select: str = "exact"

    @override
    def _layout_topology(self, topology: Topology) -> Topology:
        # Every rank is a separate node, so that nothing is summed before the selection.
        return Topology(topology.rank, tuple((rank,) for rank in range(topology.size)))

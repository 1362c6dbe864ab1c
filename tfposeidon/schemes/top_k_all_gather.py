"""NaiveAG: every rank sends its largest elements to every other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tfposeidon.schemes.sparse import SparseScheme
from tfposeidon.topology import Topology


@dataclass(frozen=True, kw_only=True)
class TopKAllGather(SparseScheme):
    """Selection on every rank, all-gather of pairs over all ranks, local sum.

    Args:
      density: Share of elements that each rank sends, in (0, 1].
      select: `"exact"`, `"mstopk"` or `"dgc"`: see `tfposeidon.ops.top_k`.
      wire_dtype: Of values on the wire: `None`, `"float16"` or `"bfloat16"`. Rounding errors join the residual.
        float16 ends at 65504, and what is sent are sums over a node, not means; bfloat16 has no such end.
      error_feedback: Whether there is a residual. Without one, what is not sent is lost.
      momentum: Of momentum correction (Lin et al. 2018, section 3); the optimizer's own must then be 0.
      warmup_steps: Over so many steps the density falls exponentially from 1 to `density`.
      min_elements: Variables with fewer are sent densely, by `AllReduce`; with `momentum`, by this scheme at
        density 1.

    Raises:
      ValueError: If an argument makes no sense.

    Cost: P ranks, d elements: (P - 1) density d pairs sent per rank.
    Source: Shi et al. 2021 (CommLib), section 2.2 (NaiveAG); Renggli et al. 2019. Differs: error feedback;
    where pairs would be more bytes than the dense exchange, that is made.
    """

    name: ClassVar[str] = "topk"
    select: str = "exact"

    def _seen(self, topology: Topology) -> Topology:
        # Every rank a node of its own.
        return Topology(topology.rank, tuple((rank,) for rank in range(topology.size)))

"""NaiveAG: every rank sends its largest elements to every other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tfposeidon.communication.topology import Topology
from tfposeidon.schemes.sparse import SparseScheme


@dataclass(frozen=True, kw_only=True)
class TopKAllGather(SparseScheme):
    """Selection on every rank, all-gather of pairs over all ranks, local sum.

    Args: `density`, `select`, `wire_dtype`, `error_feedback`, `momentum`, `warmup_steps` and `min_elements`: see
      `tfposeidon.schemes.sparse.SparseScheme`; `select` is `"exact"` if not given.

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

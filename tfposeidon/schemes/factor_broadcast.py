"""Sufficient factor broadcasting: two thin matrices travel in place of their product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from tfposeidon import cost
from tfposeidon.cost import Cost
from tfposeidon.schemes.base import FactorScheme
from tfposeidon.sufficient_factors import Factors, FactorShape
from tfposeidon.topology import Group, Topology
from tfposeidon.wire import Wire


@dataclass(frozen=True, kw_only=True)
class FactorBroadcast(FactorScheme):
    """Gathers every rank's factors and multiplies them once.

    First across nodes, among the ranks of one position, then in the node; ranks may have different numbers of rows.

    Cost: (m - 1) + (n - 1) steps; a rank with K rows sends K (m - 1) (M + N) values across nodes and
    m K (n - 1) (M + N) in its node, m nodes of n ranks; the product takes 2 m n K M N operations.
    Source: Zhang et al. 2017 (Poseidon), sections 2.1 and 3.2; Xie et al. 2016. Differs: factors go round in a ring
    and not to each peer, which is as many values; the product is formed once, not for each peer; uneven nodes gather
    over all ranks at once.
    """

    name: ClassVar[str] = "sfb"

    def exchange_factors(self, factors: Factors, wire: Wire, name: str) -> tf.Tensor:
        topology, rows = wire.topology, factors.packed
        for stage, group in self._stages(topology).items():
            rows = wire.all_gather(rows, group, f"{name}.{stage}")
        total = factors.product(rows)
        return total / tf.cast(topology.size, total.dtype)

    def factor_cost(self, factors: FactorShape, topology: Topology) -> Cost:
        total = Cost(flops=2.0 * topology.size * (factors.rows or 0) * factors.left_columns * factors.right)
        held = float(factors.bytes)
        for group in self._stages(topology).values():
            total += cost.ring_all_gather(topology, group, [held] * group.size)
            held *= group.size
        return total

    @staticmethod
    def _stages(topology: Topology) -> dict[str, Group]:
        even = len({len(node) for node in topology.nodes}) == 1
        if not even or topology.across is None:
            return {"gather": topology.world}
        return {"across_gather": topology.across, "node_gather": topology.node}

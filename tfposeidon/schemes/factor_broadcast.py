"""Sufficient factor broadcasting: two thin matrices travel in place of their product."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from tfposeidon.communication.topology import Group, Topology
from tfposeidon.communication.wire import Wire
from tfposeidon.gradients.factors import Factors, FactorShape
from tfposeidon.schemes import cost, stages
from tfposeidon.schemes.base import FactorScheme, Scheme
from tfposeidon.schemes.by_rows import ByRows
from tfposeidon.schemes.cost import Cost


@dataclass(frozen=True, kw_only=True)
class FactorBroadcast(FactorScheme):
    """Gathers every rank's factors and multiplies them once.

    First across nodes, among the ranks of one position, then in the node; ranks may have different numbers of rows.
    In the node the ranks' products are summed instead where that is fewer bytes, as the plan says.

    Args:
      sums_in_node: Whether products are summed in the node. `None` leaves it to each step, which goes by its rows.

    Cost: (m - 1) + (n - 1) steps; a rank with K rows sends K (m - 1) (M + N) values across nodes and
    m K (n - 1) (M + N) in its node, m nodes of n ranks; the product takes 2 m n K M N operations. With sums in the
    node 2 (n - 1) steps there, 2 M N (n - 1) / n values and 2 m K M N operations.
    Source: Zhang et al. 2017 (Poseidon), sections 2.1 and 3.2; Xie et al. 2016. Differs: factors go round in a ring
    and not to each peer, which is as many values; the product is formed once, not for each peer; uneven nodes gather
    over all ranks at once.
    """

    name: ClassVar[str] = "sfb"
    sums_in_node: bool | None = None

    def __str__(self) -> str:
        return f"{self.name}(sums_in_node=True)" if self.sums_in_node else self.name

    def fitted(self, factors: FactorShape, topology: Topology, served_bytes: list[float]) -> Scheme:
        """With sums in the node where they are fewer bytes there, which rows decide."""
        if self.sums_in_node is not None or _uneven(topology):
            return self
        few, many = (replace(self, sums_in_node=sums) for sums in (False, True))
        # Every rank of an even layout sends as much.
        one_row, sums = (
            way.factor_cost(replace(factors, rows=1), topology).node_bytes for way in (few, many)
        )
        if not one_row:
            return self
        by_rows = ByRows(few=few, many=many, limit=int(topology.size * sums / one_row))
        return (
            by_rows
            if factors.rows is None
            else by_rows.for_rows(round(factors.rows * topology.size))
        )

    def exchange_factors(self, factors: Factors, wire: Wire, name: str) -> tf.Tensor:
        topology, rows = wire.topology, factors.packed
        for stage, group in self._stages(topology).items():
            rows = wire.all_gather(rows, group, f"{name}.{stage}")
        total = factors.product(rows)
        if self._sums(topology):
            # An all-reduce of each node by itself might add in another order in each.
            shards = stages.Shards.even(total.shape[0], topology.node)
            own = stages.scatter_sum(total, shards, wire, f"{name}.node_scatter", None)
            total = stages.gather(own, shards, wire, f"{name}.node_gather")
        return total / tf.cast(topology.size, total.dtype)

    def factor_cost(self, factors: FactorShape, topology: Topology) -> Cost:
        total, held = Cost(), float(factors.bytes)
        ranks = 1
        for group in self._stages(topology).values():
            total += cost.ring_all_gather(topology, group, [held] * group.size)
            held *= group.size
            ranks *= group.size
        if self._sums(topology):
            shards = stages.Shards.even(factors.left * factors.right, topology.node)
            itemsize = factors.matrix_bytes // (factors.left * factors.right)
            total += stages.cost_by_levels(shards, None, itemsize, topology, None)
        return total + Cost(
            flops=2.0 * ranks * (factors.rows or 0) * factors.left_columns * factors.right
        )

    def _stages(self, topology: Topology) -> dict[str, Group]:
        if topology.across is None or _uneven(topology):
            return {"gather": topology.world}
        across = {"across_gather": topology.across}
        return across if self.sums_in_node else across | {"node_gather": topology.node}

    def _sums(self, topology: Topology) -> bool:
        return bool(self.sums_in_node) and not _uneven(topology)


def _uneven(topology: Topology) -> bool:
    return len({len(node) for node in topology.nodes}) > 1

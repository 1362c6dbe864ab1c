"""Sufficient factor broadcasting: sends two thin matrices instead of their product."""

from __future__ import annotations

from dataclasses import dataclass, replace

import tensorflow as tf
from typing_extensions import override

from tfposeidon.communication.topology import Group, Topology
from tfposeidon.communication.wire import Wire
from tfposeidon.gradients.factors import FactorPair, FactorShape
from tfposeidon.schemes import stages
from tfposeidon.schemes.base import FactorScheme, Scheme
from tfposeidon.schemes.by_rows import ByRows
from tfposeidon.schemes.cost import Stage


@dataclass(frozen=True, kw_only=True)
class Factors(FactorScheme):
    """Gathers every rank's sufficient factors and multiplies them once (SFB of Poseidon).

    Factors are gathered across nodes first, among the ranks at one position, then in the node.
    Ranks may have different numbers of batch rows. In the node, the ranks' products are summed
    instead if that is fewer bytes; the plan shows which.

    Args:
      sums_in_node: True to sum products in the node, False to gather factors there as well. `None`
        (default) decides at each step, from its batch rows.

    Cost: (m - 1) + (n - 1) steps for m nodes of n ranks. A rank with K rows sends K (m - 1) (M + N)
    values across nodes and m K (n - 1) (M + N) in its node; the product takes 2 m n K M N
    operations. With sums in the node: 2 (n - 1) steps there, 2 M N (n - 1) / n values and 2 m K M N
    operations.
    Source: Zhang et al. 2017 (Poseidon), sections 2.1 and 3.2; Xie et al. 2016. Differs: factors
    are sent around a ring and not to each peer, with the same number of values; the product is
    computed once, not per peer; uneven nodes gather over all ranks at once.

    Example:
      >>> from tfposeidon import schemes
      >>> from tfposeidon.communication.topology import Topology
      >>> from tfposeidon.gradients.factors import FactorShape
      >>> factors = FactorShape(rows=32, left=1024, right=1024, dtype="float32")
      >>> topology = Topology.regular(0, size=4, ranks_per_node=1)
      >>> int(schemes.Factors().factor_cost(factors, topology).bytes) // 2**10
      768
      >>> int(schemes.AllReduce().cost(1024 * 1024, itemsize=4, topology=topology).bytes) // 2**10
      6144
    """

    sums_in_node: bool | None = None

    def __str__(self) -> str:
        return f"{self.name}(sums_in_node=True)" if self.sums_in_node else self.name

    @override
    def fitted(self, factors: FactorShape, topology: Topology) -> Scheme:
        if self.sums_in_node is not None or _is_uneven(topology):
            return self
        few, many = (replace(self, sums_in_node=sums) for sums in (False, True))
        # With nodes of equal size all ranks send the same bytes, so all compute the same limit.
        one_row_bytes, sums_bytes = (
            scheme.factor_cost(replace(factors, rows=1), topology).node_bytes
            for scheme in (few, many)
        )
        # Nodes of one rank gather nothing inside, so there is no choice.
        if not one_row_bytes:
            return self
        # One row on each rank costs `one_row_bytes`, and the limit counts the rows of all ranks.
        limit = int(topology.size * sums_bytes / one_row_bytes)
        by_rows = ByRows(few=few, many=many, limit=limit)
        if factors.rows is None:
            return by_rows
        return by_rows.for_rows(round(factors.rows * topology.size))

    @override
    def exchange_factors(self, factors: FactorPair, wire: Wire, name: str) -> tf.Tensor:
        topology, rows = wire.topology, factors.packed
        for stage, group in self._gathering_groups(topology).items():
            rows = wire.all_gather(rows, group, f"{name}.{stage}")
        total = factors.product(rows)
        if self._sums_in_node_of(topology):
            # Separate all-reduces in the nodes might add in a different order in each.
            shards = stages.Shards.even(total.shape[0], topology.node)
            own = stages.scatter_sum(total, shards, wire, f"{name}.node_scatter", None)
            total = stages.gather(own, shards, wire, f"{name}.node_gather")
        return total / tf.cast(topology.size, total.dtype)

    @override
    def factor_stages(self, factors: FactorShape, topology: Topology) -> tuple[Stage, ...]:
        made: tuple[Stage, ...] = ()
        held_bytes, gathered_ranks = float(factors.bytes), 1
        for name, group in self._gathering_groups(topology).items():
            made += stages.gathering(group, [held_bytes] * group.size, name, factors.itemsize)
            held_bytes *= group.size
            gathered_ranks *= group.size
        made += (stages.product(factors, gathered_ranks),)
        if self._sums_in_node_of(topology):
            shards = stages.Shards.even(factors.left * factors.right, topology.node)
            itemsize = factors.matrix_bytes // (factors.left * factors.right)
            made += stages.stages_by_levels(shards, None, itemsize, topology, None)
        return made

    def _gathering_groups(self, topology: Topology) -> dict[str, Group]:
        """Returns the groups that gather factors, in their order, by the name of the stage."""
        if topology.across is None or _is_uneven(topology):
            return {"gather": topology.world}
        # Across nodes first, with only the rank's own rows: after gathering in the node, each rank
        # would send the rows of the whole node over the slow network.
        across = {"across_gather": topology.across}
        return across if self.sums_in_node else across | {"node_gather": topology.node}

    def _sums_in_node_of(self, topology: Topology) -> bool:
        return bool(self.sums_in_node) and not _is_uneven(topology)


def _is_uneven(topology: Topology) -> bool:
    return len({len(node) for node in topology.nodes}) > 1

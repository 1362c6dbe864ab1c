"""Sends two thin matrices instead of their product (sufficient factor broadcasting).

`Factors` sends all batch rows, and `ByRows` chooses between two schemes by the number of rows. The
policy `hybcomm` sends factors if they have fewer bytes, and otherwise uses `ParameterServer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import tensorflow as tf
from typing_extensions import override

from tfposeidon.communication.topology import Group, Topology
from tfposeidon.communication.wire import Wire
from tfposeidon.factors.base import FactorScheme, SchemeOfFactors
from tfposeidon.factors.pairs import FactorPair, FactorShape, shape_of
from tfposeidon.factors.reader import FactorReader
from tfposeidon.gradients import Description, Structure
from tfposeidon.policies import Choice, Policy
from tfposeidon.schemes import stages
from tfposeidon.schemes.base import Scheme, State
from tfposeidon.schemes.dense import ParameterServer
from tfposeidon.schemes.stages import Stage
from tfposeidon.text import readable_size


@dataclass(frozen=True, kw_only=True)
class Factors(FactorScheme):
    """Gathers every rank's sufficient factors and multiplies them once (SFB of Poseidon).

    Ranks with the same position in their nodes gather factors first, and then the ranks of a node.
    Ranks may have different numbers of batch rows. In the node, the ranks' products are summed
    instead if that sends fewer bytes; the plan shows the choice.

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
      >>> factors = schemes.FactorShape(rows=32, left=1024, right=1024, dtype="float32")
      >>> topology = schemes.Topology.regular(0, size=4, ranks_per_node=1)
      >>> int(schemes.Factors().factor_cost(factors, topology).bytes) // 2**10
      768
      >>> int(schemes.AllReduce().cost(1024 * 1024, itemsize=4, topology=topology).bytes) // 2**10
      6144
    """

    sums_in_node: bool | None = None

    def __str__(self) -> str:
        return f"{self.name}(sums_in_node=True)" if self.sums_in_node else self.name

    @override
    def fitted(self, structure: Structure, topology: Topology) -> Scheme:
        factors = cast(FactorShape, structure)
        if self.sums_in_node is not None or _is_uneven(topology):
            return self
        few, many = (replace(self, sums_in_node=sums) for sums in (False, True))
        # Shards may differ by an element, so all ranks compute the limit for rank 0.
        first = topology.seen_from(0)
        one_row_bytes, sums_bytes = (
            scheme.factor_cost(replace(factors, rows=1), first).node_bytes for scheme in (few, many)
        )
        # Nodes of one rank gather nothing in the node, so there is no choice.
        if not one_row_bytes:
            return self
        # One row on each rank costs `one_row_bytes`, and the limit counts the rows of all ranks.
        limit = int(topology.size * sums_bytes / one_row_bytes)
        return ByRows(few=few, many=many, limit=limit).fitted(factors, topology)

    @override
    def exchange_factors(self, factors: FactorPair, wire: Wire, name: str) -> tf.Tensor:
        topology, rows = wire.topology, factors.packed
        groups, sums_in_node = self._groups(topology)
        for stage, group in groups.items():
            rows = wire.all_gather(rows, group, f"{name}.{stage}")
        total = factors.product(rows)
        if sums_in_node:
            # Use fixed shards, because all-reduces in separate nodes might add in different orders.
            shards = stages.Shards.even(total.shape[0], topology.node)
            own = stages.scatter_sum(total, shards, wire, f"{name}.node_scatter", None)
            total = stages.gather(own, shards, wire, f"{name}.node_gather")
        return total / tf.cast(topology.size, total.dtype)

    @override
    def factor_stages(self, factors: FactorShape, topology: Topology) -> tuple[Stage, ...]:
        made: tuple[Stage, ...] = ()
        held_bytes, gathered_ranks = float(factors.bytes), 1
        groups, sums_in_node = self._groups(topology)
        for name, group in groups.items():
            made += stages.gathering(group, [held_bytes] * group.size, name, factors.itemsize)
            held_bytes *= group.size
            gathered_ranks *= group.size
        made += (factors.multiplication(gathered_ranks),)
        if sums_in_node:
            shards = stages.Shards.even(factors.left * factors.right, topology.node)
            itemsize = factors.matrix_bytes // (factors.left * factors.right)
            made += stages.scatter_sum_stages(shards, itemsize, topology, None, "node_scatter")
            made += stages.gather_stages(shards, itemsize, None, "node_gather")
        return made

    def _groups(self, topology: Topology) -> tuple[dict[str, Group], bool]:
        """Returns the groups that gather factors, by stage, and whether nodes then sum products."""
        if topology.across is None or _is_uneven(topology):
            return {"gather": topology.world}, False
        # Gather across nodes first, while each rank holds only its own rows. After gathering in the
        # node, each rank would send the rows of the whole node over the slow network.
        across = {"across_gather": topology.across}
        if self.sums_in_node:
            return across, True
        return across | {"node_gather": topology.node}, False


def _is_uneven(topology: Topology) -> bool:
    return len({len(node) for node in topology.nodes}) > 1


@dataclass(frozen=True, kw_only=True)
class ByRows(SchemeOfFactors):
    """Uses one scheme up to a number of batch rows, and another above it.

    The number of rows is known only when a step runs. It is summed over ranks, so that all ranks
    take the same branch. The plan shows the scheme that the last step used. Variables whose factors
    have the same shape may share a bucket.

    Args:
      few: Scheme that sends the factors of each variable.
      many: Scheme that sends the factors of each variable as well, or the products of all variables
        as one vector.
      limit: Batch rows of one variable, summed over all ranks, up to which `few` is used.

    Cost: the cost of the scheme that is used, or of `many` before the first step.

    Example:
      >>> from tfposeidon import schemes
      >>> scheme = schemes.ByRows(
      ...     few=schemes.Factors(), many=schemes.ParameterServer(), limit=64
      ... )
      >>> [str(scheme.for_rows(rows)) for rows in (64, 65)]
      ['factors', 'ps']
    """

    name: ClassVar[str] = "by rows"
    few: FactorScheme
    many: Scheme
    limit: int

    def __str__(self) -> str:
        return f"{self.few} or {self.many}"

    def for_rows(self, rows: float) -> Scheme:
        """Returns the scheme that a step uses.

        Args:
          rows: Batch rows of one variable's factors, summed over all ranks.
        """
        return self.few if rows <= self.limit else self.many

    @override
    def fitted(self, structure: Structure, topology: Topology) -> Scheme:
        rows = cast(FactorShape, structure).rows
        # `rows` is an average over ranks. The step used the sum, which rounding restores.
        return self if rows is None else self.for_rows(round(rows * topology.size, 6))

    @override
    def bucket_stages(
        self, length: int, itemsize: int, structures: Sequence[Structure], topology: Topology
    ) -> tuple[Stage, ...]:
        return self.many.bucket_stages(length, itemsize, structures, topology)

    @override
    def exchange(
        self, gradient: tf.Tensor, state: State, wire: Wire, name: str
    ) -> tuple[tf.Tensor, State]:
        return self.many.exchange(gradient, state, wire, name)

    @override
    def exchange_pairs(
        self, factors: Sequence[FactorPair], rows: tf.Tensor, dtype: str, wire: Wire, name: str
    ) -> tf.Tensor:
        def few() -> tf.Tensor:
            return self.few.exchange_pairs(factors, rows, dtype, wire, name)

        def many() -> tf.Tensor:
            if isinstance(self.many, SchemeOfFactors):
                return self.many.exchange_pairs(factors, rows, dtype, wire, name)
            # Compute products only here, because a step that sends factors does not need them.
            products = [tf.cast(one.own_product, dtype) for one in factors]
            return self.many.exchange(tf.concat(products, 0), (), wire, name)[0]

        return tf.cond(rows <= self.limit * len(factors), few, many)


@dataclass(frozen=True, kw_only=True)
class HybComm(Policy):
    """Sends sufficient factors if they have fewer bytes, and gradients by `ParameterServer` if not.

    With P nodes, each a worker and a shard owner, and K batch rows per node, an M x N kernel uses
    factors if 2 K (P - 1) (M + N) is at most 2 M N (P + P - 2) / P (BestScheme). In a job on
    one node, each rank counts as a node. Each step chooses by the batch rows of all ranks; the plan
    shows the choice of the last step.

    Source: Zhang et al. 2017 (Poseidon), Algorithm 1 and Table 1. Differs: any product of two
    matrices counts as fully connected; K is the number of sent batch rows, averaged over ranks and
    counted in each step; and bytes are compared, because factors may have 16 bits, and batch rows
    of an embedding are sent with an index instead of M values.

    Example:
      >>> from tfposeidon import policies, schemes
      >>> from tfposeidon.gradients import Description
      >>> factors = schemes.FactorShape(rows=32, left=4096, right=4096, dtype="float32")
      >>> kernel = Description("fc/kernel", (4096, 4096), "float32", factors)
      >>> topology = schemes.Topology.regular(rank=0, size=8, ranks_per_node=1)
      >>> policies.HybComm().choose(kernel, topology).reason
      'factors 14.68 MB <= ps 234.88 MB with K=32, P=8'
    """

    @override
    def choose(self, description: Description, topology: Topology) -> Choice:
        if description.structure is None:
            unknown = "the first step determines whether it has factors"
            return Choice(ParameterServer(), description.why_no_structure or unknown)
        factors = shape_of(description)
        nodes, ranks_per_node = len(topology.nodes), max(map(len, topology.nodes))
        if nodes == 1:
            # In a job on one node, ranks take the role of Poseidon's nodes.
            nodes, ranks_per_node = ranks_per_node, 1
        row, _ = best_scheme_values(factors.left_columns, factors.right, 1, nodes)
        _, matrix = best_scheme_values(factors.left, factors.right, 1, nodes)
        row_bytes, matrix_bytes = row * factors.itemsize, matrix * description.itemsize
        # Algorithm 1 compares bytes for a given number of rows. Solve its inequality for the number
        # of rows, to get a limit for every step. A single rank sends nothing with either scheme.
        most_rows = matrix_bytes / row_bytes if row_bytes else 0.0
        # Up to the limit below, sums in the node do not send fewer bytes than factors.
        few = Factors(sums_in_node=False)
        limit = int(most_rows * topology.size / ranks_per_node)
        by_rows = ByRows(few=few, many=ParameterServer(), limit=limit)
        if factors.rows is None:
            return Choice(by_rows, f"factors up to K={int(most_rows)}, ps beyond, P={nodes}")
        k = ranks_per_node * factors.rows
        scheme = by_rows.fitted(factors, topology)
        sign = "<=" if scheme == by_rows.few else ">"
        compared = f"factors {readable_size(k * row_bytes)} {sign} ps {readable_size(matrix_bytes)}"
        candidates = (("factors", k * row_bytes), ("ps", matrix_bytes))
        return Choice(scheme, f"{compared} with K={k:g}, P={nodes}", candidates)

    @property
    @override
    def reader(self) -> FactorReader:
        return Factors.reader


def best_scheme_values(m: int, n: int, k: int, p: int) -> tuple[float, float]:
    """Counts the values that a node sends and receives for an m x n kernel.

    Args:
      m: Number of rows of the kernel.
      n: Number of columns of the kernel.
      k: Number of batch rows of a node's factors.
      p: Number of nodes, each a worker and a shard owner.

    Returns:
      Number of values with factors, and with `ParameterServer`.

    Source: Zhang et al. 2017 (Poseidon), Table 1.

    Example:
      >>> best_scheme_values(4096, 4096, k=32, p=8)
      (3670016.0, 58720256.0)
    """
    return 2.0 * k * (p - 1) * (m + n), 2.0 * m * n * (p + p - 2) / p

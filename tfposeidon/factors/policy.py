"""The policy `hybcomm`: factors where they are fewer bytes, else `ParameterServer`."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from tfposeidon.communication.topology import Topology
from tfposeidon.factors.pairs import shape_of
from tfposeidon.factors.reader import FactorReader
from tfposeidon.factors.schemes import ByRows, Factors
from tfposeidon.gradients.description import Description
from tfposeidon.policies.base import Choice, Policy
from tfposeidon.schemes.parameter_server import PAIR_BYTES, ParameterServer
from tfposeidon.units import readable_size


@dataclass(frozen=True, kw_only=True)
class HybComm(Policy):
    """Sends sufficient factors where they are fewer bytes, and all else by `ParameterServer`.

    With P nodes, each a worker and a shard owner, and K batch rows per node for an M x N kernel, it
    uses factors if 2 K (P - 1) (M + N) is at most 2 M N (P + P - 2) / P (BestScheme). In a job on
    one node, each rank counts as a node. Each step decides by the batch rows of all ranks; the plan
    shows what the last step used.

    Args:
      pair_bytes: Size of Poseidon's key-value pairs in bytes (default 2 MiB), as in
        `ParameterServer`.

    Raises:
      ValueError: If `pair_bytes` is not positive.

    Source: Zhang et al. 2017 (Poseidon), Algorithm 1 and Table 1. Differs: any product of two
    matrices counts as fully connected; K is the number of batch rows that are sent, the mean over
    ranks, counted in each step; and bytes are compared, because factors may have 16 bits, and batch
    rows of an embedding are sent with an index instead of M values.

    Example:
      >>> from tfposeidon import policies, schemes
      >>> from tfposeidon.gradients.description import Description
      >>> factors = schemes.FactorShape(rows=32, left=4096, right=4096, dtype="float32")
      >>> kernel = Description("fc/kernel", (4096, 4096), "float32", factors)
      >>> topology = schemes.Topology.regular(rank=0, size=8, ranks_per_node=1)
      >>> policies.HybComm().choose(kernel, topology).reason
      'factors 14.68 MB <= ps 234.88 MB with K=32, P=8'
    """

    pair_bytes: int = PAIR_BYTES

    def __post_init__(self) -> None:
        # Build it now, so that invalid arguments are refused at construction.
        _ = self._store

    @property
    def _store(self) -> ParameterServer:
        return ParameterServer(pair_bytes=self.pair_bytes)

    @override
    def choose(self, description: Description, topology: Topology) -> Choice:
        factors = shape_of(description)
        if factors is None:
            unknown = "the first step determines whether it has factors"
            return Choice(self._store, description.why_no_structure or unknown)
        nodes, ranks_per_node = _workers(topology)
        row, _ = best_scheme_values(factors.left_columns, factors.right, 1, nodes)
        _, matrix = best_scheme_values(factors.left, factors.right, 1, nodes)
        row_bytes, matrix_bytes = row * factors.itemsize, matrix * description.itemsize
        # Algorithm 1 compares bytes for a given number of rows. Solved for the rows, it gives a
        # limit for every step. A single rank sends nothing either way.
        most_rows = matrix_bytes / row_bytes if row_bytes else 0.0
        # Up to this limit, sums in the node are not fewer bytes than the factors.
        few = Factors(sums_in_node=False)
        limit = int(most_rows * topology.size / ranks_per_node)
        by_rows = ByRows(few=few, many=self._store, limit=limit)
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


def _workers(topology: Topology) -> tuple[int, int]:
    """Returns Poseidon's number of nodes P, and the number of ranks in each."""
    ranks = max(len(node) for node in topology.nodes)
    # In a job on one node, ranks take the role of Poseidon's nodes.
    return (len(topology.nodes), ranks) if len(topology.nodes) > 1 else (ranks, 1)


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

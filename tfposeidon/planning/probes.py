"""Collectives whose times tell the links of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import tensorflow as tf

from tfposeidon.communication.topology import Group, Topology
from tfposeidon.planning.seconds import load_of
from tfposeidon.schemes.cost import Operation, Transfer

FEW_ELEMENTS = 2**8
"""Length of vectors whose time is all latency."""
MANY_ELEMENTS, MOST_ELEMENTS = 2**15, 2**23
"""Length of vectors whose time tells a rate: more until they take long enough."""
LONG_ENOUGH_S = 0.03
"""Seconds after which the time of a vector tells a rate."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A collective that is timed.

    Attributes:
      name: Name of the probe; those of a rate begin with "rate.".
      operation: Collective of the wire.
      groups: Ranks that carry it out together, for each rank; ranks that take no part are missing.
      length: Elements that each rank brings.
      dtype: Their type (default "float32").
    """

    name: str
    operation: Operation
    groups: Mapping[int, Group]
    length: int
    dtype: str = "float32"

    @property
    def tells_rate(self) -> bool:
        """True if its time tells a rate, and not latencies."""
        return self.name.startswith("rate.")

    @property
    def transfers(self) -> dict[int, Transfer]:
        """The collective as each rank carries it out, by rank."""
        itemsize = tf.as_dtype(self.dtype).size
        return {
            rank: Transfer.of_vector(self.operation, group, self.length, itemsize=itemsize)
            for rank, group in self.groups.items()
        }

    @property
    def steps(self) -> int:
        """Messages that follow one another."""
        return max(transfer.steps for transfer in self.transfers.values())

    def bytes_on(self, topology: Topology) -> tuple[float, bool]:
        """Returns what loads the busiest link.

        Args:
          topology: The ranks of the job.

        Returns:
          Bytes that a node sends to others, or if there are none, that a rank sends within its
          node; and True if all stays within nodes.
        """
        load = load_of(self.transfers, topology)
        return load.cross_bytes or load.node_bytes, not load.cross_bytes


def small_probes(topology: Topology) -> list[Probe]:
    """Returns the probes that tell latencies: more than there are unknowns.

    Args:
      topology: The ranks of the job.
    """
    found = [
        _probe("all_reduce.world", "all_reduce", "world", topology, FEW_ELEMENTS),
        _probe("all_gather.world", "all_gather", "world", topology, FEW_ELEMENTS),
        _probe("all_to_all.world", "all_to_all", "world", topology, FEW_ELEMENTS),
    ]
    if len(topology.nodes) > 1 and max(map(len, topology.nodes)) > 1:
        found.append(_probe("all_gather.node", "all_gather", "node", topology, FEW_ELEMENTS))
    return found


def large_probes(topology: Topology) -> list[Probe]:
    """Returns the probes that tell rates: of links, of a connection, and of sums in float16.

    Args:
      topology: The ranks of the job.
    """
    sums = _probe("rate.half", "all_reduce", "world", topology, MANY_ELEMENTS)
    found = [replace(sums, dtype="float16")]
    if max(map(len, topology.nodes)) > 1:
        found.append(_probe("rate.node", "all_gather", "node", topology, MANY_ELEMENTS))
    if len(topology.nodes) > 1:
        # An all-to-all has as many connections as there are, a ring over one position has one.
        found.append(_probe("rate.across", "all_to_all", "world", topology, MANY_ELEMENTS))
        if topology.size > 2:
            ring = _probe("rate.flow", "all_gather", "across", topology, MANY_ELEMENTS)
            alone = {rank: group for rank, group in ring.groups.items() if 0 in group.ranks}
            found.append(replace(ring, groups=alone))
    return found


def _probe(name: str, operation: Operation, kind: str, topology: Topology, length: int) -> Probe:
    """Returns a probe of all ranks, each in its own group of a kind, if it has one."""
    groups = {rank: getattr(topology.seen_from(rank), kind) for rank in range(topology.size)}
    groups = {rank: group for rank, group in groups.items() if group is not None}
    return Probe(name=name, operation=operation, groups=groups, length=length)

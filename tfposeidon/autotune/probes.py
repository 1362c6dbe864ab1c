"""Probes: collectives whose times determine the network profile of a job.

Short probes determine latencies. Long probes determine bandwidths, and the speed of sums in
float16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import tensorflow as tf

from tfposeidon.autotune.seconds import load_of
from tfposeidon.communication.topology import Group, Topology
from tfposeidon.schemes.cost import Operation, Transfer

FEW_ELEMENTS = 2**8
"""Length of vectors whose time is dominated by latency."""
MANY_ELEMENTS, MOST_ELEMENTS = 2**15, 2**23
"""Initial and largest length of vectors for bandwidths; they grow until they take long enough."""
LONG_ENOUGH_S = 0.03
"""Seconds above which the time of a vector determines a bandwidth."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Collective to time.

    Names of bandwidth probes begin with "rate.". `groups` has the group of each rank, without ranks
    that do not take part. `length` is the number of elements per rank.
    """

    name: str
    operation: Operation
    groups: Mapping[int, Group]
    length: int
    dtype: str = "float32"

    @property
    def tells_rate(self) -> bool:
        """True if its time determines a bandwidth or throughput instead of latencies."""
        return self.name.startswith("rate.")

    @property
    def transfers(self) -> dict[int, Transfer]:
        """Transfer of each rank, by rank."""
        itemsize = tf.as_dtype(self.dtype).size
        return {
            rank: Transfer.of_vector(self.operation, group, self.length, itemsize=itemsize)
            for rank, group in self.groups.items()
        }

    @property
    def steps(self) -> int:
        """Number of sequential messages."""
        return max(transfer.steps for transfer in self.transfers.values())

    def bytes_on(self, topology: Topology) -> tuple[float, bool]:
        """Returns the bytes on the busiest node (else rank), and whether all stay within nodes."""
        load = load_of(self.transfers, topology)
        return load.cross_bytes or load.node_bytes, not load.cross_bytes


def small_probes(topology: Topology) -> list[Probe]:
    """Returns the latency probes, which are more than there are unknowns."""
    found = [
        _probe("all_reduce.world", "all_reduce", "world", topology, FEW_ELEMENTS),
        _probe("all_gather.world", "all_gather", "world", topology, FEW_ELEMENTS),
        _probe("all_to_all.world", "all_to_all", "world", topology, FEW_ELEMENTS),
    ]
    if len(topology.nodes) > 1 and max(map(len, topology.nodes)) > 1:
        found.append(_probe("all_gather.node", "all_gather", "node", topology, FEW_ELEMENTS))
    return found


def large_probes(topology: Topology) -> list[Probe]:
    """Returns the probes for bandwidths, of a node and a connection, and for sums in float16."""
    sums = _probe("rate.half", "all_reduce", "world", topology, MANY_ELEMENTS)
    found = [replace(sums, dtype="float16")]
    if max(map(len, topology.nodes)) > 1:
        found.append(_probe("rate.node", "all_gather", "node", topology, MANY_ELEMENTS))
    if len(topology.nodes) > 1:
        # An all-to-all uses all connections; a ring over one position per node uses one.
        found.append(_probe("rate.across", "all_to_all", "world", topology, MANY_ELEMENTS))
        if topology.size > 2:
            ring = _probe("rate.flow", "all_gather", "across", topology, MANY_ELEMENTS)
            alone = {rank: group for rank, group in ring.groups.items() if 0 in group.ranks}
            found.append(replace(ring, groups=alone))
    return found


def _probe(name: str, operation: Operation, kind: str, topology: Topology, length: int) -> Probe:
    """Returns a probe in which each rank uses its own group of a kind, if it has one."""
    groups = {rank: getattr(topology.seen_from(rank), kind) for rank in range(topology.size)}
    groups = {rank: group for rank, group in groups.items() if group is not None}
    return Probe(name=name, operation=operation, groups=groups, length=length)

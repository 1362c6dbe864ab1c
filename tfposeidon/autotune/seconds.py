"""Predicts the seconds of exchanges from the stages of schemes and the network profile of a job.

Each stage is a collective or local work. Its time is latency plus load, on the busiest rank or
connection.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tfposeidon.communication.network_profile import NetworkProfile, Rates
from tfposeidon.communication.topology import Topology
from tfposeidon.gradients.description import Structure
from tfposeidon.schemes import Scheme
from tfposeidon.schemes.cost import Operation, Transfer, Work

EXPOSED = 0.24
"""Share that is not hidden of the shorter of two: bytes on the network, and the CPU's work on them.

From a study of 94 exchanges; `benchmarks.predict --constants` evaluates it.
"""

SUMS_PER_PAIR = 2.0
"""Elements of a vector that are added in the time of one pair of index and value, if pairs are
sorted by index."""


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """Time of one stage of an exchange, on the rank or connection that takes longest.

    `operation` is `None` for local work. `size_bytes` is the payload on one rank, which limits
    Horovod's fusion of collectives with equal `fuses_with`; `None` there prevents fusion. A fused
    collective has the latency of one, and the sum of the loads.
    """

    operation: Operation | None
    size_bytes: float = 0.0
    fuses_with: tuple[int, ...] | None = None
    latency_s: float = 0.0
    load_s: float = 0.0
    crosses_nodes: bool = False

    @property
    def seconds(self) -> float:
        """Seconds of the stage alone, from its start on Horovod's thread."""
        return self.latency_s + self.load_s

    def slowed(self, factor: float) -> StageTime:
        """Returns the stage with its times multiplied by a factor."""
        return replace(self, latency_s=factor * self.latency_s, load_s=factor * self.load_s)


@dataclass(frozen=True, kw_only=True)
class Load:
    """Payload bytes of one collective, in the direction that has more.

    `cross_bytes` is of the busiest node to or from others, `flow_bytes` of the busiest connection
    between ranks of different nodes, and `node_bytes` of the busiest rank within its node.
    """

    cross_bytes: float
    flow_bytes: float
    node_bytes: float


def exchange_seconds(
    scheme: Scheme,
    length: int,
    itemsize: int,
    structures: Sequence[Structure],
    topology: Topology,
    links: NetworkProfile,
) -> float:
    """Predicts the seconds of one exchange alone, from its start to its end on the last rank."""
    times = stage_times(scheme, length, itemsize, tuple(structures), topology, links)
    return alone_seconds(times, links)


def alone_seconds(times: Iterable[StageTime], links: NetworkProfile) -> float:
    """Returns the seconds of an exchange whose collectives always find the thread idle."""
    return sum(
        time.seconds + (links.collective_s if time.operation is not None else 0.0) for time in times
    )


def stage_times(
    scheme: Scheme,
    length: int,
    itemsize: int,
    structures: tuple[Structure, ...],
    topology: Topology,
    links: NetworkProfile,
) -> tuple[StageTime, ...]:
    """Predicts the time of each stage of an exchange that takes any, the same on all ranks.

    Source: the study of issue 18, section 1: latency and bytes (Hockney 1994), with concurrent CPU
    work. Differs: compute throughput is of a rank while all ranks work, so the number of cores does
    not occur.
    """
    # Exclude the rank from the cache key, so that all ranks' calls share one result.
    return _stage_times(scheme, length, itemsize, structures, topology.seen_from(0), links)


@functools.lru_cache(maxsize=20_000)
def _stage_times(
    scheme: Scheme,
    length: int,
    itemsize: int,
    structures: tuple[Structure, ...],
    topology: Topology,
    links: NetworkProfile,
) -> tuple[StageTime, ...]:
    by_rank = {
        rank: scheme.bucket_stages(length, itemsize, structures, topology.seen_from(rank))
        for rank in _ranks_that_tell(scheme, topology)
    }
    times = []
    # Ranks that skip some stages have fewer, in the order of the complete list.
    for name in (stage.name for stage in max(by_rank.values(), key=len)):
        found = {
            rank: stage for rank, own in by_rank.items() for stage in own if stage.name == name
        }
        transfers = {rank: s for rank, s in found.items() if isinstance(s, Transfer)}
        if transfers:
            if any(transfer.group.size > 1 for transfer in transfers.values()):
                times.append(_transfer_time(transfers, topology, links))
        else:
            works = [stage for stage in found.values() if isinstance(stage, Work)]
            slowest_s = max(work_seconds(work, links.rates) for work in works)
            times.append(StageTime(operation=None, load_s=slowest_s))
    return tuple(times)


def _ranks_that_tell(scheme: Scheme, topology: Topology) -> Sequence[int]:
    """Returns ranks that include the busiest node: those of one node if all nodes are alike."""
    regular = Topology.regular(0, topology.size, len(topology.nodes[0])).nodes
    is_even = len({len(node) for node in topology.nodes}) == 1 and topology.nodes == regular
    return topology.nodes[0] if is_even and scheme.loads_evenly else range(topology.size)


def load_of(transfers: Mapping[int, Transfer], topology: Topology) -> Load:
    """Returns the load of a collective; groups that run it at once share their nodes' network."""
    node_of = _node_by_rank(topology.nodes)
    sent: dict[int, float] = defaultdict(float)
    received: dict[int, float] = defaultdict(float)
    within_sent: dict[int, float] = defaultdict(float)
    within_received: dict[int, float] = defaultdict(float)
    flow_bytes = 0.0
    for rank, transfer in transfers.items():
        for peer, size_bytes in transfer.messages(rank).items():
            if node_of[rank] == node_of[peer]:
                within_sent[rank] += size_bytes
                within_received[peer] += size_bytes
            else:
                sent[node_of[rank]] += size_bytes
                received[node_of[peer]] += size_bytes
                flow_bytes = max(flow_bytes, size_bytes)
    return Load(
        cross_bytes=max([0.0, *sent.values(), *received.values()]),
        flow_bytes=flow_bytes,
        node_bytes=max([0.0, *within_sent.values(), *within_received.values()]),
    )


@functools.lru_cache(maxsize=64)
def _node_by_rank(nodes: tuple[tuple[int, ...], ...]) -> dict[int, int]:
    return {rank: index for index, node in enumerate(nodes) for rank in node}


def _transfer_time(
    transfers: Mapping[int, Transfer], topology: Topology, links: NetworkProfile
) -> StageTime:
    load = load_of(transfers, topology)
    one = max(transfers.values(), key=lambda transfer: transfer.group.size)
    # Use the ranks, not the bytes, which are 0 for structures without a size.
    node_of = _node_by_rank(topology.nodes)
    crosses = any(
        len({node_of[rank] for rank in transfer.group.ranks}) > 1 for transfer in transfers.values()
    )
    link = links.across if crosses else links.node
    assert link is not None, "NetworkProfile.check_fits ensures it"
    link_s = link.seconds(load.cross_bytes, flow_bytes=load.flow_bytes) if crosses else 0.0
    cpu_s = float16_sums(one) * links.rates.half_s
    if load.node_bytes and links.node is not None:
        cpu_s += links.node.seconds(load.node_bytes)
    return StageTime(
        operation=one.operation,
        size_bytes=max(sum(transfer.parts_bytes) for transfer in transfers.values()),
        fuses_with=(one.itemsize, *one.group.ranks) if one.operation == "all_reduce" else None,
        latency_s=one.steps * link.latency_s,
        load_s=max(link_s, cpu_s) + EXPOSED * min(link_s, cpu_s),
        crosses_nodes=crosses,
    )


def float16_sums(transfer: Transfer) -> float:
    """Returns the elements that a rank adds in float16, which only Horovod's all-reduce does."""
    if transfer.operation != "all_reduce" or transfer.itemsize != 2:
        return 0.0
    p = transfer.group.size
    return transfer.parts_bytes[0] / transfer.itemsize * (p - 1) / p


def work_seconds(work: Work, rates: Rates) -> float:
    """Returns the seconds of local work on one rank, while all ranks of its node work."""
    per_element_s = {
        "sum": rates.sum_s,
        "encode": rates.encode_s,
        "select": rates.select_s,
        # Zeros, and the elements of a product, are written as fast as values are converted.
        "scatter": rates.encode_s,
        "multiply": rates.encode_s,
    }[work.kind]
    per_pair_s = rates.pair_s if work.kind == "select" else SUMS_PER_PAIR * rates.sum_s
    operations_s = rates.operation_s * work.operations if work.kind == "multiply" else 0.0
    return per_element_s * work.elements + per_pair_s * work.pairs + operations_s

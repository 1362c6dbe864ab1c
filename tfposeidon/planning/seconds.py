"""Seconds of exchanges, from the stages of schemes and the links of a job."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tfposeidon.communication.network_profile import NetworkProfile, Rates
from tfposeidon.communication.topology import Topology
from tfposeidon.gradients.factors import FactorShape
from tfposeidon.schemes import Scheme
from tfposeidon.schemes.cost import Operation, Transfer, Work

EXPOSED = 0.24
"""Share that nothing hides of the shorter of two: bytes on the link, and the CPU's work on them.

From a study of 94 exchanges; `benchmarks.predict --constants` tells what it is worth."""

SUMS_PER_PAIR = 2.0
"""Elements of a vector that are added up in the time of a pair of an index and a value, where pairs
come in the order of their indices."""


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """Time of one stage of an exchange, on the rank or link that takes longest.

    Args:
      operation: Collective of the wire; `None` for local work.
      size_bytes: Payload of a collective on one rank, by which Horovod fuses; 0 for local work.
      fuses_with: Collectives with the same key may be fused; `None` for those that never are.
      latency_s: Seconds of its message steps, which a fused collective has once.
      load_s: Seconds that its bytes are on the link, or that it works.
      crosses_nodes: True for a collective of ranks on several nodes.
    """

    operation: Operation | None
    size_bytes: float = 0.0
    fuses_with: tuple[int, ...] | None = None
    latency_s: float = 0.0
    load_s: float = 0.0
    crosses_nodes: bool = False

    @property
    def seconds(self) -> float:
        """Seconds of the stage by itself, once Horovod's thread has begun it."""
        return self.latency_s + self.load_s

    def slowed(self, factor: float) -> StageTime:
        """Returns the stage on ranks and links that take longer.

        Args:
          factor: Its time, as a multiple of this one.
        """
        return replace(self, latency_s=factor * self.latency_s, load_s=factor * self.load_s)


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one collective asks of the busiest node, connection and rank.

    Args:
      cross_bytes: Payload bytes that a node sends to others, or receives from them.
      flow_bytes: Payload bytes between two ranks of different nodes.
      node_bytes: Payload bytes that a rank sends within its node, or receives there.
    """

    cross_bytes: float
    flow_bytes: float
    node_bytes: float


def exchange_seconds(
    scheme: Scheme,
    length: int,
    itemsize: int,
    factors: Sequence[FactorShape],
    topology: Topology,
    links: NetworkProfile,
) -> float:
    """Predicts the seconds of one exchange by itself.

    Args:
      scheme: Scheme of the exchange.
      length: Elements of the bucket.
      itemsize: Bytes of an element.
      factors: Shape of each variable's factors; ignored by schemes that exchange vectors.
      topology: The ranks of the job; the result is the same on each.
      links: Links of the job.

    Returns:
      Seconds from its begin on all ranks to its end on the last; 0 on a single rank where nothing
      is computed.
    """
    times = stage_times(scheme, length, itemsize, tuple(factors), topology, links)
    return alone_seconds(times, links)


def alone_seconds(times: Iterable[StageTime], links: NetworkProfile) -> float:
    """Returns the seconds of an exchange by itself, whose collectives all find the thread idle.

    Args:
      times: Times of its stages.
      links: Links of the job.
    """
    return sum(
        time.seconds + (links.collective_s if time.operation is not None else 0.0) for time in times
    )


def stage_times(
    scheme: Scheme,
    length: int,
    itemsize: int,
    factors: tuple[FactorShape, ...],
    topology: Topology,
    links: NetworkProfile,
) -> tuple[StageTime, ...]:
    """Predicts the time of each stage of an exchange.

    Args:
      scheme: Scheme of the exchange.
      length: Elements of the bucket.
      itemsize: Bytes of an element.
      factors: Shape of each variable's factors; ignored by schemes that exchange vectors.
      topology: The ranks of the job; the result is the same on each.
      links: Links of the job.

    Returns:
      A time for each stage that takes any, one after the other.

    Source: the study of issue 18, section 1: latency and bytes (Hockney 1994) with the CPU beside
    them. Differs from it: rates are of a rank while all ranks work, so that cores do not occur.
    """
    # Without the rank that asks: all ranks share the results of one.
    return _stage_times(scheme, length, itemsize, factors, topology.seen_from(0), links)


@functools.lru_cache(maxsize=20_000)
def _stage_times(
    scheme: Scheme,
    length: int,
    itemsize: int,
    factors: tuple[FactorShape, ...],
    topology: Topology,
    links: NetworkProfile,
) -> tuple[StageTime, ...]:
    by_rank = {
        rank: scheme.bucket_stages(length, itemsize, factors, topology.seen_from(rank))
        for rank in _ranks_that_tell(scheme, topology)
    }
    times = []
    # Ranks without a part in some stages have fewer, in the order of those that have all.
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
    """Returns ranks whose stages hold the busiest node: those of one node if all are alike."""
    regular = Topology.regular(0, topology.size, len(topology.nodes[0])).nodes
    is_even = len({len(node) for node in topology.nodes}) == 1 and topology.nodes == regular
    return topology.nodes[0] if is_even and scheme.loads_evenly else range(topology.size)


def load_of(transfers: Mapping[int, Transfer], topology: Topology) -> Load:
    """Returns what a collective asks of the busiest node, connection and rank.

    Args:
      transfers: The collective as each rank takes part in it, by rank. Groups that carry it out at
        the same time count together: they share the links of their nodes.
      topology: The ranks of the job.
    """
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
    # By the ranks and not by the bytes, of which factors without rows have none.
    node_of = _node_by_rank(topology.nodes)
    crosses = any(
        len({node_of[rank] for rank in transfer.group.ranks}) > 1 for transfer in transfers.values()
    )
    link = links.across if crosses else links.node
    assert link is not None, "NetworkProfile.check_fits has seen to it"
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
    """Returns the elements that a rank adds in float16, which Horovod's all-reduce alone does.

    Args:
      transfer: Collective of one rank.
    """
    if transfer.operation != "all_reduce" or transfer.itemsize != 2:
        return 0.0
    p = transfer.group.size
    return transfer.parts_bytes[0] / transfer.itemsize * (p - 1) / p


def work_seconds(work: Work, rates: Rates) -> float:
    """Returns the seconds of local work.

    Args:
      work: Work of one rank.
      rates: Speed of a rank, while all ranks of its node work.
    """
    per_element_s = {
        "sum": rates.sum_s,
        "encode": rates.encode_s,
        "select": rates.select_s,
        # Zeros are written as fast as values are converted, and so is a product.
        "scatter": rates.encode_s,
        "multiply": rates.encode_s,
    }[work.kind]
    per_pair_s = rates.pair_s if work.kind == "select" else SUMS_PER_PAIR * rates.sum_s
    operations_s = rates.operation_s * work.operations if work.kind == "multiply" else 0.0
    return per_element_s * work.elements + per_pair_s * work.pairs + operations_s

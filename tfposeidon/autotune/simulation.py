"""Predicts the time of one training step from the stages of its exchanges and their overlap.

Think of a step as a discrete-event simulation with two resources, Horovod's thread and the rank's
processor. Each bucket passes through its stages, which are collectives or local work. The thread
negotiates once per cycle for all ready collectives, fuses compatible all-reduces, and executes
collectives sequentially. Local work of all buckets shares the processor.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tfposeidon.communication.network_profile import NetworkProfile, Rates
from tfposeidon.communication.topology import Topology
from tfposeidon.gradients import Structure
from tfposeidon.schemes import Scheme
from tfposeidon.schemes.stages import Operation, Transfer, Work

FUSION_THRESHOLD, FUSION_BYTES = "HOROVOD_FUSION_THRESHOLD", 128 * 2**20
"""Environment variable with the maximum bytes of Horovod's fused all-reduces, and its default."""


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """Time of one stage of an exchange, on the slowest rank or connection.

    `operation` is `None` for local work. `size_bytes` is the payload on one rank. Horovod fuses
    collectives whose `fuses_with` are equal and not `None`; the loads of fused collectives add up.
    """

    operation: Operation | None
    size_bytes: float = 0.0
    fuses_with: tuple[int, ...] | None = None
    latency_s: float = 0.0
    load_s: float = 0.0
    crosses_nodes: bool = False


class Load(NamedTuple):
    """Maximum bytes in one direction of any node, connection across nodes, and rank in its node."""

    cross_bytes: float
    flow_bytes: float
    node_bytes: float


@functools.lru_cache(maxsize=20_000)
def stage_times(
    scheme: Scheme,
    length: int,
    itemsize: int,
    structures: tuple[Structure, ...],
    topology: Topology,
    links: NetworkProfile,
) -> tuple[StageTime, ...]:
    """Predicts the time of each stage of an exchange, the same on all ranks.

    Source: Hockney 1994 (latency and bandwidth). Differs: adds the CPU work of concurrent ranks.
    """
    first, size = topology.nodes[0], topology.size
    is_regular = topology.nodes == Topology.regular(0, size, len(first)).nodes
    # If all nodes have the same load, the ranks of one node represent all ranks.
    is_even = scheme.loads_evenly and is_regular and size % len(first) == 0
    by_rank = {
        rank: scheme.bucket_stages(length, itemsize, structures, topology.seen_from(rank))
        for rank in (first if is_even else range(size))
    }
    times = []
    # Some ranks skip stages, but all ranks have the same order, so the longest list is complete.
    for name in (stage.name for stage in max(by_rank.values(), key=len)):
        found = [(rank, one) for rank, own in by_rank.items() for one in own if one.name == name]
        transfers = {rank: one for rank, one in found if isinstance(one, Transfer)}
        if any(transfer.group.size > 1 for transfer in transfers.values()):
            times.append(_transfer_time(transfers, topology, links))
        elif not transfers:
            works_s = [work_seconds(one, links.rates) for _, one in found if isinstance(one, Work)]
            times.append(StageTime(operation=None, load_s=max(works_s)))
    return tuple(times)


def load_of(transfers: Mapping[int, Transfer], topology: Topology) -> Load:
    """Returns the load of a collective whose groups share the network of their nodes."""
    node_of = {rank: index for index, node in enumerate(topology.nodes) for rank in node}
    across: dict[Any, float] = defaultdict(float)
    within: dict[Any, float] = defaultdict(float)
    flow_bytes = 0.0
    for rank, transfer in transfers.items():
        for peer, size_bytes in transfer.messages(rank).items():
            ends = node_of[rank], node_of[peer]
            crosses = ends[0] != ends[1]
            # Count each direction separately.
            for end in enumerate(ends if crosses else (rank, peer)):
                (across if crosses else within)[end] += size_bytes
            flow_bytes = max(flow_bytes, size_bytes if crosses else 0.0)
    return Load(max(across.values(), default=0.0), flow_bytes, max(within.values(), default=0.0))


def _transfer_time(
    transfers: Mapping[int, Transfer], topology: Topology, links: NetworkProfile
) -> StageTime:
    load = load_of(transfers, topology)
    one = max(transfers.values(), key=lambda transfer: transfer.group.size)
    # Compare ranks instead of bytes, because structures of unknown size have 0 bytes.
    groups = {transfer.group.ranks for transfer in transfers.values()}
    crosses = any(not topology.same_node(group[0], rank) for group in groups for rank in group)
    link = links.across if crosses else links.node
    assert link is not None, "NetworkProfile.check_fits ensures this link"
    link_s = link.seconds(load.cross_bytes, flow_bytes=load.flow_bytes) if crosses else 0.0
    cpu_s = float16_sums(one) * links.rates.half_s
    if load.node_bytes and links.node is not None:
        cpu_s += links.node.seconds(load.node_bytes)
    return StageTime(
        operation=one.operation,
        size_bytes=max(sum(transfer.parts_bytes) for transfer in transfers.values()),
        fuses_with=(one.itemsize, *one.group.ranks) if one.operation == "all_reduce" else None,
        latency_s=one.steps * link.latency_s,
        # A rank sums and copies bytes while others arrive.
        load_s=max(link_s, cpu_s),
        crosses_nodes=crosses,
    )


def float16_sums(transfer: Transfer) -> float:
    """Returns a rank's number of float16 sums, which only Horovod's all-reduce computes."""
    if transfer.operation != "all_reduce" or transfer.itemsize != 2:
        return 0.0
    p = transfer.group.size
    return transfer.parts_bytes[0] / transfer.itemsize * (p - 1) / p


def work_seconds(work: Work, rates: Rates) -> float:
    """Returns the seconds of local work on one rank while all ranks of its node work."""
    # Writing zeros or the elements of a product takes as long as converting values.
    per_element_s = {"sum": rates.sum_s, "select": rates.select_s}.get(work.kind, rates.encode_s)
    per_pair_s = rates.pair_s if work.kind == "select" else rates.sum_s
    operations_s = rates.operation_s * work.operations if work.kind == "multiply" else 0.0
    return per_element_s * work.elements + per_pair_s * work.pairs + operations_s


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Seconds from the start of a step to the gradient of each variable and to the last of them."""

    ready_s: tuple[float, ...]
    compute_s: float

    @classmethod
    def even(cls, *, variables: int, first_s: float, compute_s: float) -> Timeline:
        """Returns a timeline with evenly spaced gradients, the last variable's gradient first."""
        between_s = (compute_s - first_s) / max(1, variables - 1)
        ready_s = [first_s + between_s * index for index in reversed(range(variables))]
        # Rounding must not move a gradient past the end of the computation.
        return cls(ready_s=tuple(min(s, compute_s) for s in ready_s), compute_s=compute_s)


def fusion_bytes_of(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the size in bytes up to which Horovod fuses the all-reduces of one cycle."""
    text = environment.get(FUSION_THRESHOLD) or str(FUSION_BYTES)
    if not text.isdecimal():
        raise ValueError(
            f"{FUSION_THRESHOLD} must be a number of bytes. Received: {text!r}. Unset it for the "
            f"default of {FUSION_BYTES}."
        )
    return int(text)


_Event = tuple[float, int, Sequence[StageTime]]
"""Seconds of a bucket's next stage, a number that breaks ties, and the remaining stages."""


def simulate(
    chains: Sequence[Sequence[StageTime]],
    ready_s: Sequence[float],
    compute_s: float,
    collective_s: float,
    fusion_bytes: int = FUSION_BYTES,
) -> float:
    """Predicts the seconds of a step whose buckets have these stages and are ready at `ready_s`."""
    numbers = itertools.count()
    # A sorted list is a valid heap.
    events: list[_Event] = sorted(zip(ready_s, numbers, chains, strict=False))
    waiting: list[_Event] = []
    finish_s, thread_s, processor_s = compute_s, 0.0, 0.0
    while events or waiting:
        begin_s = max(thread_s, waiting[0][0]) if waiting else math.inf
        if events and events[0][0] <= begin_s:
            time_s, _, stages = event = heapq.heappop(events)
            if not stages:
                finish_s = max(finish_s, time_s)
            elif stages[0].operation is None:
                processor_s = max(time_s, processor_s) + stages[0].load_s
                heapq.heappush(events, (processor_s, next(numbers), stages[1:]))
            else:
                waiting.append(event)
            continue
        thread_s, ready, waiting = begin_s + collective_s, waiting, []
        for took_s, fused in _executions(ready, fusion_bytes):
            thread_s += took_s
            for _, _, stages in fused:
                heapq.heappush(events, (thread_s, next(numbers), stages[1:]))
    return finish_s


def _executions(ready: Sequence[_Event], fusion_bytes: int) -> Iterator[tuple[float, list[_Event]]]:
    """Yields the seconds and the fused collectives of each execution in a cycle."""
    while ready:
        leading = ready[0][2][0]
        fused, others, size_bytes = [ready[0]], [], leading.size_bytes
        for event in ready[1:]:
            stage = event[2][0]
            fits = size_bytes + stage.size_bytes <= fusion_bytes
            if fits and stage.fuses_with == leading.fuses_with is not None:
                fused.append(event)
                size_bytes += stage.size_bytes
            else:
                others.append(event)
        stages, ready = [event[2][0] for event in fused], others
        yield max(s.latency_s for s in stages) + sum(s.load_s for s in stages), fused

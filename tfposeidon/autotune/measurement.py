"""Measures the network profile of a job, and the throughput of its ranks under full load."""

from __future__ import annotations

import datetime
import functools
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfposeidon import ops
from tfposeidon.autotune.simulation import float16_sums, load_of
from tfposeidon.communication.network_profile import Link, NetworkProfile, Rates
from tfposeidon.communication.topology import Group, Topology
from tfposeidon.communication.wire import Wire, exchange_objects
from tfposeidon.exchange.observer import time_after
from tfposeidon.schemes.stages import Operation, Transfer

MOST_ROUNDS, GROWING_ROUNDS, BUDGET_S = 15, 3, 0.8
"""Maximum number of rounds, and of untimed rounds that enlarge vectors, and seconds after which no
third timed round starts."""
SHORT_ROUNDS = 2
"""Number of times that a round repeats short probes, whose times are shorter and vary more. On two
cores with 2 x 2 ranks, four times take 22 to 37 % longer, and latencies vary as much."""
FEW_ELEMENTS, MANY_ELEMENTS, MOST_ELEMENTS = 2**8, 2**15, 2**23
"""Length of vectors that determine latencies; initial length, across nodes, and maximum length for
bandwidths."""
LONG_ENOUGH_S = 0.03
"""Minimum duration in seconds of a transfer that determines a bandwidth."""
ELEMENTS, PAIRS, SIDE, ROWS = 2**20, (2**13, 2**17), 2048, 128
"""Sizes of the timed local work: elements of the vector, pairs in each of the two selections, side
of the square product, and rows of its factors."""
QUANTILE = 25
"""Percentile of the times of a probe that represents the probe. Load from other processes only
prolongs rounds, but a single fast round may be a burst."""
LEAST_S = 1e-7
"""Minimum of an estimate in seconds, because noise can make differences negative."""
FLOW_MARGIN = 0.8
"""Share of the network's bandwidth above which a single connection counts as equally fast."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Collective to time, with `length` elements per rank.

    The names of long probes start with "rate.". `groups` has the group of each participating rank.
    """

    name: str
    operation: Operation
    groups: Mapping[int, Group]
    length: int
    dtype: str = "float32"

    @property
    def tells_rate(self) -> bool:
        """True if the probe determines a bandwidth or throughput instead of a latency."""
        return self.name.startswith("rate.")

    @property
    def transfers(self) -> dict[int, Transfer]:
        size, length = tf.as_dtype(self.dtype).size, self.length
        return {
            rank: Transfer.of_vector(self.operation, group, length, itemsize=size)
            for rank, group in self.groups.items()
        }

    @property
    def steps(self) -> int:
        """Number of sequential messages."""
        return max(transfer.steps for transfer in self.transfers.values())

    def bytes_on(self, topology: Topology) -> tuple[float, bool]:
        """Returns bytes of the busiest node or rank, and whether all transfers are within nodes."""
        load = load_of(self.transfers, topology)
        return load.cross_bytes or load.node_bytes, not load.cross_bytes


def probes_of(topology: Topology) -> list[Probe]:
    """Returns probes for latencies, bandwidths of nodes and of a connection, and float16 sums."""
    operations: tuple[Operation, ...] = ("all_reduce", "all_gather", "all_to_all")
    has_nodes, has_levels = len(topology.nodes) > 1, max(map(len, topology.nodes)) > 1
    found = [_probe(f"{one}.world", one, "world", topology, FEW_ELEMENTS) for one in operations]
    if has_nodes and has_levels:
        found.append(_probe("all_gather.node", "all_gather", "node", topology, FEW_ELEMENTS))
    sums = _probe("rate.half", "all_reduce", "world", topology, MANY_ELEMENTS)
    found.append(replace(sums, dtype="float16"))
    if has_levels:
        found.append(_probe("rate.node", "all_gather", "node", topology, MOST_ELEMENTS // 4))
    if has_nodes:
        # An all-to-all uses all connections between nodes; a ring of one rank per node uses one.
        found.append(_probe("rate.across", "all_to_all", "world", topology, MANY_ELEMENTS))
    if has_nodes and topology.size > 2:
        ring = _probe("rate.flow", "all_gather", "across", topology, MANY_ELEMENTS)
        alone = {rank: group for rank, group in ring.groups.items() if 0 in group.ranks}
        found.append(replace(ring, groups=alone))
    return found


def _probe(name: str, operation: Operation, kind: str, topology: Topology, length: int) -> Probe:
    """Returns a probe in which each rank uses its own group of the given kind, if any."""
    groups = {rank: getattr(topology.seen_from(rank), kind) for rank in range(topology.size)}
    groups = {rank: group for rank, group in groups.items() if group is not None}
    return Probe(name=name, operation=operation, groups=groups, length=length)


def measure(wire: Wire) -> NetworkProfile:
    """Measures the network profile of a job on its slowest ranks; all ranks must call this."""
    topology, begin_s = wire.topology, time.perf_counter()
    run, samples, timed_rounds = _Round(wire), defaultdict[str, list[float]](list), 0
    for number in range(MOST_ROUNDS):
        mine = [run(), time.perf_counter() - begin_s]
        everybody = exchange_objects(mine, wire, f"tp.links.round_{number}")
        slowest = np.max([own for own, _ in everybody], axis=0).tolist()
        # The first round also traces graphs and connects ranks.
        if not timed_rounds and number < GROWING_ROUNDS and (run.enlarge(slowest) or not number):
            begin_s = time.perf_counter()
            continue
        timed_rounds += 1
        for name, seconds in zip(run.names, slowest, strict=True):
            samples[name].append(seconds)
        # Use rank 0's clock, so that all ranks stop at the same round.
        if timed_rounds > 1 and everybody[0][1] > BUDGET_S:
            break
    work = {kind: float(np.percentile(samples[kind], QUANTILE)) for kind in WORK}
    rates = rates_of(work, ELEMENTS, PAIRS, (ROWS, SIDE))
    links = estimate_links(run.probes, samples, topology, rates)
    own = replace(links, hosts=hosts_of(wire)).to_json()
    # All ranks need bit-equal profiles to make equal plans, even if their processors differ.
    return NetworkProfile.from_json(exchange_objects(own, wire, "tp.links.agreed")[0], "rank 0")


def hosts_of(wire: Wire) -> tuple[str, ...]:
    """Returns the host name of each node; all ranks must call this."""
    names = exchange_objects(socket.gethostname(), wire, "tp.links.hosts")
    return tuple(names[node[0]] for node in wire.topology.nodes)


class _Round:
    """Runs a round as one graph, because eager calls would take longer than the messages."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        probes = [(one, 1 if one.tells_rate else SHORT_ROUNDS) for one in probes_of(wire.topology)]
        self.probes = [one for one, times in probes for _ in range(times)]
        self.names = [*(probe.name for probe in self.probes), *WORK]
        # Disable AutoGraph, because its conversion would take longer than the rest of the round.
        self._function = tf.function(self._traced, autograph=False)
        self._vector = tf.random.stateless_normal([ELEMENTS], [1, 2])

    def __call__(self) -> list[float]:
        """Returns this rank's seconds for each probe and kind of work; ranks start together."""
        lengths = tf.constant([probe.length for probe in self.probes], tf.int32)
        return self._function(lengths, self._vector)[0].numpy().tolist()

    def enlarge(self, times: Sequence[float]) -> bool:
        """Enlarges the vectors of probes that are too fast; returns whether there were any."""
        before, least_s = [*self.probes], dict[str, float]()
        for name, seconds in zip(self.names, times, strict=True):
            least_s[name] = min(seconds, least_s.get(name, seconds))
        for index, probe in enumerate(self.probes):
            bytes_s = max(LEAST_S, times[index] - least_s[f"{probe.operation}.world"])
            if probe.tells_rate and bytes_s < LONG_ENOUGH_S and probe.length < MOST_ELEMENTS:
                # Limit the factor, because a burst may have made short messages too fast.
                factor = min(8.0, max(2.0, LONG_ENOUGH_S / bytes_s))
                length = min(MOST_ELEMENTS, round(factor * probe.length))
                self.probes[index] = replace(probe, length=length)
        return self.probes != before

    def _traced(self, lengths: tf.Tensor, vector: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        # Return all results, because TensorFlow prunes ops that only control dependencies use.
        times: list[tf.Tensor] = []
        used: list[tf.Tensor] = []
        runs = [
            *(functools.partial(self._collective, *one, lengths) for one in enumerate(self.probes)),
            *(functools.partial(work, vector) for work in WORK.values()),
        ]
        end_s = tf.timestamp()
        for number, run in enumerate(runs):
            # All ranks start together after an all-reduce, whose input must not be a constant.
            here, world = tf.reshape(tf.cast(end_s, tf.float32), [1]), self._wire.topology.world
            used.append(self._wire.all_reduce(here, world, f"tp.links.begin_{number}"))
            begin_s = time_after(used[-1:])
            with tf.control_dependencies([begin_s]):
                result = tf.nest.flatten(run())[0]
            end_s = time_after([result])
            times.append(end_s - begin_s)
            used.append(tf.reshape(result, [-1])[:1])
        return tf.stack(times), used

    def _collective(self, number: int, probe: Probe, lengths: tf.Tensor) -> tf.Tensor:
        length, group = lengths[number], probe.groups.get(self._wire.topology.rank)
        values = tf.ones(tf.reshape(length, [1]), probe.dtype)
        if group is None:
            return values[:1]
        splits: list[Any] = []
        if probe.operation == "all_to_all":
            share = length // group.size
            splits = [[share] * (group.size - 1) + [length - share * (group.size - 1)]]
        collective = getattr(self._wire, probe.operation)
        return collective(values, *splits, group, f"tp.links.{number}")


WORK: dict[str, Callable[[tf.Tensor], Any]] = {
    # Sum four vectors, as a shard owner does for four ranks.
    "sum": lambda vector: tf.add_n(tf.split(vector, 4)),
    "encode": functools.partial(ops.encode, wire_dtype="float16"),
    "select": lambda vector: ops.error_feedback_top_k(tf.zeros([ELEMENTS]), vector, PAIRS[0]),
    "select_many": lambda vector: ops.error_feedback_top_k(tf.zeros([ELEMENTS]), vector, PAIRS[1]),
    "multiply": lambda vector: tf.matmul(
        rows := tf.reshape(vector[: ROWS * SIDE], [ROWS, SIDE]), rows, transpose_a=True
    ),
}
"""Local work to time, by kind."""


def estimate_links(
    probes: Sequence[Probe], samples: Mapping[str, list[float]], topology: Topology, rates: Rates
) -> NetworkProfile:
    """Fits a network profile to `samples`: seconds of the slowest rank in each round, by probe."""
    times = {p.name: float(np.percentile(samples[p.name], QUANTILE)) for p in probes}
    large = {probe.name: probe for probe in probes if probe.tells_rate}
    small = [probe for probe in probes if not probe.tells_rate]
    collective_s, latency_s = _latencies(small, times, topology)
    found: dict[str, float] = {}
    for name, probe in large.items():
        sent_bytes, stays = probe.bytes_on(topology)
        # If latency dominates, attribute at least a tenth of the time to the bytes.
        bytes_s = max(times[name] - collective_s - probe.steps * latency_s[stays], times[name] / 10)
        found[name] = rounded(sent_bytes / bytes_s)
    across = node = None
    # Prefer probes across nodes, because times within nodes are short and vary more.
    uncertain = [name for name in found if name in ("rate.across", "rate.flow")] or ["rate.node"]
    if "rate.node" in found:
        node = Link(latency_s=latency_s[True], bytes_per_s=found["rate.node"])
    if "rate.across" in found:
        rate, flow = found["rate.across"], found.get("rate.flow")
        if flow is not None and flow > FLOW_MARGIN * rate:
            # The network is at least as fast as one connection.
            uncertain = [max(uncertain, key=found.__getitem__)]
            rate, flow = found[uncertain[0]], None
        across = Link(latency_s=latency_s[False], bytes_per_s=rate, flow_bytes_per_s=flow)
    if half := large.get("rate.half"):
        rate = found["rate.node"] if across is None else across.bytes_per_s
        # The transfer may hide Horovod's sums, which run in software.
        if found["rate.half"] < rate:
            bytes_s = half.bytes_on(topology)[0] / found["rate.half"]
            sums = float16_sums(next(iter(half.transfers.values())))
            rates = replace(rates, half_s=rounded(bytes_s / sums))
    return NetworkProfile(
        rates=rates,
        collective_s=collective_s,
        ranks_per_node=max(len(node) for node in topology.nodes),
        device="gpu" if tf.config.list_physical_devices("GPU") else "cpu",
        node=node,
        across=across,
        measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        # Leave out latencies, which vary more than bandwidths, but determine few choices.
        uncertainty=rounded(max(_uncertainty(samples[name]) for name in uncertain)),
    )


def _latencies(
    probes: Sequence[Probe], times: Mapping[str, float], topology: Topology
) -> tuple[float, dict[bool, float]]:
    """Returns seconds per Horovod cycle, and per message across (`False`) or within nodes."""
    stays = [probe.bytes_on(topology)[1] for probe in probes]
    kinds = sorted(set(stays))
    rows = [
        [1.0, *(probe.steps if kind == stay else 0.0 for kind in kinds)]
        for probe, stay in zip(probes, stays, strict=True)
    ]
    # Divide by the times to minimize the squares of relative errors.
    seconds = np.array([times[probe.name] for probe in probes])
    found, *_ = np.linalg.lstsq(np.array(rows) / seconds[:, None], np.ones(len(probes)), rcond=None)
    collective_s, *latencies = (rounded(max(float(value), LEAST_S)) for value in found)
    return collective_s, dict(zip(kinds, latencies, strict=True))


def rates_of(
    times: Mapping[str, float], elements: int, pairs: tuple[int, int], product: tuple[int, int]
) -> Rates:
    """Returns the throughput of a rank from the seconds of each kind of local work."""
    (few, many), (rows, columns) = pairs, product
    encode_s = times["encode"] / elements
    pair_s = max(times["select_many"] - times["select"], 0.0) / (many - few)
    multiply_s = max(times["multiply"] - encode_s * columns**2, LEAST_S)
    return Rates(
        sum_s=rounded(times["sum"] / elements),
        encode_s=rounded(encode_s),
        select_s=rounded(max(times["select"] - pair_s * few, LEAST_S) / elements),
        pair_s=rounded(pair_s),
        # Only an all-reduce sums in float16.
        half_s=0.0,
        operation_s=rounded(multiply_s / (2.0 * rows * columns**2)),
    )


def _uncertainty(values: Sequence[float]) -> float:
    """Returns the approximate relative standard error of the quartile."""
    # Ignore the slower half, which may include lost packets: TCP sends them again after 0.2 s.
    low, middle = np.percentile(values, [QUANTILE, 50])
    return float(2.0 * (middle - low) / middle / len(values) ** 0.5)


def rounded(value: float) -> float:
    """Returns a number rounded to three digits, because further digits are noise."""
    return float(f"{value:.3g}")

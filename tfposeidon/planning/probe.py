"""Measurement of a job's links, and of the speed of its ranks while all of them work."""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf

from tfposeidon import ops
from tfposeidon.communication.links import Link, Links, Rates
from tfposeidon.communication.topology import Group, Topology
from tfposeidon.communication.wire import Wire, exchange_objects
from tfposeidon.planning.seconds import EXPOSED, float16_sums, load_of
from tfposeidon.schemes.cost import Operation, Transfer

BUDGET_S = 1.7
"""Seconds after which no further round begins."""
MOST_ROUNDS, GROWING_ROUNDS = 15, 3
LATEST = 1.4
"""Multiple of the budget after which fewer rounds than these have to do."""
FEWEST_ROUNDS = 2
"""Rounds without which nothing is known about how much times scatter."""
SHORT_ROUNDS = 4
"""Times that short messages are sent in a round: they scatter more, and take less time."""
QUANTILE = 25
"""Percentile that counts: loads of others only ever make a round longer, but a single fast one may
be a burst that a link lets through."""
FEW_ELEMENTS = 2**8
"""Length of vectors whose time is all latency."""
MANY_ELEMENTS, MOST_ELEMENTS = 2**15, 2**23
"""Length of vectors whose time tells a rate: more until they take long enough."""
LONG_ENOUGH_S = 0.03
LEAST_S = 1e-7
"""Seconds that nothing is shorter than, where noise would make a difference negative."""
FLOW_MARGIN = 0.8
"""Share of the link's rate above which a connection by itself counts as fast as the link."""
ELEMENTS, PAIRS = 2**20, (2**13, 2**17)
"""Elements, and pairs of two selections, of the local work that is timed."""
SIDE, ROWS = 2048, 128
"""Sides of the matrix, and rows of the factors, of the product that is timed."""


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


def measure(wire: Wire, budget_s: float = BUDGET_S) -> Links:
    """Measures the links of a job; all ranks call it together.

    Rounds of all probes follow one another, so that a load that comes and goes does not fall on one
    of them alone. Of each round the slowest rank counts, and of the rounds the lower quartile. The
    time is kept by rank 0's clock.

    Args:
      wire: Collectives of the job, of two ranks or more.
      budget_s: Seconds after which no further round begins, once there is one.

    Returns:
      The links, the same on every rank.
    """
    begin_s, topology = time.perf_counter(), wire.topology
    short = _Round(wire, small_probes(topology), {}, "short")
    long = _Round(wire, large_probes(topology), WORK, "long")
    lengths = [probe.length for probe in long.probes]
    samples: dict[str, list[float]] = defaultdict(list)
    for number in range(MOST_ROUNDS):
        # The first round is slow on all ranks, and tells lengths at most.
        often = [
            short([FEW_ELEMENTS] * len(short.probes)) for _ in range(SHORT_ROUNDS if number else 1)
        ]
        once = long(lengths)
        mine = [time.perf_counter() - begin_s, often, once]
        everybody = exchange_objects(mine, wire, f"tp.links.round_{number}")
        # One round tells nothing about how much times scatter; a second one is worth some time.
        limit_s = budget_s if number >= FEWEST_ROUNDS else LATEST * budget_s
        is_late = everybody[0][0] > limit_s
        if number:
            for times in np.max([often for _, often, _ in everybody], axis=0):
                short.note(times, samples)
        slowest = np.max([once for *_, once in everybody], axis=0)
        if number:
            long.note(slowest, samples)
        if number and is_late:
            break
        if number < GROWING_ROUNDS:
            lengths = _grown(long.probes, lengths, slowest.tolist(), samples)
    probes = [
        *short.probes,
        *(replace(one, length=length) for one, length in zip(long.probes, lengths, strict=True)),
    ]
    hosts, ranks_per_core = _surroundings(wire)
    links = replace(
        estimate(probes, samples, topology, _rates(samples)),
        hosts=hosts,
        ranks_per_core=ranks_per_core,
    )
    # All plan by the same figures, to the last bit, also where processors differ.
    agreed = exchange_objects(links.to_json(), wire, "tp.links.agreed")[0]
    return Links.from_json(agreed, "rank 0")


def hosts_of(wire: Wire) -> tuple[str, ...]:
    """Returns the name of each node; all ranks call it together.

    Args:
      wire: Collectives of the job.
    """
    names = exchange_objects(socket.gethostname(), wire, "tp.links.hosts")
    return tuple(names[node[0]] for node in wire.topology.nodes)


def _surroundings(wire: Wire) -> tuple[tuple[str, ...], float]:
    """Returns the names of the nodes, and the ranks of a node per core where most share one."""
    mine = _rounded(wire.topology.node.size / len(os.sched_getaffinity(0)))
    return hosts_of(wire), max(exchange_objects(mine, wire, "tp.links.ranks_per_core"))


def _grown(
    probes: Sequence[Probe],
    lengths: Sequence[int],
    times: Sequence[float],
    samples: dict[str, list[float]],
) -> list[int]:
    """Returns lengths with which probes take long enough; drops samples of other lengths."""
    larger = [_enlarged(length, time_s) for length, time_s in zip(lengths, times, strict=False)]
    for probe, before, after in zip(probes, lengths, larger, strict=True):
        if after != before:
            samples.pop(probe.name, None)
    return larger


def _enlarged(length: int, seconds: float) -> int:
    """Returns a length with which a probe of a rate takes long enough, or at least longer."""
    if seconds >= LONG_ENOUGH_S:
        return length
    # Not straight to the length that this time promises: short messages may be a burst.
    factor = min(8.0, max(2.0, LONG_ENOUGH_S / seconds))
    return min(MOST_ELEMENTS, round(factor * length))


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


class _Round:
    """One round of some probes and of local work, in one graph.

    Eagerly each call would take longer than the messages that it is to measure.

    Args:
      wire: Collectives of the job.
      probes: Probes to time.
      work: Local work to time, by its kind.
      name: Name of the round, the same on all ranks.

    Attributes:
      probes: Probes to time.
    """

    def __init__(
        self,
        wire: Wire,
        probes: Sequence[Probe],
        work: Mapping[str, Callable[[tf.Tensor], tf.Tensor]],
        name: str,
    ) -> None:
        self.probes = probes
        self._wire, self._work, self._name = wire, work, f"tp.links.{name}"
        # Nothing in it is for AutoGraph, whose conversion takes longer than all the rest.
        self._function = tf.function(self._traced, autograph=False)
        self._vector = tf.random.stateless_normal([ELEMENTS], [1, 2])

    def __call__(self, lengths: Sequence[int]) -> list[float]:
        """Times all probes and all work, with all ranks at each of them.

        Args:
          lengths: Elements that each rank brings, for each probe.

        Returns:
          Seconds of each probe on this rank, and of each kind of work.
        """
        times, _ = self._function(tf.constant(lengths, tf.int32), self._vector)
        return [float(seconds) for seconds in times.numpy()]

    def note(self, times: Iterable[float], samples: dict[str, list[float]]) -> None:
        """Adds the times of one round.

        Args:
          times: Seconds of the slowest rank, as `__call__` orders them.
          samples: Seconds by the name of the probe, or by the kind of work.
        """
        names = [*(probe.name for probe in self.probes), *self._work]
        for name, seconds in zip(names, times, strict=True):
            samples[name].append(float(seconds))

    def _traced(self, lengths: tf.Tensor, vector: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        # Results are returned, or TensorFlow would leave out what is only waited for.
        times: list[tf.Tensor] = []
        used: list[tf.Tensor] = []
        end_s = tf.timestamp()
        for number, probe in enumerate(self.probes):
            begin_s = self._time_of_all(end_s, number, used)
            with tf.control_dependencies([begin_s]):
                used.append(self._collective(probe, lengths[number], number))
            end_s = _time_after(used[-1])
            times.append(end_s - begin_s)
        if self._work:
            # All ranks are at it at once, after they have begun together.
            end_s = self._time_of_all(end_s, len(times), used)
        for work in self._work.values():
            begin_s = end_s
            with tf.control_dependencies([begin_s]):
                used.append(work(vector))
            end_s = _time_after(used[-1])
            times.append(end_s - begin_s)
        return tf.stack(times), [tf.reshape(tensor, [-1])[:1] for tensor in used]

    def _time_of_all(self, before_s: tf.Tensor, number: int, used: list[tf.Tensor]) -> tf.Tensor:
        """Returns the time at which all ranks have come to a line, after a time of their own."""
        # A sum of what is no constant, which TensorFlow could fold.
        here = tf.reshape(tf.cast(before_s, tf.float32), [1])
        world = self._wire.topology.world
        used.append(self._wire.all_reduce(here, world, f"{self._name}.begin_{number}"))
        return _time_after(used[-1])

    def _collective(self, probe: Probe, length: tf.Tensor, number: int) -> tf.Tensor:
        name, group = f"{self._name}.{number}", probe.groups.get(self._wire.topology.rank)
        values = tf.ones(tf.reshape(length, [1]), probe.dtype)
        if group is None:
            return values[:1]
        if probe.operation == "all_reduce":
            return self._wire.all_reduce(values, group, name)
        if probe.operation == "all_gather":
            return self._wire.all_gather(values, group, name)
        share = length // group.size
        splits = [share] * (group.size - 1) + [length - share * (group.size - 1)]
        return self._wire.all_to_all(values, splits, group, name)


def _time_after(tensor: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies([tensor]):
        return tf.timestamp()


def _product(vector: tf.Tensor) -> tf.Tensor:
    factors = tf.reshape(vector[: ROWS * SIDE], [ROWS, SIDE])
    return tf.matmul(factors, factors, transpose_a=True)


def _selected(vector: tf.Tensor, pairs: int) -> tf.Tensor:
    return ops.error_feedback_top_k(tf.zeros([ELEMENTS]), vector, pairs)[0]


WORK: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    # Four vectors, as an owner adds them up.
    "sum": lambda vector: tf.reduce_sum(tf.reshape(vector, [4, -1]), 0),
    "encode": lambda vector: ops.encode(vector, "float16"),
    "select": lambda vector: _selected(vector, PAIRS[0]),
    "select_many": lambda vector: _selected(vector, PAIRS[1]),
    "multiply": _product,
}
"""Local work that is timed, by its kind."""


def estimate(
    probes: Sequence[Probe],
    samples: Mapping[str, Sequence[float]],
    topology: Topology,
    rates: Rates,
) -> Links:
    """Estimates links from measured times.

    Args:
      probes: Probes with the lengths that were timed.
      samples: Seconds of the slowest rank in each round, by the name of the probe.
      topology: The ranks of the job.
      rates: Speed of the ranks.

    Returns:
      The links.
    """
    times = {probe.name: _quantile(samples[probe.name]) for probe in probes}
    small = [probe for probe in probes if not probe.tells_rate]
    collective_s, latency_s = _latencies(small, times, topology)
    on_link_s = {
        probe.name: _seconds_of_bytes(probe, times[probe.name], collective_s, latency_s, topology)
        for probe in probes
        if probe.tells_rate
    }
    found = {
        probe.name: _rounded(probe.bytes_on(topology)[0] / on_link_s[probe.name])
        for probe in probes
        if probe.tells_rate
    }
    has_nodes, has_levels = len(topology.nodes) > 1, "rate.node" in found
    # Within nodes times scatter more, and hardly count where there are others.
    slowest = [name for name in found if name in ("rate.across", "rate.flow")] or ["rate.node"]
    across = flow = None
    if has_nodes:
        # A link is no slower than one connection, also where many short messages get in each
        # other's way.
        rate, flow = found["rate.across"], found.get("rate.flow")
        if flow is not None and flow > FLOW_MARGIN * rate:
            rate, flow = max(rate, flow), None
        across = Link(latency_s=latency_s[False], bytes_per_s=rate, flow_bytes_per_s=flow)
    half = next((probe for probe in probes if probe.name == "rate.half"), None)
    if half is not None:
        rate = found["rate.node"] if across is None else across.bytes_per_s
        half_s = _half_seconds(half, on_link_s["rate.half"], rate, topology)
        rates = replace(rates, half_s=half_s)
    return Links(
        rates=rates,
        collective_s=collective_s,
        ranks_per_node=max(len(node) for node in topology.nodes),
        device="gpu" if tf.config.list_physical_devices("GPU") else "cpu",
        node=Link(latency_s=latency_s[True], bytes_per_s=found["rate.node"])
        if has_levels
        else None,
        across=across,
        measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        # Of rates: latencies scatter more, but few choices hang on them.
        uncertainty=_rounded(max(_uncertainty(samples[name]) for name in slowest)),
    )


def _latencies(
    probes: Sequence[Probe], times: Mapping[str, float], topology: Topology
) -> tuple[float, dict[bool, float]]:
    """Returns the time of a cycle, and of a message step within nodes (`True`) and across.

    Least squares of relative errors over all small probes.
    """
    stays = [probe.bytes_on(topology)[1] for probe in probes]
    kinds = sorted(set(stays))
    rows = [
        [1.0, *(probe.steps if kind == stay else 0.0 for kind in kinds)]
        for probe, stay in zip(probes, stays, strict=True)
    ]
    seconds = np.array([times[probe.name] for probe in probes])
    found, *_ = np.linalg.lstsq(np.array(rows) / seconds[:, None], np.ones(len(probes)), rcond=None)
    collective_s, *latencies = (_rounded(max(float(value), LEAST_S)) for value in found)
    return collective_s, dict(zip(kinds, latencies, strict=True))


def _seconds_of_bytes(
    probe: Probe,
    seconds: float,
    collective_s: float,
    latency_s: Mapping[bool, float],
    topology: Topology,
) -> float:
    """Returns the seconds of a probe without its latency."""
    on_link_s = seconds - collective_s - probe.steps * latency_s[probe.bytes_on(topology)[1]]
    # Where latency is most of it, at least a tenth is left for the bytes.
    return max(on_link_s, seconds / 10)


def _half_seconds(probe: Probe, seconds: float, bytes_per_s: float, topology: Topology) -> float:
    """Returns the seconds in which Horovod adds an element in float16, in software.

    Args:
      probe: All-reduce of float16 vectors.
      seconds: Its time without latency: that of the link and of the sums, of which a part is
        hidden behind the other.
      bytes_per_s: Rate of the link.
      topology: The ranks of the job.
    """
    link_s = probe.bytes_on(topology)[0] / bytes_per_s
    sums_s = seconds - EXPOSED * link_s
    if sums_s < link_s:
        sums_s = max(0.0, seconds - link_s) / EXPOSED
    (own, *_) = probe.transfers.values()
    return _rounded(sums_s / float16_sums(own))


def _rates(samples: Mapping[str, Sequence[float]]) -> Rates:
    times = {name: _quantile(samples[name]) for name in WORK}
    return rates_of(times, ELEMENTS, PAIRS, (ROWS, SIDE))


def rates_of(
    times: Mapping[str, float],
    elements: int,
    pairs: tuple[int, int],
    product: tuple[int, int],
) -> Rates:
    """Returns the speed of a rank, from the seconds of each kind of `WORK`.

    That of sums in float16, which only an all-reduce makes, is left 0.

    Args:
      times: Seconds of each kind of work.
      elements: Elements that each of them works on, but for the product.
      pairs: Pairs of the two selections.
      product: Rows and columns of the matrix that is multiplied by itself, transposed.
    """
    sum_s, encode_s = times["sum"] / elements, times["encode"] / elements
    few, many = pairs
    pair_s = max(times["select_many"] - times["select"], 0.0) / (many - few)
    rows, columns = product
    multiply_s = max(times["multiply"] - encode_s * columns**2, LEAST_S)
    return Rates(
        sum_s=_rounded(sum_s),
        encode_s=_rounded(encode_s),
        select_s=_rounded(max(times["select"] - pair_s * few, LEAST_S) / elements),
        pair_s=_rounded(pair_s),
        half_s=0.0,
        operation_s=_rounded(multiply_s / (2.0 * rows * columns**2)),
    )


def _quantile(values: Sequence[float]) -> float:
    return float(np.percentile(values, QUANTILE))


def _uncertainty(values: Sequence[float]) -> float:
    """Returns about the standard error of a quartile, as a share of the median; 1 for too few."""
    if len(values) < FEWEST_ROUNDS:
        return 1.0
    low, middle, high = np.percentile(values, [25, 50, 75])
    return float((high - low) / middle / len(values) ** 0.5)


def _rounded(value: float) -> float:
    """Returns a number with three digits: the others would only be noise."""
    return float(f"{value:.3g}")

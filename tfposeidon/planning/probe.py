"""Measurement of a job's links, and of the speed of its ranks while all of them work."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf

from tfposeidon import ops
from tfposeidon.communication.links import CPU, Link, Links, Rates
from tfposeidon.communication.topology import Group, Topology
from tfposeidon.communication.wire import Wire, exchange_objects

BUDGET_S = 1.6
"""Seconds after which no further round begins."""
MOST_ROUNDS, GROWING_ROUNDS = 15, 3
QUANTILE = 25
"""Percentile that counts: loads of others only ever make a round longer, but a single fast one may
be a burst that a link lets through."""
SMALL_BYTES = 1024
"""Bytes of a message whose time is all latency."""
LARGE_BYTES, MOST_BYTES = 2**17, 2**25
"""Bytes of a rank's part in a collective that tells a rate: more until it takes long enough."""
LONG_ENOUGH_S = 0.03
LEAST_S = 1e-7
"""Seconds that nothing is shorter than, where noise would make a difference negative."""
FLOW_MARGIN = 0.8
"""Share of the link's rate above which a connection by itself counts as fast as the link."""
ELEMENTS, PAIRS = 2**20, 2**16
"""Elements and pairs of the local work that is timed."""
SIDE, ROWS = 512, 64
"""Sides of the matrix, and rows of the factors, of the product that is timed."""


@dataclass(frozen=True)
class Probe:
    """A collective that is timed.

    Attributes:
      name: Name of the probe, the same on all ranks.
      operation: "all_reduce", "all_gather" or "all_to_all".
      group: Ranks that carry it out with this one; `None` for ranks that take no part.
      within_node: True if the group lies in one node.
      part_bytes: Bytes that each rank of the group has.
    """

    name: str
    operation: str
    group: Group | None
    within_node: bool
    part_bytes: int

    @property
    def steps(self) -> int:
        """Messages that follow one another."""
        assert self.group is not None
        return (2 if self.operation == "all_reduce" else 1) * (self.group.size - 1)

    @property
    def sent_bytes(self) -> float:
        """Bytes that one rank sends."""
        assert self.group is not None
        p = self.group.size
        factor = {"all_reduce": 2 * (p - 1) / p, "all_gather": p - 1, "all_to_all": (p - 1) / p}
        return self.part_bytes * factor[self.operation]


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
    probes = [*small_probes(topology), *large_probes(topology)]
    timed = _Round(wire, probes)
    sizes, samples = [probe.part_bytes for probe in probes], []
    for number in range(MOST_ROUNDS):
        times = timed(sizes)
        mine = [time.perf_counter() - begin_s, times]
        everybody = exchange_objects(mine, wire, f"tp.links.round_{number}")
        slowest = [max(ranks) for ranks in zip(*(found for _, found in everybody), strict=True)]
        is_late = everybody[0][0] > budget_s
        larger = [
            _enlarged(probe, size, seconds)
            for probe, size, seconds in zip(probes, sizes, slowest, strict=False)
        ]
        # The first round is slow on all ranks, and tells sizes at most.
        if number and (number >= GROWING_ROUNDS or is_late or larger == sizes):
            samples.append(slowest)
        if is_late and number:
            break
        sizes = sizes if samples else larger
    names = [*(probe.name for probe in probes), *WORK]
    by_name = dict(zip(names, zip(*samples, strict=True), strict=True))
    known = [replace(probe, part_bytes=size) for probe, size in zip(probes, sizes, strict=True)]
    links = estimate(probes_on_largest_node(known, topology), by_name, topology, _rates(by_name))
    # All plan by the same figures, to the last bit, also where processors differ.
    agreed = exchange_objects(links.to_json(), wire, "tp.links.agreed")[0]
    return Links.from_json(agreed, "rank 0")


def _enlarged(probe: Probe, size_bytes: int, seconds: float) -> int:
    """Returns bytes with which a probe of a rate takes long enough, or at least longer."""
    if not probe.name.startswith("rate.") or seconds >= LONG_ENOUGH_S:
        return size_bytes
    # Not straight to the size that this time promises: short messages may be a burst.
    factor = min(8.0, max(2.0, LONG_ENOUGH_S / seconds))
    return min(MOST_BYTES, 4 * round(factor * size_bytes / 4))


def probes_on_largest_node(probes: Sequence[Probe], topology: Topology) -> list[Probe]:
    """Returns the probes as the first rank of the largest node takes part in them: in all.

    Args:
      probes: Probes as any rank takes part in them.
      topology: The ranks of the job.
    """
    largest = max(topology.nodes, key=len)
    seen = topology.seen_from(largest[0])
    own = {probe.name: probe for probe in (*small_probes(seen), *large_probes(seen))}
    return [replace(own[probe.name], part_bytes=probe.part_bytes) for probe in probes]


def small_probes(topology: Topology) -> list[Probe]:
    """Returns the probes that tell latencies: as many as there are unknowns.

    Args:
      topology: Topology of the job, as the rank sees it that carries them out.
    """
    is_one_node = len(topology.nodes) == 1
    kinds = [("all_reduce", topology.world), ("all_gather", topology.world)]
    found = [
        Probe(f"{operation}.world", operation, group, is_one_node, SMALL_BYTES)
        for operation, group in kinds
    ]
    if not is_one_node and max(len(node) for node in topology.nodes) > 1:
        found.append(Probe("all_gather.node", "all_gather", topology.node, True, SMALL_BYTES))
    return found


def large_probes(topology: Topology) -> list[Probe]:
    """Returns the probes that tell rates: of the link within the node, of that across, of a flow.

    Args:
      topology: Topology of the job, as the rank sees it that carries them out.
    """
    found = []
    if max(len(node) for node in topology.nodes) > 1:
        found.append(Probe("rate.node", "all_gather", topology.node, True, LARGE_BYTES))
    if len(topology.nodes) > 1:
        # An all-to-all has as many connections as there are, a ring over one position has one.
        found.append(Probe("rate.across", "all_to_all", topology.world, False, LARGE_BYTES))
        if topology.size > 2:
            alone = topology.across if topology.position == 0 else None
            found.append(Probe("rate.flow", "all_gather", alone, False, LARGE_BYTES))
    return found


class _Round:
    """One round of all probes and of all local work, in one graph.

    Eagerly each call would take longer than the messages that it is to measure.

    Args:
      wire: Collectives of the job.
      probes: Probes as this rank takes part in them.
    """

    def __init__(self, wire: Wire, probes: Sequence[Probe]) -> None:
        self._wire = wire
        self._probes = probes
        # Nothing in it is for AutoGraph, whose conversion takes longer than all the rest.
        self._function = tf.function(self._traced, autograph=False)
        self._vector = tf.random.stateless_normal([ELEMENTS], [1, 2])

    def __call__(self, sizes_bytes: Sequence[int]) -> list[float]:
        """Times all probes and all work, with all ranks at each of them.

        Args:
          sizes_bytes: Bytes that each rank of a probe's group has, for each probe.

        Returns:
          Seconds of each probe on this rank, and of each kind of work.
        """
        lengths = tf.constant([size // 4 for size in sizes_bytes], tf.int32)
        times, _ = self._function(lengths, self._vector)
        return [float(seconds) for seconds in times.numpy()]

    def _traced(self, lengths: tf.Tensor, vector: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        # Results are returned, or TensorFlow would leave out what is only waited for.
        times: list[tf.Tensor] = []
        used: list[tf.Tensor] = []
        end_s = tf.timestamp()
        for number, probe in enumerate(self._probes):
            begin_s = self._time_of_all(end_s, number, used)
            with tf.control_dependencies([begin_s]):
                used.append(self._collective(probe, lengths[number], number))
            end_s = _time_after(used[-1])
            times.append(end_s - begin_s)
        # All ranks are at it at once, after they have begun together.
        end_s = self._time_of_all(end_s, len(times), used)
        for work in WORK.values():
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
        used.append(self._wire.all_reduce(here, world, f"tp.links.begin_{number}"))
        return _time_after(used[-1])

    def _collective(self, probe: Probe, length: tf.Tensor, number: int) -> tf.Tensor:
        name, group = f"tp.links.{number}", probe.group
        values = tf.ones(tf.reshape(length, [1]))
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


def _scattered(vector: tf.Tensor) -> tf.Tensor:
    indices = tf.range(0, ELEMENTS, ELEMENTS // PAIRS, tf.int32)
    return ops.scatter_add(vector[:PAIRS], indices, ELEMENTS)


WORK: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    # Four vectors, as an owner adds them up.
    "sum": lambda vector: tf.reduce_sum(tf.reshape(vector, [4, -1]), 0),
    "encode": lambda vector: ops.encode(vector, "float16"),
    "select": lambda vector: ops.error_feedback_top_k(tf.zeros([ELEMENTS]), vector, PAIRS)[0],
    "scatter": _scattered,
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
      probes: Probes as rank 0 takes part in them.
      samples: Seconds of the slowest rank in each round, by the name of the probe.
      topology: The ranks of the job.
      rates: Speed of the ranks.

    Returns:
      The links.
    """
    times = {probe.name: _quantile(samples[probe.name]) for probe in probes}
    collective_s, latency_s = _latencies(probes, times)
    found = {
        probe.name: _rate(probe, times[probe.name], collective_s, latency_s, topology)
        for probe in probes
        if probe.name.startswith("rate.")
    }
    has_nodes, has_levels = len(topology.nodes) > 1, "rate.node" in found
    across = flow = None
    if has_nodes:
        flow = found.get("rate.flow")
        if flow is not None and flow > FLOW_MARGIN * found["rate.across"]:
            flow = None
        across = Link(
            latency_s=latency_s[False], bytes_per_s=found["rate.across"], flow_bytes_per_s=flow
        )
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
        spread=_rounded(max(_spread(samples[p.name]) for p in probes)),
    )


def _latencies(
    probes: Sequence[Probe], times: Mapping[str, float]
) -> tuple[float, dict[bool, float]]:
    """Returns the time of a cycle, and of a message step within nodes (`True`) and across.

    Least squares of relative errors over all small probes.
    """
    small = [probe for probe in probes if not probe.name.startswith("rate.")]
    kinds = sorted({probe.within_node for probe in small})
    rows = [
        [1.0, *(probe.steps if probe.within_node == kind else 0.0 for kind in kinds)]
        for probe in small
    ]
    seconds = np.array([times[probe.name] for probe in small])
    found, *_ = np.linalg.lstsq(np.array(rows) / seconds[:, None], np.ones(len(small)), rcond=None)
    collective_s, *latencies = (_rounded(max(float(value), LEAST_S)) for value in found)
    return collective_s, dict(zip(kinds, latencies, strict=True))


def _rate(
    probe: Probe,
    seconds: float,
    collective_s: float,
    latency_s: Mapping[bool, float],
    topology: Topology,
) -> float:
    """Returns bytes per second: of a rank within its node, of a node or of one flow across."""
    on_link_s = seconds - collective_s - probe.steps * latency_s[probe.within_node]
    # Where latency is most of it, at least a tenth is left for the bytes.
    on_link_s = max(on_link_s, seconds / 10)
    sent_bytes = probe.sent_bytes
    if probe.name == "rate.across":
        # What all ranks of a node send to those of others.
        node = max(len(node) for node in topology.nodes)
        sent_bytes = node * probe.part_bytes * (topology.size - node) / topology.size
    return _rounded(sent_bytes / on_link_s)


def _rates(samples: Mapping[str, Sequence[float]]) -> Rates:
    times = {name: _quantile(samples[name]) for name in WORK}
    rates = rates_of(times, ELEMENTS, PAIRS, 2.0 * ROWS * SIDE * SIDE)
    if tf.config.list_physical_devices("GPU"):
        # NCCL sums as it sends.
        return replace(rates, half_s=0.0)
    return rates


def rates_of(times: Mapping[str, float], elements: int, pairs: int, operations: float) -> Rates:
    """Returns the speed of a rank, from the seconds of each kind of `WORK`.

    Horovod's sums in float16 cannot be timed by themselves: they are taken to be as much slower
    than on a quiet CPU as other sums are.

    Args:
      times: Seconds of each kind of work.
      elements: Elements that each of them works on.
      pairs: Pairs that are selected or scattered.
      operations: Floating-point operations of the product.
    """
    sum_s, encode_s = times["sum"] / elements, times["encode"] / elements
    pair_s = max(times["scatter"] - times["encode"], LEAST_S) / pairs
    return Rates(
        sum_s=_rounded(sum_s),
        encode_s=_rounded(encode_s),
        select_s=_rounded(max(times["select"] - pair_s * pairs, LEAST_S) / elements),
        pair_s=_rounded(pair_s),
        half_s=_rounded(CPU.half_s * max(1.0, sum_s / CPU.sum_s)),
        operation_s=_rounded(times["multiply"] / operations),
    )


def _quantile(values: Sequence[float]) -> float:
    return float(np.percentile(values, QUANTILE))


def _spread(values: Sequence[float]) -> float:
    """Returns the distance of the quartiles, as a share of the median."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return float((high - low) / middle)


def _rounded(value: float) -> float:
    """Returns a number with three digits: the others would only be noise."""
    return float(f"{value:.3g}")

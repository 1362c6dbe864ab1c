"""Estimate of a job's links, and of the speed of its ranks, from measured times."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import tensorflow as tf

from tfposeidon.communication.network_profile import Link, NetworkProfile, Rates
from tfposeidon.communication.topology import Topology
from tfposeidon.planning.probes import Probe
from tfposeidon.planning.seconds import EXPOSED, float16_sums

QUANTILE = 25
"""Percentile that counts: loads of others only ever make a round longer, but a single fast one may
be a burst that a link lets through."""
FEWEST_ROUNDS = 2
"""Rounds without which nothing is known about how much times scatter."""
LEAST_S = 1e-7
"""Seconds that nothing is shorter than, where noise would make a difference negative."""
FLOW_MARGIN = 0.8
"""Share of the link's rate above which a connection by itself counts as fast as the link."""


def estimate_links(
    probes: Sequence[Probe],
    samples: Mapping[str, Sequence[float]],
    topology: Topology,
    rates: Rates,
) -> NetworkProfile:
    """Estimates links from measured times.

    Args:
      probes: Probes with the lengths that were timed.
      samples: Seconds of the slowest rank in each round, by the name of the probe.
      topology: The ranks of the job.
      rates: Speed of the ranks.

    Returns:
      The links.
    """
    times = {probe.name: quantile(samples[probe.name]) for probe in probes}
    small = [probe for probe in probes if not probe.tells_rate]
    collective_s, latency_s = _latencies(small, times, topology)
    on_link_s = {
        probe.name: _seconds_of_bytes(probe, times[probe.name], collective_s, latency_s, topology)
        for probe in probes
        if probe.tells_rate
    }
    found = {
        probe.name: rounded(probe.bytes_on(topology)[0] / on_link_s[probe.name])
        for probe in probes
        if probe.tells_rate
    }
    has_nodes, has_levels = len(topology.nodes) > 1, "rate.node" in found
    across = None
    # Probes whose rates count. Within nodes times scatter more, and hardly count beside others.
    counts = ["rate.node"]
    if has_nodes:
        counts = [name for name in ("rate.across", "rate.flow") if name in found]
        rate, flow = found["rate.across"], found.get("rate.flow")
        if flow is not None and flow > FLOW_MARGIN * rate:
            # A link is no slower than one connection, also where many short messages get in each
            # other's way.
            counts = [max(counts, key=found.__getitem__)]
            rate, flow = found[counts[0]], None
        across = Link(latency_s=latency_s[False], bytes_per_s=rate, flow_bytes_per_s=flow)
    half = next((probe for probe in probes if probe.name == "rate.half"), None)
    if half is not None:
        rate = found["rate.node"] if across is None else across.bytes_per_s
        half_s = half_seconds(half, on_link_s["rate.half"], rate, topology)
        rates = replace(rates, half_s=half_s)
    return NetworkProfile(
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
        uncertainty=rounded(max(_uncertainty(samples[name]) for name in counts)),
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
    collective_s, *latencies = (rounded(max(float(value), LEAST_S)) for value in found)
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


def half_seconds(probe: Probe, seconds: float, bytes_per_s: float, topology: Topology) -> float:
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
    return rounded(sums_s / float16_sums(own))


def rates_of(
    times: Mapping[str, float],
    elements: int,
    pairs: tuple[int, int],
    product: tuple[int, int],
) -> Rates:
    """Returns the speed of a rank, from the seconds of each kind of local work.

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
        sum_s=rounded(sum_s),
        encode_s=rounded(encode_s),
        select_s=rounded(max(times["select"] - pair_s * few, LEAST_S) / elements),
        pair_s=rounded(pair_s),
        half_s=0.0,
        operation_s=rounded(multiply_s / (2.0 * rows * columns**2)),
    )


def quantile(values: Sequence[float]) -> float:
    """Returns the one of some times that counts.

    Args:
      values: Seconds of each round.
    """
    return float(np.percentile(values, QUANTILE))


def _uncertainty(values: Sequence[float]) -> float:
    """Returns about the standard error of a quartile, as a share of the median; 1 for too few.

    By the faster half of the times: the others may hold a packet that was lost and sent again after
    a fifth of a second, which says nothing about the quartile.
    """
    if len(values) < FEWEST_ROUNDS:
        return 1.0
    low, middle = np.percentile(values, [QUANTILE, 50])
    return float(2.0 * (middle - low) / middle / len(values) ** 0.5)


def rounded(value: float) -> float:
    """Returns a number with three digits: the others would only be noise.

    Args:
      value: Any measured number.
    """
    return float(f"{value:.3g}")

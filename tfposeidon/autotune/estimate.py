"""Fits a network profile, and the compute throughput of ranks, to measured times.

Short probes determine latencies by least squares. Subtracting these from long probes yields
bandwidths.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import tensorflow as tf

from tfposeidon.autotune.probes import Probe
from tfposeidon.autotune.seconds import EXPOSED, float16_sums
from tfposeidon.communication.network_profile import Link, NetworkProfile, Rates
from tfposeidon.communication.topology import Topology

QUANTILE = 25
"""Percentile that represents a probe: load of other processes only prolongs a round, but a single
fast round may be a burst that the network lets through."""
FEWEST_ROUNDS = 2
"""Minimum number of rounds to estimate the variation of times."""
LEAST_S = 1e-7
"""Minimum of an estimate in seconds, for differences that noise makes negative."""
FLOW_MARGIN = 0.8
"""Share of the network's bandwidth above which a single connection counts as equally fast."""


def estimate_links(
    probes: Sequence[Probe],
    samples: Mapping[str, Sequence[float]],
    topology: Topology,
    rates: Rates,
) -> NetworkProfile:
    """Fits a network profile to the seconds of the slowest rank in each round, by probe name."""
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
    # Probes whose uncertainty counts. Times within nodes vary more, and hardly matter compared with
    # the network.
    counts = ["rate.node"]
    if has_nodes:
        counts = [name for name in ("rate.across", "rate.flow") if name in found]
        rate, flow = found["rate.across"], found.get("rate.flow")
        if flow is not None and flow > FLOW_MARGIN * rate:
            # The network is at least as fast as one connection, also if many short messages
            # interfere.
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
        # Use the uncertainty of bandwidths: latencies vary more, but few choices depend on them.
        uncertainty=rounded(max(_uncertainty(samples[name]) for name in counts)),
    )


def _latencies(
    probes: Sequence[Probe], times: Mapping[str, float], topology: Topology
) -> tuple[float, dict[bool, float]]:
    """Returns the time of a cycle, and of a message step within nodes (`True`) and across.

    It minimizes the squares of relative errors over all small probes.
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
    # If latency dominates, leave at least a tenth for the bytes.
    return max(on_link_s, seconds / 10)


def half_seconds(probe: Probe, seconds: float, bytes_per_s: float, topology: Topology) -> float:
    """Returns the seconds per element of Horovod's float16 sums, which run in software."""
    link_s = probe.bytes_on(topology)[0] / bytes_per_s
    # Transfers and local sums overlap: a fraction `EXPOSED` of the shorter one adds to the total.
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
    """Returns a rank's compute throughput from the seconds of each kind of local work."""
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
        # Only an all-reduce sums in float16; see `half_seconds`.
        half_s=0.0,
        operation_s=rounded(multiply_s / (2.0 * rows * columns**2)),
    )


def quantile(values: Sequence[float]) -> float:
    """Returns the quantile of a probe's seconds that represents it."""
    return float(np.percentile(values, QUANTILE))


def _uncertainty(values: Sequence[float]) -> float:
    """Returns the approximate standard error of the quartile over the median; 1 if unknown.

    It uses the faster half of the times. The others may include a packet that was lost and sent
    again after a fifth of a second, which does not affect the quartile.
    """
    if len(values) < FEWEST_ROUNDS:
        return 1.0
    low, middle = np.percentile(values, [QUANTILE, 50])
    return float(2.0 * (middle - low) / middle / len(values) ** 0.5)


def rounded(value: float) -> float:
    """Returns a number rounded to three digits: further digits of a measurement are noise."""
    return float(f"{value:.3g}")

"""Tests the fit of network profiles to computed times of probes."""

import dataclasses
import random

import pytest

from tfposeidon.autotune import measurement
from tfposeidon.autotune.measurement import probes_of
from tfposeidon.autotune.simulation import float16_sums
from tfposeidon.communication.network_profile import CPU
from tfposeidon.communication.topology import Topology

LAYOUTS = {
    "1x2": Topology.regular(0, 2, 2),
    "2x1": Topology.regular(0, 2, 1),
    "4x1": Topology.regular(0, 4, 1),
    "2x2": Topology.regular(0, 4, 2),
    "2+1": Topology(0, ((0, 1), (2,))),
    "1+2": Topology(1, ((0,), (1, 2))),
    "4x4": Topology.regular(0, 16, 4),
}
COLLECTIVE_S, LATENCY_S = 3e-3, {True: 1e-4, False: 4e-4}
NODE, ACROSS, FLOW = 1.5e9, 1.2e8, 3e7
HALF_S = 4e-8


def _probes(topology):
    found = probes_of(topology)
    return [dataclasses.replace(p, length=2**22) if p.tells_rate else p for p in found]


def _seconds(one, topology, flow=FLOW):
    """Returns the seconds of a probe on a network with the latencies and rates above."""
    sent_bytes, stays = one.bytes_on(topology)
    rate = NODE if stays else flow if one.name == "rate.flow" else ACROSS
    link_s, sums_s = sent_bytes / rate, HALF_S * float16_sums(one.transfers[0])
    return COLLECTIVE_S + one.steps * LATENCY_S[stays] + max(link_s, sums_s)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_of_probes_equal_those_computed_by_hand(layout):
    """Nodes send their parts to all other ranks, and a ring forwards all parts but one."""
    topology = LAYOUTS[layout]
    largest = max(map(len, topology.nodes))
    others, nodes = topology.size - largest, len(topology.nodes)
    by_hand = {
        "rate.half": (2 * (topology.size - 1) / topology.size * 2 * 2**22, nodes == 1),
        "rate.node": ((largest - 1) * 4 * 2**22, True),
        "rate.across": (largest * others / topology.size * 4 * 2**22, False),
        "rate.flow": ((nodes - 1) * 4 * 2**22, False),
    }
    for one in _probes(topology):
        if one.tells_rate:
            sent_bytes, stays = one.bytes_on(topology)
            assert stays == by_hand[one.name][1]
            assert sent_bytes == pytest.approx(by_hand[one.name][0], rel=1e-6)


@pytest.mark.parametrize("load", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_fit_recovers_rates_and_latencies(layout, load):
    """Rates are within 10 % and latencies within 25 %. Under load, rates are within 20 %."""
    topology, rng = LAYOUTS[layout], random.Random(1)

    def samples(seconds):
        # Load makes some of the rounds up to three times as long.
        return [
            seconds * (1 + 0.02 * rng.random() + (rng.random() < load) * 2 * rng.random())
            for _ in range(11)
        ]

    probes = _probes(topology)
    times = {one.name: samples(_seconds(one, topology)) for one in probes}
    links = measurement.estimate_links(probes, times, topology, CPU)
    rates, latencies = {}, {}
    if len(topology.nodes) > 1:
        rates["across"] = (links.across.bytes_per_s, ACROSS)
        latencies["across"] = (links.across.latency_s, LATENCY_S[False])
    if links.across and links.across.flow_bytes_per_s:
        rates["flow"] = (links.across.flow_bytes_per_s, FLOW)
    if links.node:
        rates["node"] = (links.node.bytes_per_s, NODE)
    for name, (found, there) in rates.items():
        assert found == pytest.approx(there, rel=0.20 if load else 0.10), name
    if not load and len(topology.nodes) > 2:
        for name, (found, there) in latencies.items():
            assert found == pytest.approx(there, rel=0.25), name
    assert links.rates.half_s == pytest.approx(HALF_S, rel=0.25 if load else 0.15)
    links.check_fits(topology)


def test_float16_sums_that_a_transfer_hides_cost_nothing():
    topology = LAYOUTS["4x1"]
    probes = _probes(topology)
    (half,) = (one for one in probes if one.name == "rate.half")
    times = {one.name: [_seconds(one, topology)] * 3 for one in probes}
    assert measurement.estimate_links(probes, times, topology, CPU).rates.half_s > 0.0
    link_s = half.bytes_on(topology)[0] / ACROSS
    hidden_s = COLLECTIVE_S + half.steps * LATENCY_S[False] + 0.99 * link_s
    times["rate.half"] = [hidden_s] * 3
    rates = dataclasses.replace(CPU, half_s=0.0)
    assert measurement.estimate_links(probes, times, topology, rates).rates.half_s == 0.0


def test_the_fit_recovers_rates_of_work():
    made = dataclasses.replace(CPU, half_s=0.0)
    n, few, many, rows, side = 2**20, 2**10, 2**16, 32, 512
    times = {
        "sum": made.sum_s * n,
        "encode": made.encode_s * n,
        "select": made.select_s * n + made.pair_s * few,
        "select_many": made.select_s * n + made.pair_s * many,
        "multiply": (made.encode_s + made.operation_s * 2 * rows) * side**2,
    }
    found = measurement.rates_of(times, n, (few, many), (rows, side))
    expected = pytest.approx(dataclasses.asdict(made), rel=0.01, abs=0)
    assert dataclasses.asdict(found) == expected


def test_a_connection_as_fast_as_its_link_has_no_limit():
    topology = LAYOUTS["2x2"]
    probes = _probes(topology)
    times = {one.name: [_seconds(one, topology)] * 3 for one in probes}
    limited = measurement.estimate_links(probes, times, topology, CPU).across
    assert limited.flow_bytes_per_s == pytest.approx(FLOW, rel=0.01)
    (flow,) = (p for p in probes if p.name == "rate.flow")
    times["rate.flow"] = [_seconds(flow, topology, flow=ACROSS)] * 3
    assert measurement.estimate_links(probes, times, topology, CPU).across.flow_bytes_per_s is None


@pytest.mark.parametrize("name", ["rate.across", "rate.flow"])
def test_a_retransmitted_packet_does_not_increase_the_uncertainty(name):
    """TCP retransmits a lost packet after 200 ms, which lengthens one round of many."""
    topology = LAYOUTS["2x2"]
    probes = _probes(topology)
    (flow,) = (p for p in probes if p.name == "rate.flow")
    times = {one.name: [_seconds(one, topology)] * 4 for one in probes}
    times["rate.flow"] = [_seconds(flow, topology, flow=ACROSS)] * 4
    times[name] = [times[name][0] + 0.2, *times[name][1:]]
    links = measurement.estimate_links(probes, times, topology, CPU)
    assert links.across.bytes_per_s == pytest.approx(ACROSS, rel=0.01)
    assert links.uncertainty < 0.25


def test_uncertainty_refers_to_the_limiting_rate():
    """If connections have no limit, one of the two probes determines the rate."""
    topology = LAYOUTS["2x2"]
    probes = _probes(topology)
    (flow,) = (p for p in probes if p.name == "rate.flow")
    times = {one.name: [_seconds(one, topology)] * 2 for one in probes}
    times["rate.flow"] = [_seconds(flow, topology, flow=ACROSS)] * 2
    times["rate.across"] = [times["rate.across"][0], 5 * times["rate.across"][0]]
    assert measurement.estimate_links(probes, times, topology, CPU).uncertainty < 0.25
    # If connections have a limit, both probes determine the rate.
    times["rate.flow"] = [_seconds(flow, topology) * 8] * 2
    assert measurement.estimate_links(probes, times, topology, CPU).uncertainty > 0.25

"""Predicted seconds of exchanges follow laws that hold for any network profile."""

import dataclasses

import pytest

from benchmarks.baselines import FactorServer
from tests import contract
from tests.helpers.automatic import exchange_seconds
from tfposeidon import schemes
from tfposeidon.autotune.simulation import (
    load_of,
    stage_times,
    work_seconds,
)
from tfposeidon.communication.network_profile import CPU, Link, NetworkProfile, Rates
from tfposeidon.communication.topology import Topology
from tfposeidon.factors.pairs import FactorShape
from tfposeidon.schemes.stages import Transfer, Work

LINKS = NetworkProfile.of("1gbit", ranks_per_node=2)
NOTHING = Rates(sum_s=0, encode_s=0, select_s=0, pair_s=0, half_s=0, operation_s=0)
FACTORS = FactorShape(rows=32, left=512, right=256, dtype="float32")
LAYOUTS = {
    "2x1": Topology.regular(0, 2, 1),
    "2x2": Topology.regular(0, 4, 2),
    "2+1": Topology(0, ((0, 1), (2,))),
    "interleaved": Topology(0, ((0, 2), (1, 3))),
    "4x4": Topology.regular(0, 16, 4),
}
SCHEMES = {name: scheme for name, (scheme, _) in contract.SCHEMES.items()} | {
    "factors": schemes.Factors(),
    "one server": FactorServer(server=1),
}


def _seconds(scheme, topology, links, length=2**18):
    is_factors = scheme.reader is not None
    length = FACTORS.left * FACTORS.right if is_factors else length
    return exchange_seconds(scheme, length, 4, [FACTORS] if is_factors else [], topology, links)


def _with_across(links, **changes):
    return dataclasses.replace(links, across=dataclasses.replace(links.across, **changes))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SCHEMES)
def test_faster_links_never_predict_slower_steps(name, layout):
    scheme, topology = SCHEMES[name], LAYOUTS[layout]
    now = _seconds(scheme, topology, LINKS)
    across = LINKS.across
    for better in (
        _with_across(LINKS, bytes_per_s=2 * across.bytes_per_s),
        _with_across(LINKS, latency_s=across.latency_s / 2),
        dataclasses.replace(LINKS, collective_s=0.0),
        dataclasses.replace(LINKS, rates=NOTHING),
        dataclasses.replace(LINKS, node=dataclasses.replace(LINKS.node, bytes_per_s=1e12)),
    ):
        assert _seconds(scheme, topology, better) <= now
    limited = _with_across(LINKS, flow_bytes_per_s=across.bytes_per_s / 10)
    assert _seconds(scheme, topology, limited) >= now


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SCHEMES)
def test_predicted_seconds_scale_with_rates_and_latencies(name, layout):
    """Ten times the rates and a tenth of the latencies reduce the time to a tenth."""
    tenth = NetworkProfile(
        rates=Rates(**{k: v / 10 for k, v in dataclasses.asdict(CPU).items()}),
        collective_s=LINKS.collective_s / 10,
        ranks_per_node=2,
        device="cpu",
        **{
            part: Link(latency_s=link.latency_s / 10, bytes_per_s=link.bytes_per_s * 10)
            for part, link in (("node", LINKS.node), ("across", LINKS.across))
        },
    )
    scheme, topology = SCHEMES[name], LAYOUTS[layout]
    expected = _seconds(scheme, topology, LINKS) / 10
    assert _seconds(scheme, topology, tenth) == pytest.approx(expected)


@pytest.mark.parametrize("name", SCHEMES)
def test_all_ranks_predict_the_same_seconds(name):
    for topology in LAYOUTS.values():
        found = {
            _seconds(SCHEMES[name], topology.seen_from(rank), LINKS)
            for rank in range(topology.size)
        }
        assert len(found) == 1


def test_a_single_node_needs_no_link_between_nodes():
    node = dataclasses.replace(LINKS, across=None)
    for scheme in SCHEMES.values():
        alone = Topology.regular(0, 2, 2)
        assert _seconds(scheme, alone, node) == _seconds(scheme, alone, LINKS)


def test_nodes_of_one_rank_never_use_the_link_within_nodes():
    """In a ring of two nodes of one rank, the much faster link within nodes has no effect."""
    fast = dataclasses.replace(LINKS, node=Link(latency_s=0, bytes_per_s=1e12), rates=NOTHING)
    seconds = _seconds(schemes.AllReduce(), LAYOUTS["2x1"], fast)
    across = LINKS.across
    expected = LINKS.collective_s + 2 * across.latency_s + 4 * 2**18 / across.bytes_per_s
    assert seconds == pytest.approx(expected)


def test_factors_without_rows_cross_nodes_by_their_link():
    """The bytes of the factors are unknown, and nodes of one rank have no internal link."""
    unknown = dataclasses.replace(FACTORS, rows=None)
    links = dataclasses.replace(LINKS, node=None, ranks_per_node=1)
    (gather, _) = stage_times(schemes.Factors(), 2**17, 4, (unknown,), LAYOUTS["2x1"], links)
    assert gather.latency_s == links.across.latency_s


def test_a_limit_per_connection_slows_the_ring_and_not_the_torus():
    """A ring uses one connection between nodes; a torus uses one for each rank of a node."""
    topology = Topology.regular(0, 32, 8)
    free = NetworkProfile.of("25gbit", ranks_per_node=8, device="v100")
    limited = NetworkProfile.of("25gbit", ranks_per_node=8, device="v100", flow="5gbit")

    def seconds(scheme, links):
        return exchange_seconds(scheme, 2**24, 4, [], topology, links)

    ring, torus = schemes.AllReduce(), schemes.Torus2D()
    assert seconds(ring, limited) > 3 * seconds(ring, free)
    assert seconds(torus, limited) == seconds(torus, free)


def test_the_server_of_a_matrix_is_the_busiest_node():
    """The server receives the factors of all other ranks."""
    topology = Topology.regular(0, 4, 1)
    push = {
        rank: next(
            stage
            for stage in FactorServer(server=1).factor_stages(FACTORS, topology.seen_from(rank))
            if isinstance(stage, Transfer)
        )
        for rank in range(4)
    }
    assert load_of(push, topology).cross_bytes == 3 * FACTORS.bytes
    assert load_of(push, topology).flow_bytes == FACTORS.bytes


def test_transfers_of_a_node_share_its_link():
    """Both ranks of a node gather across nodes at the same time."""
    topology = Topology.regular(0, 4, 2)
    gathers = {
        rank: Transfer(
            name="",
            operation="all_gather",
            group=topology.seen_from(rank).across,
            parts_bytes=(100.0, 100.0),
        )
        for rank in range(4)
    }
    load = load_of(gathers, topology)
    assert (load.cross_bytes, load.flow_bytes, load.node_bytes) == (200.0, 100.0, 0.0)


@pytest.mark.parametrize("name", contract.SCHEMES)
def test_one_node_suffices_if_all_nodes_are_equal(name):
    """The stages of one node give the same time as those of all ranks."""
    scheme, topology = SCHEMES[name], Topology.regular(0, 12, 4)
    whole = type("Whole", (type(scheme),), {"loads_evenly": False, "name": scheme.name})
    every = whole(**{f.name: getattr(scheme, f.name) for f in dataclasses.fields(scheme)})
    links = NetworkProfile.of("1gbit", ranks_per_node=4)
    # Shards differ by one element, so the bytes of nodes differ slightly.
    assert exchange_seconds(every, 400_001, 4, (), topology, links) == pytest.approx(
        exchange_seconds(scheme, 400_001, 4, (), topology, links), rel=1e-4
    )


def test_processing_overlaps_a_transfer():
    """The CPU processes bytes within a node while the network transfers bytes between nodes."""
    topology = Topology.regular(0, 4, 2)
    links = dataclasses.replace(LINKS, rates=NOTHING)
    (ring,) = stage_times(schemes.AllReduce(), 2**20, 4, (), topology, links)
    on_link = 1.5 * 2**22 / links.across.bytes_per_s
    in_node = 1.5 * 2**22 / links.node.bytes_per_s
    assert ring.load_s == pytest.approx(max(on_link, in_node))
    assert ring.latency_s == pytest.approx(6 * links.across.latency_s)


def test_each_kind_of_work_has_its_rates():
    rates = Rates(sum_s=1, encode_s=10, select_s=100, pair_s=1e3, half_s=1e4, operation_s=1e5)
    summed = 2
    for kind, seconds in (
        ("sum", 3 + summed),
        ("encode", 30 + summed),
        ("select", 300 + 2 * 1e3),
        ("scatter", 30 + summed),
        ("multiply", 30 + summed + 5 * 1e5),
    ):
        work = Work(name="", kind=kind, elements=3, pairs=2, operations=5)
        assert work_seconds(work, rates) == seconds, kind

"""Plans: order, buckets, bytes, and what they print."""

import dataclasses
import json

import numpy as np
import pytest

from tfposeidon import coordinator, policies, schemes
from tfposeidon.gradient import Description
from tfposeidon.sufficient_factors import FactorShape
from tfposeidon.topology import Topology

LAYERS = [
    Description(f"layer_{i}/{part}", shape, "float32")
    for i in range(6)
    for part, shape in (("kernel", (32, 32)), ("bias", (32,)))
]
CLUSTER = Topology.regular(0, 128, 8)


def _plan(bucket_bytes, scheme="2dtar", topology=CLUSTER, descriptions=LAYERS):
    return coordinator.plan(descriptions, policies.parse(scheme), topology, bucket_bytes)


@pytest.mark.parametrize("bucket_bytes", [0, 4096, 4224, 10_000, 20_000, 10**9])
def test_last_variables_first_and_each_once(bucket_bytes):
    buckets = _plan(bucket_bytes).buckets
    assert sorted(m for b in buckets for m in b.members) == list(range(len(LAYERS)))
    assert all(list(b.members) == sorted(b.members, reverse=True) for b in buckets)
    complete = [min(b.members) for b in buckets]
    assert complete == sorted(complete, reverse=True), "a bucket must not stand before one that is complete earlier"
    assert all(b.bytes <= bucket_bytes or len(b.members) == 1 for b in buckets)


def test_large_variables_go_by_themselves():
    buckets = _plan(4096 * 4).buckets
    assert [len(b.members) for b in buckets] == [1, 1, 1, 1, 1, 6, 1]
    assert {d.shape for d in buckets[-2].descriptions} == {(32,)}


def test_bucket_sizes():
    assert len(_plan(0).buckets) == 12
    assert len(_plan(4224 * 4).buckets) == 2
    assert len(_plan(10**9).buckets) == 1


def test_dtypes_are_not_mixed():
    halves = [*LAYERS, Description("half/kernel", (8,), "float16")]
    assert [b.dtype for b in _plan(10**9, descriptions=halves).buckets] == ["float16", "float32"]


def test_bytes_of_16_nodes_of_8():
    cost = _plan(10**9).cost
    size = 6 * (32 * 32 + 32) * 4
    assert cost.node_bytes == pytest.approx(2 * size * 7 / 8)
    assert cost.cross_bytes == pytest.approx(2 * size * 15 / 128, rel=1e-3)


def test_plan_prints_a_table():
    text = str(_plan(4224 * 6, [("layer_5", "asa16"), ("layer", "allreduce")]))
    assert "128 rank(s) on 16 node(s) (16 x 8)" in text
    lines = text.splitlines()
    assert lines[2].split()[:5] == ["0", "layer_5/bias", "32", "float32", "asa(wire_dtype=float16)"]
    assert "rule 'layer_5'" in lines[2]
    assert lines[3].split() == ["layer_5/kernel", "32x32", "float32"]


def test_plan_as_json():
    content = json.loads(_plan(4224 * 6).to_json())
    first = content["buckets"][0]
    assert first["scheme"] == "2dtar"
    assert first["variables"][:2] == [
        {"path": "layer_5/bias", "shape": [32]},
        {"path": "layer_5/kernel", "shape": [32, 32]},
    ]
    assert first["cost"]["cross_bytes"] > 0
    assert len(content["nodes"]) == 16


def test_auto_says_what_it_means():
    assert "auto means all-reduce" in str(_plan(0, "auto"))


def test_servers_hold_equal_bytes():
    """Over layers of every size, to within one pair."""
    sizes = [3, 700, 65_000, 1_000_001, 40, 9_999, 300_000, 12]
    layers = [Description(f"layer_{i}", (n,), "float32") for i, n in enumerate(sizes)]
    store = schemes.ShardedServer(pair_bytes=65_536)
    for nodes in (1, 2, 3, 5, 16):
        made = coordinator.plan(layers, policies.parse(store), Topology.regular(0, nodes, 1), 2**18)
        held = np.zeros(nodes)
        for bucket in made.buckets:
            ranges = [store.own_range(bucket.length, Topology.regular(rank, nodes, 1)) for rank in range(nodes)]
            here = np.array([4 * (end - begin) for begin, end in ranges])
            # A bucket keeps all links busy.
            assert max(here) - min(here) <= 4
            held += here
        assert max(held) - min(held) <= store.pair_bytes
        assert sum(held) == 4 * sum(sizes)


def _hybcomm(m, n, rows, nodes, ranks_per_node=1):
    topology = Topology.regular(0, nodes * ranks_per_node, ranks_per_node)
    description = Description("fc/kernel", (m, n), "float32", FactorShape(rows, m, n, "float32"))
    return policies.HybComm().choose(description, topology)


def test_best_scheme_is_the_papers():
    """Table 1 and section 3.2: a layer of 4096 x 4096, batch 32, 8 nodes that work and serve: 58.7 M against 3.7 M."""
    choice = _hybcomm(4096, 4096, 32, 8)
    assert choice.scheme.name == "sfb"
    millions = {name: size / 4e6 for name, size in choice.candidates}
    assert millions == {"sfb": pytest.approx(3.67, abs=0.01), "ps": pytest.approx(58.7, abs=0.1)}
    assert choice.reason == "sfb 14.68 MB <= ps 234.88 MB with K=32, P=8"
    # GoogLeNet's thin classifier with its batch of 128 on 16 nodes goes to the store (section 5.2).
    assert _hybcomm(1024, 1000, 128, 16).scheme.name == "ps"
    # Ranks of a node share its link: their rows count together.
    assert "K=128, P=2" in _hybcomm(4096, 4096, 32, 2, ranks_per_node=4).reason


@pytest.mark.parametrize(("rows", "sums"), [(4, False), (400, True)])
def test_factors_are_gathered_or_their_products_summed_in_the_node(rows, sums):
    """Whichever is fewer bytes there: 2 nodes gather 2 K (M + N) values a rank, or sum M N."""
    description = Description("fc/kernel", (100, 60), "float32", FactorShape(rows, 100, 60, "float32"))
    made = coordinator.plan([description], policies.parse("sfb"), Topology.regular(0, 8, 4))
    assert made.buckets[0].scheme == schemes.FactorBroadcast(sums_in_node=sums)
    other = dataclasses.replace(made.buckets[0], scheme=schemes.FactorBroadcast(sums_in_node=not sums))
    assert made.cost.node_bytes < other.cost(made.topology).node_bytes
    # Uneven nodes have no positions to gather over.
    uneven = coordinator.plan([description], policies.parse("sfb"), Topology(0, ((0, 1), (2,))))
    assert uneven.buckets[0].scheme == schemes.FactorBroadcast()


def test_hybcomm_without_rows_or_factors():
    topology = Topology.regular(0, 4, 1)
    unknown = Description("fc/kernel", (512, 512), "float32", FactorShape(None, 512, 512, "float32"))
    assert policies.HybComm().choose(unknown, topology).reason == (
        "its number of rows is not known: give HybComm(batch_size=...)"
    )
    plain = Description("conv/kernel", (3, 3, 8, 8), "float32", why_no_factors="it comes from Conv2DBackpropFilter")
    choice = policies.HybComm().choose(plain, topology)
    assert (choice.scheme.name, choice.reason) == ("ps", "it comes from Conv2DBackpropFilter")
    for options in ({"batch_size": 0}, {"pair_bytes": -1}):
        with pytest.raises(ValueError, match="must be positive"):
            policies.HybComm(**options)


def test_rules_hand_on_what_hybcomm_weighed():
    rules = policies.parse([("fc", policies.HybComm(batch_size=32)), (".*", "allreduce")])
    assert rules.batch_size == 32
    factors = FactorShape(32, 512, 512, "float32")
    choice = rules.choose(Description("fc/kernel", (512, 512), "float32", factors), Topology.regular(0, 4, 1))
    assert choice.reason.startswith("rule 'fc': sfb ")
    assert dict(choice.candidates).keys() == {"sfb", "ps"}


def test_hybcomm_compares_bytes():
    """Factors of 16 bits are half the bytes; the store keeps 32."""
    wide, narrow = (FactorShape(150, 512, 512, dtype) for dtype in ("float32", "float16"))
    chosen = [
        policies.HybComm().choose(Description("fc", (512, 512), "float32", f), Topology.regular(0, 4, 1)).scheme.name
        for f in (wide, narrow)
    ]
    assert chosen == ["ps", "sfb"]

"""Plans: order, buckets, bytes, and what they print."""

import dataclasses
import json

import numpy as np
import pytest

from tfposeidon import policies, schemes
from tfposeidon.communication.topology import Topology
from tfposeidon.gradients.description import Description
from tfposeidon.gradients.factors import FactorShape
from tfposeidon.planning.plan import make_plan, with_rows

LAYERS = [
    Description(f"layer_{i}/{part}", shape, "float32")
    for i in range(6)
    for part, shape in (("kernel", (32, 32)), ("bias", (32,)))
]
CLUSTER = Topology.regular(0, 128, 8)


def _plan(bucket_bytes, scheme="torus2d", topology=CLUSTER, descriptions=LAYERS):
    return make_plan(descriptions, policies.parse(scheme), topology, bucket_bytes)


@pytest.mark.parametrize("bucket_bytes", [0, 4096, 4224, 10_000, 20_000, 10**9])
def test_last_variables_first_and_each_once(bucket_bytes):
    buckets = _plan(bucket_bytes).buckets
    assert sorted(m for b in buckets for m in b.members) == list(range(len(LAYERS)))
    assert all(list(b.members) == sorted(b.members, reverse=True) for b in buckets)
    complete = [min(b.members) for b in buckets]
    assert complete == sorted(complete, reverse=True), (
        "a bucket must not stand before one that is complete earlier"
    )
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
    text = str(
        _plan(
            4224 * 6, [("layer_5", schemes.AllToAll(wire_dtype="float16")), ("layer", "allreduce")]
        )
    )
    assert "128 rank(s) on 16 node(s) (16 x 8)" in text
    lines = text.splitlines()
    assert lines[2].split()[:5] == [
        "0",
        "layer_5/bias",
        "32",
        "float32",
        "alltoall(wire_dtype=float16)",
    ]
    assert "rule 'layer_5'" in lines[2]
    assert lines[3].split() == ["layer_5/kernel", "32x32", "float32"]


def test_a_rule_that_is_found_in_no_path_is_named():
    """As in a model that was made again, whose layers Keras has numbered anew."""
    plan = _plan(
        0,
        [
            ("layer_5", schemes.AllToAll(wire_dtype="float16")),
            ("layer_77/", "alltoall"),
            (".*", "allreduce"),
        ],
    )
    assert plan.notes == ("rule 'layer_77/' matches no variable path, such as 'layer_0/kernel'",)
    assert f"note: {plan.notes[0]}" in str(plan)


def test_plan_as_json():
    content = json.loads(_plan(4224 * 6).to_json())
    first = content["buckets"][0]
    assert first["scheme"] == "torus2d"
    asked_for = {"reason": "configured", "candidates": {}}
    assert first["variables"][:2] == [
        {"path": "layer_5/bias", "shape": [32], **asked_for},
        {"path": "layer_5/kernel", "shape": [32, 32], **asked_for},
    ]
    assert first["cost"]["cross_bytes"] > 0
    assert len(content["nodes"]) == 16


def test_each_variable_of_a_bucket_keeps_its_reason():
    """Two kernels and a convolution that share a bucket of the store."""
    factors = {n: FactorShape(1000, n, n, "float32") for n in (32, 64)}
    layers = [
        Description("small/kernel", (32, 32), "float32", factors[32]),
        Description(
            "conv/kernel",
            (3, 3, 8, 8),
            "float32",
            why_no_factors="it comes from Conv2DBackpropFilter",
        ),
        Description("large/kernel", (64, 64), "float32", factors[64]),
    ]
    made = _plan(10**9, "hybcomm", Topology.regular(0, 4, 1), layers)
    (bucket,) = made.buckets
    large, conv, small = json.loads(made.to_json())["buckets"][0]["variables"]
    lines = str(made).splitlines()[2:5]
    for variable, line, choice in zip((large, conv, small), lines, bucket.choices, strict=True):
        assert line.split()[-3:] == variable["reason"].split()[-3:]
        assert variable["reason"] == choice.reason
        assert variable["candidates"] == dict(choice.candidates)
    assert conv["reason"] == "it comes from Conv2DBackpropFilter"
    assert small["reason"].startswith("factors 1.54 MB > ps 12.29 kB with K=1000")
    assert small["candidates"].keys() == large["candidates"].keys() == {"factors", "ps"}
    assert small["candidates"] != large["candidates"]


def test_auto_says_what_it_means():
    assert "the network profile is unknown" in str(_plan(0, "auto"))


def test_servers_hold_equal_bytes():
    """Over layers of every size, to within one pair."""
    sizes = [3, 700, 65_000, 1_000_001, 40, 9_999, 300_000, 12]
    layers = [Description(f"layer_{i}", (n,), "float32") for i, n in enumerate(sizes)]
    store = schemes.ParameterServer(pair_bytes=65_536)
    for nodes in (1, 2, 3, 5, 16):
        made = make_plan(layers, policies.parse(store), Topology.regular(0, nodes, 1), 2**18)
        held = np.zeros(nodes)
        for bucket in made.buckets:
            ranges = [
                store.own_range(bucket.length, Topology.regular(rank, nodes, 1))
                for rank in range(nodes)
            ]
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
    """Table 1 and section 3.2: a layer of 4096 x 4096, batch 32, 8 nodes: 58.7 M against 3.7 M."""
    choice = _hybcomm(4096, 4096, 32, 8)
    assert choice.scheme.name == "factors"
    millions = {name: size / 4e6 for name, size in choice.candidates}
    assert millions == {
        "factors": pytest.approx(3.67, abs=0.01),
        "ps": pytest.approx(58.7, abs=0.1),
    }
    assert choice.reason == "factors 14.68 MB <= ps 234.88 MB with K=32, P=8"
    # GoogLeNet's thin classifier with its batch of 128 on 16 nodes goes to the store (section 5.2).
    assert _hybcomm(1024, 1000, 128, 16).scheme.name == "ps"
    # Ranks of a node share its link: their rows count together.
    assert "K=128, P=2" in _hybcomm(4096, 4096, 32, 2, ranks_per_node=4).reason


@pytest.mark.parametrize(("rows", "sums"), [(4, False), (400, True)])
def test_factors_are_gathered_or_their_products_summed_in_the_node(rows, sums):
    """Whichever is fewer bytes there: 2 nodes gather 2 K (M + N) values a rank, or sum M N."""
    description = Description(
        "fc/kernel", (100, 60), "float32", FactorShape(rows, 100, 60, "float32")
    )
    made = make_plan([description], policies.parse("factors"), Topology.regular(0, 8, 4))
    assert made.buckets[0].scheme == schemes.Factors(sums_in_node=sums)
    other = dataclasses.replace(made.buckets[0], scheme=schemes.Factors(sums_in_node=not sums))
    assert made.cost.node_bytes < other.cost(made.topology).node_bytes
    # Uneven nodes have no positions to gather over.
    uneven = make_plan([description], policies.parse("factors"), Topology(0, ((0, 1), (2,))))
    assert uneven.buckets[0].scheme == schemes.Factors()


@pytest.mark.parametrize("shape", [(512, 512), (300, 20), (64, 4096)])
@pytest.mark.parametrize("layout", [(4, 1), (2, 1), (1, 3), (2, 4), (16, 8)])
@pytest.mark.parametrize("scheme", ["hybcomm", "factors"])
def test_steps_take_what_a_plan_with_their_rows_would(scheme, layout, shape):
    """On both sides of the limit; what a bucket shows after such a step is that plan."""
    nodes, ranks = layout
    topology, policy = Topology.regular(0, nodes * ranks, ranks), policies.parse(scheme)
    make = lambda rows: make_plan(  # noqa: E731
        [Description("fc/kernel", shape, "float32", FactorShape(rows, *shape, "float32"))],
        policy,
        topology,
    )
    unknown = make(None)
    by_rows = unknown.buckets[0].scheme
    if not isinstance(by_rows, schemes.ByRows):
        assert (scheme, ranks) == ("factors", 1), "there is nothing to choose"
        return
    taken = []
    for total in (1, by_rows.limit, by_rows.limit + 1, 10**6):
        known = make(total / topology.size)
        taken.append(known.buckets[0].scheme)
        assert by_rows.for_rows(total) == taken[-1]
        shown = with_rows(unknown, [total], policy)
        assert (str(shown), shown.to_json()) == (str(known), known.to_json())
    assert taken[0] == taken[1] == by_rows.few
    assert taken[2] == taken[3] == by_rows.many
    assert json.loads(unknown.to_json())["buckets"][0]["options"]["limit"] == by_rows.limit
    assert with_rows(unknown, [0], policy) == unknown


def test_kernels_of_one_shape_share_a_bucket_and_its_rows():
    """Others do not: rows decide for each bucket."""
    layers = [
        Description(f"layer_{i}/kernel", (n, n), "float32", FactorShape(None, n, n, "float32"))
        for i, n in enumerate((32, 64, 32))
    ]
    topology = Topology.regular(0, 4, 1)
    made = _plan(10**9, "hybcomm", topology, layers)
    assert [b.members for b in made.buckets] == [(1,), (2, 0)]
    assert "factors up to K=8, ps beyond, P=4" in str(made)
    shown = with_rows(made, [4 * 17, 4 * (7 + 9)], policies.HybComm())
    assert [b.scheme.name for b in shown.buckets] == ["ps", "factors"]
    assert shown.buckets[1].cost(topology).bytes == 3 * 16 * (32 + 32) * 4
    assert [c.reason for c in shown.buckets[1].choices] == [
        "factors 12.29 kB <= ps 12.29 kB with K=8, P=4"
    ] * 2


def test_hybcomm_without_factors():
    topology = Topology.regular(0, 4, 1)
    unknown = Description("fc/kernel", (512, 512), "float32")
    assert "the first step determines" in policies.HybComm().choose(unknown, topology).reason
    plain = Description(
        "conv/kernel", (3, 3, 8, 8), "float32", why_no_factors="it comes from Conv2DBackpropFilter"
    )
    choice = policies.HybComm().choose(plain, topology)
    assert (choice.scheme.name, choice.reason) == ("ps", "it comes from Conv2DBackpropFilter")
    with pytest.raises(ValueError, match="must be a finite number > 0"):
        policies.HybComm(pair_bytes=-1)


def test_rules_hand_on_what_hybcomm_weighed():
    rules = policies.parse([("fc", policies.HybComm()), (".*", "allreduce")])
    factors = FactorShape(32, 512, 512, "float32")
    choice = rules.choose(
        Description("fc/kernel", (512, 512), "float32", factors), Topology.regular(0, 4, 1)
    )
    assert choice.reason.startswith("rule 'fc': factors ")
    assert dict(choice.candidates).keys() == {"factors", "ps"}


def test_hybcomm_compares_bytes():
    """Factors of 16 bits are half the bytes; the store keeps 32."""
    wide, narrow = (FactorShape(150, 512, 512, dtype) for dtype in ("float32", "float16"))
    chosen = [
        policies.HybComm()
        .choose(Description("fc", (512, 512), "float32", f), Topology.regular(0, 4, 1))
        .scheme.name
        for f in (wide, narrow)
    ]
    assert chosen == ["ps", "factors"]

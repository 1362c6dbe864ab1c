"""Tests the choices of HybComm, and plans of sufficient factors before and after a step."""

import dataclasses
import itertools
import json

import pytest

from tfposeidon import policies, schemes
from tfposeidon.communication.topology import Topology
from tfposeidon.exchange.plan import make_plan, sized
from tfposeidon.factors.pairs import FactorShape
from tfposeidon.gradients import Description


def test_each_variable_of_a_bucket_has_its_own_reason():
    """Two kernels and a convolution share a bucket of the parameter server."""
    factors = {n: FactorShape(1000, n, n, "float32") for n in (32, 64)}
    layers = [
        Description("small/kernel", (32, 32), "float32", factors[32]),
        Description(
            "conv/kernel",
            (3, 3, 8, 8),
            "float32",
            why_no_structure="it comes from Conv2DBackpropFilter",
        ),
        Description("large/kernel", (64, 64), "float32", factors[64]),
    ]
    made = make_plan(layers, policies.parse("hybcomm"), Topology.regular(0, 4, 1), 10**9)
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


@pytest.mark.parametrize("sizes", [(3,), (6,), (3, 3)])
def test_all_ranks_compute_the_same_plan_if_shards_differ(sizes):
    """Three ranks of a node hold unequal shards of a kernel, but send equally many bytes."""
    ranks = iter(range(sum(sizes)))
    nodes = tuple(tuple(itertools.islice(ranks, size)) for size in sizes)
    kernel = Description("kernel", (64, 64), "float32", FactorShape(None, 64, 64, "float32"))
    digests = {
        make_plan([kernel], policies.parse("factors"), Topology(rank, nodes), 10**9).digest
        for rank in range(sum(sizes))
    }
    assert len(digests) == 1


def _hybcomm(m, n, rows, nodes, ranks_per_node=1):
    topology = Topology.regular(0, nodes * ranks_per_node, ranks_per_node)
    description = Description("fc/kernel", (m, n), "float32", FactorShape(rows, m, n, "float32"))
    return policies.HybComm().choose(description, topology)


def test_hybcomm_chooses_as_in_the_paper():
    """Table 1 and section 3.2 count 3.7 M values with factors, and 58.7 M with the server."""
    choice = _hybcomm(4096, 4096, 32, 8)
    assert choice.scheme.name == "factors"
    millions = {name: size / 4e6 for name, size in choice.candidates}
    assert millions == {
        "factors": pytest.approx(3.67, abs=0.01),
        "ps": pytest.approx(58.7, abs=0.1),
    }
    assert choice.reason == "factors 14.68 MB <= ps 234.88 MB with K=32, P=8"
    # GoogLeNet's classifier uses the parameter server with batch 128 on 16 nodes (section 5.2).
    assert _hybcomm(1024, 1000, 128, 16).scheme.name == "ps"
    # The ranks of a node share its link, so their rows add up.
    assert "K=128, P=2" in _hybcomm(4096, 4096, 32, 2, ranks_per_node=4).reason
    at_limit, beyond = (_hybcomm(512, 512, rows, 2, ranks_per_node=4) for rows in (64, 65))
    assert (at_limit.scheme.name, beyond.scheme.name) == ("factors", "ps")


@pytest.mark.parametrize(("rows", "sums"), [(4, False), (400, True)])
def test_factors_are_gathered_or_their_products_summed_in_the_node(rows, sums):
    """The plan uses whichever sends fewer bytes within the node."""
    description = Description(
        "fc/kernel", (100, 60), "float32", FactorShape(rows, 100, 60, "float32")
    )
    made = make_plan([description], policies.parse("factors"), Topology.regular(0, 8, 4))
    assert made.buckets[0].scheme == schemes.Factors(sums_in_node=sums)
    other = dataclasses.replace(made.buckets[0], scheme=schemes.Factors(sums_in_node=not sums))
    assert made.cost.node_bytes < other.cost(made.topology).node_bytes
    # Unequal nodes have no groups of ranks with equal indices across nodes.
    uneven = make_plan([description], policies.parse("factors"), Topology(0, ((0, 1), (2,))))
    assert uneven.buckets[0].scheme == schemes.Factors()


@pytest.mark.parametrize("shape", [(512, 512), (300, 20), (64, 4096)])
@pytest.mark.parametrize("layout", [(4, 1), (2, 1), (1, 3), (2, 4), (16, 8)])
@pytest.mark.parametrize("scheme", ["hybcomm", "factors"])
def test_steps_use_the_plan_for_their_rows(scheme, layout, shape):
    """After a step on either side of the row limit, the bucket shows the plan for its rows."""
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
        assert (scheme, ranks) == ("factors", 1), "only this plan may ignore rows"
        return
    taken = []
    for total in (1, by_rows.limit, by_rows.limit + 1, 10**6):
        known = make(total / topology.size)
        taken.append(known.buckets[0].scheme)
        assert by_rows.for_rows(total) == taken[-1]
        shown = sized(unknown, [total], policy)
        assert (str(shown), shown.to_json()) == (str(known), known.to_json())
    assert taken[0] == taken[1] == by_rows.few
    assert taken[2] == taken[3] == by_rows.many
    assert json.loads(unknown.to_json())["buckets"][0]["options"]["limit"] == by_rows.limit
    assert sized(unknown, [0], policy) == unknown


def test_kernels_of_one_shape_share_a_bucket_and_its_rows():
    """Kernels of other shapes have other buckets, because each bucket has one row limit."""
    layers = [
        Description(f"layer_{i}/kernel", (n, n), "float32", FactorShape(None, n, n, "float32"))
        for i, n in enumerate((32, 64, 32))
    ]
    topology = Topology.regular(0, 4, 1)
    made = make_plan(layers, policies.parse("hybcomm"), topology, 10**9)
    assert [b.members for b in made.buckets] == [(1,), (2, 0)]
    assert "factors up to K=8, ps beyond, P=4" in str(made)
    shown = sized(made, [4 * 17, 4 * (7 + 9)], policies.HybComm())
    assert [b.scheme.name for b in shown.buckets] == ["ps", "factors"]
    assert shown.buckets[1].cost(topology).bytes == 3 * 16 * (32 + 32) * 4
    assert [c.reason for c in shown.buckets[1].choices] == [
        "factors 12.29 kB <= ps 12.29 kB with K=8, P=4"
    ] * 2


def test_hybcomm_uses_the_parameter_server_without_factors():
    topology = Topology.regular(0, 4, 1)
    unknown = Description("fc/kernel", (512, 512), "float32")
    assert "the first step determines" in policies.HybComm().choose(unknown, topology).reason
    plain = Description(
        "conv/kernel",
        (3, 3, 8, 8),
        "float32",
        why_no_structure="it comes from Conv2DBackpropFilter",
    )
    choice = policies.HybComm().choose(plain, topology)
    assert (choice.scheme.name, choice.reason) == ("ps", "it comes from Conv2DBackpropFilter")


def test_rules_forward_the_bytes_compared_by_hybcomm():
    rules = policies.parse([("fc", policies.HybComm()), (".*", "allreduce")])
    factors = FactorShape(32, 512, 512, "float32")
    choice = rules.choose(
        Description("fc/kernel", (512, 512), "float32", factors), Topology.regular(0, 4, 1)
    )
    assert choice.reason.startswith("rule 'fc': factors ")
    assert dict(choice.candidates).keys() == {"factors", "ps"}


def test_hybcomm_has_no_state():
    """Steps on one rank may therefore use XLA."""
    assert not policies.HybComm().keeps_state


def test_hybcomm_compares_bytes_of_factors_and_gradients():
    """Factors in float16 have half the bytes; the gradient stays in float32."""
    wide, narrow = (FactorShape(150, 512, 512, dtype) for dtype in ("float32", "float16"))
    chosen = [
        policies.HybComm()
        .choose(Description("fc", (512, 512), "float32", f), Topology.regular(0, 4, 1))
        .scheme.name
        for f in (wide, narrow)
    ]
    assert chosen == ["ps", "factors"]

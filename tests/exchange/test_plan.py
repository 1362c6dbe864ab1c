"""Tests order, buckets, bytes and printed text of plans."""

import json
from dataclasses import replace
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.in_process import Cluster
from tfposeidon import policies, schemes
from tfposeidon.communication.topology import Topology
from tfposeidon.exchange.agreed_plan import AgreedPlans
from tfposeidon.exchange.exchanger import Exchanger
from tfposeidon.exchange.plan import make_plan
from tfposeidon.gradients import Description

LAYERS = [
    Description(f"layer_{i}/{part}", shape, "float32")
    for i in range(6)
    for part, shape in (("kernel", (32, 32)), ("bias", (32,)))
]
CLUSTER = Topology.regular(0, 128, 8)


def _plan(bucket_bytes, scheme="torus2d", topology=CLUSTER, descriptions=LAYERS):
    return make_plan(descriptions, policies.parse(scheme), topology, bucket_bytes)


@pytest.mark.parametrize("bucket_bytes", [0, 4096, 4224, 10_000, 20_000, 10**9])
def test_buckets_hold_each_variable_once_in_reverse_order(bucket_bytes):
    buckets = _plan(bucket_bytes).buckets
    assert sorted(m for b in buckets for m in b.members) == list(range(len(LAYERS)))
    assert all(list(b.members) == sorted(b.members, reverse=True) for b in buckets)
    complete = [min(b.members) for b in buckets]
    assert complete == sorted(complete, reverse=True), (
        "buckets must be in the order of their last gradients"
    )
    assert all(b.bytes <= bucket_bytes or len(b.members) == 1 for b in buckets)


def test_large_variables_have_their_own_bucket():
    buckets = _plan(4096 * 4).buckets
    assert [len(b.members) for b in buckets] == [1, 1, 1, 1, 1, 6, 1]
    assert {d.shape for d in buckets[-2].descriptions} == {(32,)}


def test_the_bucket_size_determines_the_number_of_buckets():
    assert len(_plan(0).buckets) == 12
    # The first of these buckets is exactly full.
    assert [len(b.members) for b in _plan(4224 * 4).buckets] == [8, 4]
    assert len(_plan(10**9).buckets) == 1


def test_variables_of_exactly_the_minimum_length_are_not_small():
    buckets = _plan(0, schemes.HiTopK(min_elements=32 * 32)).buckets
    assert {(b.length, b.scheme.name) for b in buckets} == {(1024, "hitopk"), (32, "allreduce")}


def test_a_bucket_has_one_dtype():
    halves = [*LAYERS, Description("half/kernel", (8,), "float16")]
    assert [b.dtype for b in _plan(10**9, descriptions=halves).buckets] == ["float16", "float32"]


def test_the_default_plan_sends_the_bytes_of_a_torus():
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


def test_a_rule_without_a_match_is_named():
    """A common cause is that Keras renumbers the layers of a rebuilt model."""
    plan = _plan(
        0,
        [
            ("layer_5", schemes.AllToAll(wire_dtype="float16")),
            ("layer_77/", "alltoall"),
            (".*", "allreduce"),
        ],
    )
    assert plan.notes == (
        "rule 'layer_77/' matches no variable; the first path is 'layer_0/kernel'",
    )
    assert f"note: {plan.notes[0]}" in str(plan)


def test_a_plan_is_exported_as_json():
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


def test_auto_reports_the_missing_network_profile():
    assert "the network profile is unknown" in str(_plan(0, "auto"))


def test_shard_owners_hold_equal_bytes():
    """The layers have many sizes, and shards of a bucket differ by at most one value."""
    sizes = [3, 700, 65_000, 1_000_001, 40, 9_999, 300_000, 12]
    layers = [Description(f"layer_{i}", (n,), "float32") for i, n in enumerate(sizes)]
    store = schemes.ParameterServer()
    for nodes in (1, 2, 3, 5, 16):
        made = make_plan(layers, policies.parse(store), Topology.regular(0, nodes, 1), 2**18)
        held = np.zeros(nodes)
        for bucket in made.buckets:
            ranges = [
                store.own_range(bucket.length, Topology.regular(rank, nodes, 1))
                for rank in range(nodes)
            ]
            here = np.array([4 * (end - begin) for begin, end in ranges])
            # All links are busy during each bucket, because its shards are equal, too.
            assert max(here) - min(here) <= 4
            held += here
        assert max(held) - min(held) <= 4 * len(made.buckets)
        assert sum(held) == 4 * sum(sizes)


def test_the_number_of_participating_ranks_is_an_integer():
    """In float32, 41 times 1/41 is less than 1, as if a rank had exhausted its input."""

    def count(wire):
        exchanger = Exchanger(_plan(0, "allreduce", wire.topology, LAYERS[1:2]), wire)
        exchanger.prefix = "x"
        found = exchanger.presence([tf.ones(32)], True, with_means=True)
        return float(found.total), float(found.absent), float(found.gradients[0])

    nodes = Topology.regular(0, 41, 41).nodes
    assert set(Cluster(nodes).run(count)) == {(41.0, 0.0, 41.0)}


class OfEachRank(policies.HybComm):
    """Policy whose choice differs on rank 1 once gradients are read, as with a rounding error."""

    reader = SimpleNamespace(
        find=lambda *_: [],
        describe=lambda found, _: [replace(one, why_no_structure="read") for one in found],
    )

    def choose(self, description, topology):
        is_other = bool(description.why_no_structure) and topology.rank == 1
        return policies.Choice(schemes.AllReduce(wire_dtype="float16" if is_other else None), "")


def test_plans_that_differ_between_ranks_are_refused():
    weight, inner = keras.Variable(np.zeros(3, "float32"), name="weight"), keras.optimizers.SGD()
    names = "sample_count", "counted", "gradient_accumulation_steps", "functions compiled by XLA"
    settings = dict.fromkeys(names)

    def agree(wire):
        plans = AgreedPlans(OfEachRank(), 2**20, lambda: wire, lambda: "x")
        plans.agree([tf.ones(3)], [weight], inner, settings)

    with pytest.raises(RuntimeError, match="All ranks must compute the same plan"):
        Cluster(((0,), (1,))).run(agree)

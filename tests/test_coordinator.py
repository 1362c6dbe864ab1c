"""Plans: order, buckets, bytes, and what they print."""

import json

import pytest

from tfposeidon import coordinator, policies
from tfposeidon.gradient import Description
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

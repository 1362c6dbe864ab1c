"""Tests values, names and bytes of schemes of sufficient factors, on simulated ranks."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.baselines import FactorServer
from tests.in_process import Cluster
from tests.schemes.test_schemes import LAYOUTS, check_calls
from tfposeidon import policies, schemes
from tfposeidon.communication.topology import Topology
from tfposeidon.communication.wire import Zeros
from tfposeidon.exchange.plan import Bucket
from tfposeidon.factors.pairs import FactorPair, FactorShape
from tfposeidon.gradients import Description
from tfposeidon.schemes.stages import total_cost

FACTOR_SCHEMES = (
    schemes.Factors(),
    schemes.Factors(sums_in_node=True),
    FactorServer(),
    FactorServer(server=1),
)


@pytest.mark.parametrize("layout", ["2x1", "1x3", "2+1", "2x2", "interleaved 2x2", "3x2"])
@pytest.mark.parametrize("scheme", FACTOR_SCHEMES, ids=repr)
def test_ranks_may_have_any_number_of_rows(scheme, layout):
    """Each rank has a different number of rows, and one rank has none."""
    nodes = LAYOUTS[layout]
    size = sum(map(len, nodes))
    draw = [np.random.default_rng(rank) for rank in range(size)]
    rows = [(draw[r].normal(size=(r, 7)), draw[r].normal(size=(r, 5))) for r in range(size)]
    factors = [FactorPair(*(tf.constant(part, tf.float32) for part in pair)) for pair in rows]
    means = Cluster(nodes).run(
        lambda wire: scheme.exchange_factors(factors[wire.topology.rank], wire, "x").numpy()
    )
    expected = sum(left.T @ right for left, right in rows) / size
    for mean in means:
        np.testing.assert_allclose(mean.reshape(7, 5), expected, atol=1e-5)
        np.testing.assert_array_equal(mean, means[0])


@pytest.mark.parametrize("layout", ["2x1", "1x3", "2+1", "2x2", "3x2"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("scheme", FACTOR_SCHEMES, ids=repr)
def test_factors_send_the_predicted_bytes(scheme, layout, dtype):
    nodes = LAYOUTS[layout]
    cluster = Cluster(nodes)
    factors = FactorPair(tf.ones([3, 7], dtype), tf.ones([3, 5], dtype))
    cluster.run(lambda wire: scheme.exchange_factors(factors, wire, "x"))
    for rank in range(cluster.topology.size):
        topology = Topology(rank, nodes)
        stages = scheme.factor_stages(FactorShape(3, 7, 5, dtype), topology)
        check_calls(cluster, rank, stages, "x")
        cost = total_cost(stages, topology)
        assert cluster.bytes_of(rank) == (cost.node_bytes, cost.cross_bytes)


@pytest.mark.parametrize("layout", ["2x1", "2+1", "3x2"])
def test_the_cost_of_multiplying_all_factors_is_predicted(layout):
    factors = FactorShape(3, 7, 5, "float32")
    topology = Topology(0, LAYOUTS[layout])
    *_, last = schemes.Factors().factor_stages(factors, topology)
    assert last == factors.multiplication(topology.size)


BY_ROWS = (
    schemes.ByRows(few=schemes.Factors(), many=schemes.ParameterServer(), limit=12),
    schemes.ByRows(few=schemes.Factors(), many=schemes.Factors(sums_in_node=True), limit=12),
)


@pytest.mark.parametrize("layout", ["2x1", "1x3", "2+1", "2x2", "3x2"])
@pytest.mark.parametrize("scheme", BY_ROWS, ids=str)
@pytest.mark.parametrize("many", [False, True])
def test_all_ranks_take_the_branch_for_the_total_rows(many, scheme, layout):
    """Ranks send the bytes of the chosen scheme, and the number of rows."""
    nodes = LAYOUTS[layout]
    cluster = Cluster(nodes)
    size = cluster.topology.size
    shape = FactorShape(None, 7, 5, "float32", has_local=True)
    description = Description("kernel", (7, 5), "float32", shape)
    choice = policies.Choice(scheme, "")
    bucket = Bucket(
        members=(0, 1), descriptions=(description,) * 2, scheme=scheme, choices=(choice,) * 2
    )
    counts = [12 if many else 2] * size
    drawn = [np.random.default_rng(rank).normal(size=(2, 12, 12)) for rank in range(size)]

    def exchange(wire):
        rank = wire.topology.rank
        rows = [drawn[rank][i][: counts[rank]].astype("float32") for i in range(2)]
        factors = [
            FactorPair(tf.constant(r[:, :7]), tf.constant(r[:, 7:]), tf.ones([7, 5])) for r in rows
        ]
        mean, total = scheme.exchange_structures(
            factors, bucket.descriptions, tf.constant(1.0), wire, "x", Zeros()
        )
        return mean.numpy(), float(total)

    results = cluster.run(exchange)
    expected = [
        1 + sum(d[i][:n, :7].T @ d[i][:n, 7:] for d, n in zip(drawn, counts, strict=True)) / size
        for i in (0, 1)
    ]
    assert {total for _, total in results} == {2.0 * sum(counts)}
    taken = scheme.for_rows(sum(counts))
    assert taken == (scheme.many if 12 * size > 12 and many else scheme.few)
    shown = bucket.sized(2 * sum(counts), policies.Uniform(schemes.Factors()), cluster.topology)
    for rank, (mean, _) in enumerate(results):
        np.testing.assert_allclose(mean.reshape(2, 7, 5), expected, atol=1e-5)
        np.testing.assert_array_equal(mean, results[0][0])
        cost = shown.cost(Topology(rank, nodes))
        # A ring also sends the total number of rows in float32, in parts.
        for sent, predicted in zip(
            cluster.bytes_of(rank), (cost.node_bytes, cost.cross_bytes), strict=True
        ):
            assert 0 <= sent - predicted <= 8


@pytest.mark.parametrize("layout", ["2x1", "1x3", "2+1", "2x2"])
@pytest.mark.parametrize("scheme", FACTOR_SCHEMES, ids=repr)
def test_factor_schemes_exchange_a_vector_as_one_row(scheme, layout):
    """The contract tests exchange vectors by all schemes."""
    nodes, length = LAYOUTS[layout], 11
    cluster = Cluster(nodes)
    size = cluster.topology.size

    def exchange(wire):
        vector = tf.range(length, dtype=tf.float32) * (wire.topology.rank + 1)
        return scheme.exchange(vector, (), wire, "x")[0].numpy()

    for mean in cluster.run(exchange):
        np.testing.assert_allclose(mean, np.arange(length) * (size + 1) / 2, rtol=1e-6)
    for rank in range(size):
        stages = scheme.stages(length, 4, Topology(rank, nodes))
        check_calls(cluster, rank, stages, "x")


def test_the_number_of_rows_determines_the_scheme():
    by_rows = schemes.ByRows(few=schemes.Factors(), many=schemes.AllReduce(), limit=3)
    assert (by_rows.for_rows(3), by_rows.for_rows(4)) == (by_rows.few, by_rows.many)
    plain = [make() for name, make in schemes.REGISTRY.items() if name != "factors"]
    assert not any(scheme.reader for scheme in plain)
    assert by_rows.reader is schemes.Factors().reader is policies.HybComm().reader


def test_the_row_limit_minimizes_the_bytes_per_node():
    topology, factors = Topology.regular(0, 4, 2), FactorShape(None, 512, 256, "float32")
    by_rows = schemes.Factors().fitted(factors, topology)

    def node_bytes(scheme, rows):
        return scheme.factor_cost(dataclasses.replace(factors, rows=rows), topology).node_bytes

    rows, summed = by_rows.limit // topology.size, node_bytes(by_rows.many, 1)
    assert node_bytes(by_rows.few, rows) <= summed < node_bytes(by_rows.few, rows + 1)

"""Every scheme over every layout, on the in-process wire: values, names, bytes; and bad input."""

import numpy as np
import pytest

from tests import contract
from tests.in_process import Cluster
from tfposeidon import schemes
from tfposeidon.topology import Topology

LAYOUTS = {
    "1": ((0,),),
    "1x2": ((0, 1),),
    "2x1": ((0,), (1,)),
    "1x3": ((0, 1, 2),),
    "2+1": ((0, 1), (2,)),
    "2x2": ((0, 1), (2, 3)),
    "interleaved 2x2": ((0, 2), (1, 3)),
    "3+1+2": ((0, 1, 2), (3,), (4, 5)),
    "3x2": ((0, 1), (2, 3), (4, 5)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", contract.SCHEMES)
@pytest.mark.parametrize("length", contract.LENGTHS)
def test_contract(scheme, length, layout):
    _check(scheme, length, LAYOUTS[layout])


@pytest.mark.parametrize("scheme", contract.SCHEMES)
def test_contract_on_128_ranks(scheme):
    _check(scheme, 16 * 8 * 5 + 3, Topology.regular(0, 128, 8).nodes)


def _check(name, length, nodes):
    cluster = Cluster(nodes)
    means = cluster.run(lambda wire: contract.check(name, length, wire))
    for mean in means:
        np.testing.assert_array_equal(mean, means[0], "ranks differ")
    for rank in range(len(means)):
        cost = contract.SCHEMES[name][0].cost(length, 4, Topology(rank, nodes))
        # A ring's chunks differ by an element where the ranks do not divide the length.
        slack = 2 * 4 * len(means) if name.startswith("allreduce") else 0
        assert cluster.bytes_of(rank) == pytest.approx((cost.node_bytes, cost.cross_bytes), abs=slack)
        assert len(set(cluster.names[rank])) == len(cluster.names[rank])


def test_torus_sends_what_its_docstring_says():
    m, n, d = 16, 8, 16 * 8 * 1000
    cost = schemes.Torus2D().cost(d, 4, Topology.regular(5, m * n, n))
    assert cost.node_bytes == 4 * 2 * d * (n - 1) / n
    assert cost.cross_bytes == 4 * 2 * d * (m - 1) / (m * n)
    assert cost.steps == 2 * (n - 1) + 2 * (m - 1)


def test_sixteen_bits_halve_the_bytes():
    topology = Topology.regular(0, 8, 4)
    for scheme in (schemes.AllToAll, schemes.Torus2D):
        assert scheme(wire_dtype="bfloat16").cost(4096, 4, topology).bytes * 2 == scheme().cost(4096, 4, topology).bytes


@pytest.mark.parametrize("layout", ["2x1", "1x3", "2+1", "2x2", "3+1+2"])
@pytest.mark.parametrize("density", [0.001, 0.03, 0.5, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"select": "exact", "wire_dtype": "float16"},
        {"select": "dgc", "momentum": 0.9, "wire_dtype": "bfloat16"},
        {"warmup_steps": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [schemes.HierarchicalTopK, schemes.TopKAllGather])
def test_conservation(kind, options, density, layout):
    scheme = kind(density=density, **options)
    cluster = Cluster(LAYOUTS[layout])
    ends = cluster.run(lambda wire: contract.check_conservation(scheme, 997, wire, 5, "x", flush_at=4)[0])
    for mean in ends:
        np.testing.assert_array_equal(mean, ends[0], "ranks differ")


@pytest.mark.parametrize("scheme", contract.SCHEMES)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_non_finite_input_reaches_every_rank(scheme, poison):
    def exchange(wire):
        import tensorflow as tf

        vector = np.ones(9, np.float32)
        vector[4] = poison if wire.topology.rank == 1 else 1.0
        made = contract.SCHEMES[scheme][0]
        state = contract.settled_state(made, 9, wire.topology)
        mean, _ = made.exchange(tf.constant(vector), state, wire, "x")
        return np.isfinite(mean.numpy())

    for finite in Cluster(((0, 1), (2, 3))).run(exchange):
        np.testing.assert_array_equal(finite, np.arange(9) != 4)


@pytest.mark.parametrize("scheme", [schemes.AllReduce, schemes.AllToAll, schemes.Torus2D])
def test_unknown_wire_dtype_is_refused(scheme):
    with pytest.raises(ValueError, match=r"`wire_dtype` must be None or .*Received: wire_dtype='int8'"):
        scheme(wire_dtype="int8")


def test_all_reduce_points_elsewhere_for_bfloat16():
    with pytest.raises(ValueError, match=r'Use AllToAll\(wire_dtype="bfloat16"\)'):
        schemes.AllReduce(wire_dtype="bfloat16")


def test_schemes_print_what_differs_from_their_defaults():
    assert str(schemes.Torus2D()) == "2dtar"
    assert str(schemes.AllToAll(wire_dtype="float16")) == "asa(wire_dtype=float16)"

"""Checks the values, names and bytes of every scheme on simulated ranks, and bad input."""

import numpy as np
import pytest
import tensorflow as tf

from tests import contract
from tests.in_process import Cluster, InProcessWire
from tfposeidon import schemes
from tfposeidon.communication.topology import Topology
from tfposeidon.schemes.stages import Transfer, total_cost

SPARSE = (schemes.HiTopK, schemes.TopK)
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
def test_the_contract_holds_on_simulated_ranks(scheme, length, layout):
    _check(scheme, length, LAYOUTS[layout])


# "onebit", a scheme of the benchmarks, gathers the codes of all ranks, which is slow on 128 ranks.
@pytest.mark.parametrize(
    "scheme", [name for name in contract.SCHEMES if " " not in name and name != "onebit"]
)
def test_the_contract_holds_on_128_ranks(scheme):
    _check(scheme, 16 * 8 * 5 + 3, Topology.regular(0, 128, 8).nodes)


def _check(name, length, nodes):
    cluster = Cluster(nodes)
    means = cluster.run(lambda wire: contract.check(name, length, wire))
    for mean in means:
        np.testing.assert_array_equal(mean, means[0], "ranks differ")
    for rank in range(len(means)):
        topology = Topology(rank, nodes)
        stages = contract.SCHEMES[name][0].stages(length, 4, topology)
        check_calls(cluster, rank, stages, f"contract.{name}.{length}".replace(" ", "_"))
        cost = total_cost(stages, topology)
        # Chunks of a ring differ by an element if the number of ranks does not divide the length.
        slack = 2 * 4 * len(means) if name.startswith("allreduce") else 0
        assert cluster.bytes_of(rank) == pytest.approx(
            (cost.node_bytes, cost.cross_bytes), abs=slack
        )
        assert len(set(cluster.names(rank))) == len(cluster.names(rank))


def check_calls(cluster, rank, stages, prefix):
    """Checks that a rank has called the collectives of `stages` in their order."""
    described = [
        (stage.operation, stage.group.ranks, f"{prefix}.{stage.name}".rstrip("."), stage.itemsize)
        for stage in stages
        if isinstance(stage, Transfer) and stage.group.size > 1
    ]
    assert described == [call for call in cluster.calls[rank] if len(call[1]) > 1]


@pytest.mark.parametrize("name", contract.SCHEMES)
def test_the_property_exact_agrees_with_the_contract(name):
    scheme, rounding = contract.SCHEMES[name]
    assert scheme.exact == (rounding == 0.0)


def test_torus_sends_the_bytes_of_its_docstring():
    m, n, d = 16, 8, 16 * 8 * 1000
    cost = schemes.Torus2D().cost(d, 4, Topology.regular(5, m * n, n))
    assert cost.node_bytes == 4 * 2 * d * (n - 1) / n
    assert cost.cross_bytes == 4 * 2 * d * (m - 1) / (m * n)
    assert cost.steps == 2 * (n - 1) + 2 * (m - 1)


def test_sixteen_bit_wire_dtypes_halve_the_bytes():
    topology = Topology.regular(0, 8, 4)
    for scheme in (schemes.AllToAll, schemes.Torus2D):
        assert (
            scheme(wire_dtype="bfloat16").cost(4096, 4, topology).bytes * 2
            == scheme().cost(4096, 4, topology).bytes
        )


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
@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_schemes_send_or_retain_each_part_of_a_gradient(kind, options, density, layout):
    scheme = kind(density=density, **options)
    cluster = Cluster(LAYOUTS[layout])
    ends = cluster.run(
        lambda wire: contract.check_conservation(scheme, 997, wire, 5, "x", flush_at=4)[0]
    )
    for mean in ends:
        np.testing.assert_array_equal(mean, ends[0], "ranks differ")


@pytest.mark.parametrize("scheme", contract.SCHEMES)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_non_finite_input_reaches_every_rank(scheme, poison):
    def exchange(wire):
        vector = np.ones(9, np.float32)
        vector[4] = poison if wire.topology.rank == 1 else 1.0
        made = contract.SCHEMES[scheme][0]
        state = contract.settled_state(made, 9, wire.topology)
        mean, _ = made.exchange(tf.constant(vector), state, wire, "x")
        return np.isfinite(mean.numpy())

    for finite in Cluster(((0, 1), (2, 3))).run(exchange):
        assert not finite[4]
        # The one-bit scheme only shows that some element of this sign was not finite.
        assert finite.sum() == 8 or scheme == "onebit"


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"density": 0},
            r"`density` must be a number in \(0, 1\]. Received: density=0. Use AllReduce\(\)",
        ),
        ({"density": 1.5}, r"`density` must be a number in \(0, 1\]. Received: density=1.5"),
        (
            {"density": float("nan")},
            r"`density` must be a number in \(0, 1\]. Received: density=nan",
        ),
        ({"select": "sort"}, r"must be one of .*Received: 'sort'"),
        ({"wire_dtype": "int8"}, r"`wire_dtype` must be None or .*Received: wire_dtype='int8'"),
        ({"momentum": 1.0}, r"`momentum` must be a number in \[0, 1\). Received: momentum=1.0"),
        (
            {"warmup_steps": -1},
            r"`warmup_steps` must be a finite number >= 0. Received: warmup_steps=-1",
        ),
        (
            {"min_elements": -1},
            r"`min_elements` must be a finite number >= 0. Received: min_elements=-1",
        ),
    ],
)
def test_invalid_options_of_sparse_schemes_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**options)


@pytest.mark.parametrize("kind", SPARSE)
def test_state_of_another_layout_is_refused(kind):
    scheme = kind()
    state = contract.fresh_state(scheme, 101, Topology(0, LAYOUTS["2x2"]))
    wrong = (state[0], state[1][:-1])
    wire = InProcessWire(Cluster(LAYOUTS["1"]), 0)
    with pytest.raises(
        ValueError, match=r"must match this rank's shard, .*Received: shapes .*for this layout"
    ):
        scheme.exchange(tf.zeros([101]), wrong, wire, "x")


def test_buckets_longer_than_int32_indices_allow_are_refused():
    with pytest.raises(ValueError, match=r"at most 2\^31 elements, .* int32. Received: 2147483649"):
        schemes.TopK().slots(2**31 + 1, Topology(0, LAYOUTS["2x2"]))


def test_hierarchical_top_k_sends_the_bytes_of_its_docstring():
    """The values are those of Shi et al. 2021, Eq. 7, 9 and 10, with indices in addition."""
    m, n, d = 16, 8, 16 * 8 * 10_000
    topology = Topology.regular(5, m * n, n)
    cost = schemes.HiTopK(density=0.01).cost(d, 4, topology)
    k = 0.01 * d / n
    assert cost.cross_bytes == 8 * (m - 1) * k
    assert cost.node_bytes == 4 * (n - 1) * d / n + 8 * (n - 1) * m * k
    halves = schemes.HiTopK(density=0.01, wire_dtype="bfloat16").cost(d, 4, topology)
    assert halves.cross_bytes == 6 * (m - 1) * k
    # With more pairs than values, the sums of the shards are gathered.
    cost = schemes.HiTopK(density=0.04).cost(d, 4, topology)
    assert cost.node_bytes == 2 * 4 * (n - 1) * d / n
    flat = schemes.TopK(density=0.001).cost(d, 4, topology)
    assert flat.bytes == 8 * (m * n - 1) * 0.001 * d


@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_exchanges_without_savings_are_dense_and_noted(kind):
    topology = Topology(0, LAYOUTS["2x2"])
    dense = kind(density=0.6)
    assert "more bytes for index-value pairs than for all values: sent densely" in dense.note(
        5000, topology
    )
    assert kind(density=0.01).note(5000, topology) == ""
    assert (
        dense.cost(5000, 4, topology).cross_bytes
        <= 1.01 * kind(density=0.5).cost(5000, 4, topology).cross_bytes
    )


def test_warm_up_ends_at_the_density():
    scheme = schemes.TopK(density=0.01, warmup_steps=4, select="exact")
    state = contract.fresh_state(scheme, 1000, Topology(0, LAYOUTS["2x1"]))

    def exchange(wire):
        nonzero, own = [], state
        for step in range(6):
            gradient = np.random.default_rng([step, 0]).normal(size=1000).astype("float32")
            mean, own = scheme.exchange(tf.constant(gradient), own, wire, f"x.{step}")
            nonzero.append(np.count_nonzero(mean))
        return nonzero

    for nonzero in Cluster(LAYOUTS["2x1"]).run(exchange):
        # The gradients of both ranks are equal, and the densities are 1, 0.32, 0.1, 0.03, 0.01 and
        # 0.01.
        assert nonzero == [1000, 316, 100, 32, 10, 10]


@pytest.mark.parametrize("scheme", [schemes.AllReduce, schemes.AllToAll, schemes.Torus2D])
def test_unknown_wire_dtype_is_refused(scheme):
    with pytest.raises(
        ValueError, match=r"`wire_dtype` must be None or .*Received: wire_dtype='int8'"
    ):
        scheme(wire_dtype="int8")


@pytest.mark.parametrize(
    "scheme", [schemes.AllReduce, schemes.AllToAll, schemes.Torus2D], ids=lambda scheme: scheme.name
)
def test_float16_means_do_not_overflow_in_partial_sums(scheme):
    large = scheme(wire_dtype="float16")

    def exchange(wire):
        return large.exchange(tf.fill([40], 4e4), (), wire, "large")[0]

    for mean in Cluster(LAYOUTS["2x2"]).run(exchange):
        np.testing.assert_allclose(mean, np.full(40, 4e4), rtol=1e-3)


def test_all_reduce_refuses_bfloat16_with_an_alternative():
    with pytest.raises(ValueError, match=r'Use AllToAll\(wire_dtype="bfloat16"\)'):
        schemes.AllReduce(wire_dtype="bfloat16")


def test_schemes_print_only_non_default_options():
    assert str(schemes.Torus2D()) == "torus2d"
    assert str(schemes.AllToAll(wire_dtype="float16")) == "alltoall(wire_dtype=float16)"

"""The redistribution of sparse schemes' state to other ranks preserves sums over ranks."""

import json
from dataclasses import asdict

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfposeidon as tp
from tests.in_process import Cluster, InProcessWire
from tfposeidon import schemes
from tfposeidon.communication.topology import Topology
from tfposeidon.exchange.exchanger import Exchanger
from tfposeidon.exchange.plan import make_plan
from tfposeidon.gradients import Description
from tfposeidon.policies import Uniform
from tfposeidon.state.placement import Placement, StateDescription, redistribute

LAYOUTS = {
    "1x1": ((0,),),
    "2x1": ((0,), (1,)),
    "1x2": ((0, 1),),
    "2x2": ((0, 1), (2, 3)),
    "2+1": ((0, 1), (2,)),
    "3x2": ((0, 1), (2, 3), (4, 5)),
}
SIZES = (300, 7, 64, 501, 300)
# Two inner models may have layers with the same path.
VARIABLES = [
    Description(path=f"layer_{i % 4}/kernel", shape=(n,), dtype="float32")
    for i, n in enumerate(SIZES)
]


def _exchanger(scheme, nodes, rank, bucket_bytes):
    plan = make_plan(VARIABLES, Uniform(scheme), Topology(rank, nodes), bucket_bytes)
    return Exchanger(plan, InProcessWire(Cluster(nodes), rank))


def _states(scheme, nodes, bucket_bytes):
    """Returns the descriptions and variables of every rank."""
    ranks = range(Topology(0, nodes).size)
    exchangers = [_exchanger(scheme, nodes, rank, bucket_bytes) for rank in ranks]
    return [
        list(zip(e.states.describe(), [v for b in e.states.variables for v in b], strict=True))
        for e in exchangers
    ]


def _totals(states):
    """Returns the sum over all ranks of each quantity and variable."""
    result = {}
    for state in states:
        for piece, array in state:
            for key, elements, inside, place in piece.overlaps(array.size):
                result.setdefault(key, np.zeros(elements))[inside] += array[place]
    return result


@pytest.mark.parametrize("scheme", [schemes.HiTopK, schemes.TopK])
@pytest.mark.parametrize("after", LAYOUTS)
@pytest.mark.parametrize("before", LAYOUTS)
def test_sums_survive_any_change_of_layout(scheme, before, after):
    scheme = scheme(momentum=0.9, min_elements=0)
    generator = np.random.default_rng(0)
    saved = []
    for state in _states(scheme, LAYOUTS[before], 1600):
        arrays = [
            7 if piece.scalar else generator.integers(-999, 999, v.shape) for piece, v in state
        ]
        saved.append(
            [(p, np.asarray(a, "float32")) for (p, _), a in zip(state, arrays, strict=True)]
        )
    # The buckets differ, too, but the state depends only on the variables.
    wanted = [[(p, v.numpy()) for p, v in state] for state in _states(scheme, LAYOUTS[after], 400)]
    new = [list(zip([p for p, _ in w], redistribute(saved, w), strict=True)) for w in wanted]
    before_totals, after_totals = _totals(saved), _totals(new)
    assert len(before_totals) == 2 * len(VARIABLES)
    for key, total in before_totals.items():
        assert np.abs(total).max() > 0
        np.testing.assert_allclose(after_totals[key], total, rtol=1e-5, atol=1e-3)
    numbers = [float(a) for state in new for p, a in state if p.scalar]
    assert len(numbers) > len(LAYOUTS[after])
    assert set(numbers) == {7.0}


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2), (2, 6), (4, 4)])
def test_whole_arrays_are_divided_among_ranks(before, after):
    gradient, counter = (
        StateDescription(name="accumulated_0", placement=Placement.PARTIAL, owners=after),
        StateDescription(name="accumulated_1"),
    )
    saved = [[(gradient, np.full(3, rank + 1.0)), (counter, np.int64(5))] for rank in range(before)]
    parts = [
        redistribute(saved, [(gradient, np.zeros(3)), (counter, np.int64(0))]) for _ in range(after)
    ]
    np.testing.assert_allclose(np.sum([p[0] for p in parts], axis=0), sum(range(1, before + 1)))
    assert all(p[1] == 5 for p in parts)


def test_state_without_a_matching_scheme_is_refused():
    piece = StateDescription(
        name="residual", members=(("dense/kernel", 4),), placement=Placement.PARTIAL, owners=1
    )
    with pytest.raises(
        ValueError,
        match=r"the snapshot holds `residual` of dense/kernel, but the current scheme .*no",
    ):
        redistribute([[(piece, np.ones(4))]], [])


def test_scalars_follow_the_variables_of_their_bucket():
    """The order of buckets may differ, and must not assign a scalar to another bucket."""
    a, b = (StateDescription(name="steps", members=((path, 4),), scalar=True) for path in "ab")
    both = StateDescription(name="steps", members=(("a", 4), ("b", 4)), scalar=True)
    new = StateDescription(name="steps", members=(("c", 4),), scalar=True)
    saved = [[(a, np.float32(3)), (b, np.float32(5))]]
    shaped = np.float32(0)
    assert redistribute(saved, [(b, shaped), (a, shaped), (new, shaped)]) == [5, 3, 0]
    with pytest.raises(
        ValueError, match="variables of one bucket had different steps: 3 of a, 5 of b"
    ):
        redistribute(saved, [(both, shaped)])
    assert redistribute([[(both, np.float32(2))]], [(b, shaped), (a, shaped)]) == [2, 2]


def test_replicated_state_follows_its_list_of_variables():
    """The order of the lists has no effect. Numbered lists of old checkpoints become zeros."""
    lists = {"ab": (("a", 4), ("b", 2)), "c": (("c", 3),), "ba": (("b", 2), ("a", 4))}
    seen = {name: StateDescription(name="had_gradient", members=m) for name, m in lists.items()}
    saved = [(seen["ab"], np.array([1.0, 0.0])), (seen["c"], np.array([1.0]))]
    wanted = [(seen["c"], np.zeros(1)), (seen["ba"], np.zeros(2)), (seen["ab"], np.zeros(2))]
    for ranks in (1, 3):
        new = [array.tolist() for array in redistribute([saved] * ranks, wanted)]
        assert new == [[1.0], [0.0, 0.0], [1.0, 0.0]]
    old = [(StateDescription(name="seen_0"), np.array([1.0, 1.0]))]
    assert redistribute([old], wanted[2:])[0].tolist() == [0.0, 0.0]


def test_learning_rates_are_described_by_their_variables_in_any_order():
    def rates(order):
        scheme = schemes.HiTopK(momentum=0.9, min_elements=0)
        optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(1.0), scheme)
        lists = {name: [tf.Variable(tf.zeros([3]), name=name)] for name in "ab"}
        optimizer.build([*lists["a"], *lists["b"]])
        for name in order:
            optimizer.inner_optimizer.learning_rate = {"a": 0.5, "b": 0.25}[name]
            optimizer.apply([tf.ones([3])], lists[name])
        names = ("effective_rate", "had_gradient")
        return {d: v.numpy().tolist() for v, d in optimizer.rank_state if d.name in names}

    assert rates("ab") == rates("ba")
    assert sorted(value for value in rates("ab").values() if isinstance(value, float)) == [
        0.25,
        0.5,
    ]


def test_equal_paths_in_two_lists_are_distinct():
    scheme = schemes.TopK(min_elements=0)
    optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(1.0), scheme)
    both = [keras.Variable(tf.zeros([3]), name="kernel") for _ in range(2)]
    optimizer.build(both)
    for variable in both:
        optimizer.apply([tf.ones([3])], [variable])
    found = [d.members for _, d in optimizer.rank_state if d.name == "residual"]
    assert found == [(("kernel", 3),), (("kernel#1", 3),)]


def test_descriptions_survive_json():
    piece = StateDescription(
        name="residual",
        members=(("a", 4), ("b", 2)),
        offset=3,
        placement=Placement.PARTIAL,
        owners=2,
    )
    assert StateDescription.from_dict(json.loads(json.dumps(asdict(piece)))) == piece


def test_averaged_state_becomes_the_mean_and_local_state_is_reset():
    slot = StateDescription(name="inner 0", placement=Placement.AVERAGED)
    own = StateDescription(name="local 1", placement=Placement.LOCAL)
    saved = [
        [(slot, np.array([2.0, 4.0], "float32")), (own, np.array([rank, 1], "int64"))]
        for rank in range(2)
    ]
    saved[1][0] = slot, np.array([4.0, 8.0], "float32")
    wanted = [(slot, np.zeros(2, "float32")), (own, np.ones(2, "int64"))]
    mean, forgotten = redistribute(saved, wanted)
    np.testing.assert_array_equal(mean, np.array([3.0, 6.0], "float32"))
    np.testing.assert_array_equal(forgotten, np.zeros(2, "int64"))
    assert StateDescription.from_dict(json.loads(json.dumps(asdict(own)))) == own

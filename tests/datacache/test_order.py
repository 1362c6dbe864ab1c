"""An epoch has every sample once, on any number of ranks and from any position."""

import json

import numpy as np
import pytest

from datacache import Order, Position

START = Position()
SIZES = [(1, 1), (7, 4), (64, 8), (65, 8), (71, 8), (1000, 48)]


def _epoch(order, ranks, position=START):
    """Returns a list of shares for each rank."""
    return [[share for share, _ in order.shares(position, rank, ranks)] for rank in range(ranks)]


def _union(shares):
    return np.sort(np.concatenate([share for rank in shares for share in rank]))


@pytest.mark.parametrize(("samples", "batch"), SIZES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_sample_is_read_once_in_the_expected_steps(samples, batch, ranks):
    order = Order(samples=samples, global_batch=batch, seed=3)
    if min(samples, batch) < ranks:
        with pytest.raises(
            ValueError, match=r"Every rank must get a sample at each step. Received: global_batch="
        ):
            _epoch(order, ranks)
        return
    shares = _epoch(order, ranks)
    np.testing.assert_array_equal(_union(shares), np.arange(samples))
    assert {len(mine) for mine in shares} == {order.steps(Position(), ranks)}
    for step in zip(*shares, strict=True):
        lengths = [len(share) for share in step]
        assert min(lengths) >= 1
        assert max(lengths) - min(lengths) <= 1
        assert sum(lengths) < batch + ranks


def test_the_order_does_not_depend_on_ranks():
    order = Order(samples=96, global_batch=12, seed=1)
    alone = _epoch(order, 1)[0]
    for ranks in (2, 3, 4):
        together = [np.concatenate(step) for step in zip(*_epoch(order, ranks), strict=True)]
        np.testing.assert_array_equal(together, alone)


def test_orders_differ_between_epochs_and_seeds_and_are_reproducible():
    permutations = [
        Order(samples=50, global_batch=5, seed=seed).permutation(epoch)
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    for i, one in enumerate(permutations):
        assert all((one != other).any() for other in permutations[i + 1 :])
    np.testing.assert_array_equal(
        permutations[3], Order(samples=50, global_batch=5, seed=1).permutation(1)
    )
    # The order is the same on every machine, and with every version of NumPy.
    assert Order(samples=8, global_batch=2).permutation(0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]


def test_each_position_is_equally_likely():
    """Applies a chi-square test to the index of sample 0 in 8000 epochs of 8 samples.

    The limit is the 99.99 % quantile of the chi-square distribution with 7 degrees of freedom.
    """
    order = Order(samples=8, global_batch=8)
    places = np.bincount(
        [np.argmin(order.permutation(epoch)) for epoch in range(8000)], minlength=8
    )
    assert ((places - 1000) ** 2 / 1000).sum() < 29.9


@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_the_order_resumes_at_every_step_on_other_ranks(before, after):
    order = Order(samples=101, global_batch=12, seed=9)
    steps = [list(order.shares(Position(), rank, before)) for rank in range(before)]
    for step in range(len(steps[0]) - 1):
        positions = {rank[step][1] for rank in steps}
        assert len(positions) == 1, "all ranks must have the same position"
        text = json.dumps(order.state_dict(positions.pop()))
        assert len(text) < 100
        position = order.load_state_dict(json.loads(text))
        used = [share for rank in steps for share, _ in rank[: step + 1]]
        rest = _epoch(order, after, position)
        np.testing.assert_array_equal(_union([used, *rest]), np.arange(101))
    assert steps[0][-1][1] == Position(epoch=1)


def test_invalid_orders_are_refused():
    with pytest.raises(ValueError, match=r"`samples` must be an integer >= 1.*=0"):
        Order(samples=0, global_batch=1)
    with pytest.raises(ValueError, match=r"`seed` must be an integer >= 0.*=-1"):
        Order(samples=1, global_batch=1, seed=-1)
    state = Order(samples=10, global_batch=2).state_dict(Position())
    with pytest.raises(
        ValueError, match=r"Received: number of samples 11, and 10 in the saved state"
    ):
        Order(samples=11, global_batch=2).load_state_dict(state)
    with pytest.raises(ValueError, match=r"Received: seed 5, and 0 in the saved state"):
        Order(samples=10, global_batch=2, seed=5).load_state_dict(state)
    with pytest.raises(ValueError, match=r"Received: `shuffle` False, and True in the saved state"):
        Order(samples=10, global_batch=2, shuffle=False).load_state_dict(state)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_positions_after_steps_equal_those_of_an_iteration(ranks):
    order = Order(samples=41, global_batch=6, seed=2)
    steps = [
        after for epoch in range(3) for _, after in order.shares(Position(epoch=epoch), 0, ranks)
    ]
    for count in range(1, len(steps) + 1):
        assert order.after(Position(), count, ranks) == steps[count - 1]
        assert order.after(steps[0], count - 1, ranks) == steps[count - 1]
    assert order.after(Position(epoch=4, samples=6), 0, ranks) == Position(epoch=4, samples=6)

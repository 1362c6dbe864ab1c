"""`ElasticAveraging` in one process: its arguments, its configuration, and what it is refused."""

import keras
import numpy as np
import pytest

import tfposeidon as tp
from tests.on_ranks import models
from tfposeidon.asynchronous.server import ServedCentre
from tfposeidon.asynchronous.swap import swap_as_server, swap_as_worker
from tfposeidon.communication import runtime
from tfposeidon.communication.group_wire import GroupWire
from tfposeidon.communication.topology import Topology


def _sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "`every` must be a whole number from 1. Received: every=0"),
        ({"alpha": 0.0}, r"`alpha` must be a number in \(0, 1\]. Received: alpha=0.0"),
        ({"alpha": 1.5}, "Received: alpha=1.5"),
        ({"server_alpha": -1}, "`server_alpha` must be a number in"),
    ],
)
def test_arguments_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        tp.ElasticAveraging(_sgd(), **arguments)


def test_averages_over_steps_are_refused():
    with pytest.raises(ValueError, match="ElasticAveraging cannot average weights over steps"):
        tp.ElasticAveraging(keras.optimizers.SGD(use_ema=True))


def test_unknown_arguments_are_refused():
    with pytest.raises(TypeError, match="compression"):
        tp.ElasticAveraging(_sgd(), compression="fp16")


def test_one_rank_is_refused_when_it_trains():
    model = models.mlp()
    model.compile(tp.ElasticAveraging(_sgd()), models.LOSS)
    with pytest.raises(ValueError, match="a server and a worker at least"):
        model.fit(*models.mlp.data(8), verbose=0)


@pytest.mark.parametrize(
    ("rank", "size", "message"),
    [
        (-1, 4, "whole number from 0"),
        (4, 4, "one of the 4 ranks"),
        (0, 1, "A server needs workers"),
    ],
)
def test_server_ranks_that_are_refused(rank, size, message):
    with pytest.raises(ValueError, match=message):
        runtime._check_server_rank(rank, size)


def test_models_are_saved_and_loaded_on_one_rank(tmp_path):
    model = models.mlp()
    made = tp.ElasticAveraging(_sgd(), every=7, alpha=0.25, server_alpha=0.5)
    model.compile(made, models.LOSS)
    made.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras").optimizer
    expected = {"every": 7, "alpha": 0.25, "server_alpha": 0.5}
    assert {name: loaded.get_config()[name] for name in expected} == expected
    # An evaluation needs neither server nor launcher.
    model.evaluate(*models.mlp.data(8), verbose=0)


class _PairOfOne:
    """Both sides of a pair in one process: what was given first is added to what comes next."""

    def __init__(self):
        self.topology = Topology(0, ((0,), (1,)))
        self.given = []

    def all_reduce(self, tensor, group, name, scale=1.0):
        self.given.append(tensor)
        return sum(self.given[-2:])


@pytest.mark.parametrize("steps", [0, 5, 2**24 + 1, 2**30 + 7])
def test_a_swap_tells_both_sides_the_same(steps):
    values, centre = np.float32([3, 5]), np.float32([1, 1])
    pair = _PairOfOne()
    swap_as_worker(pair, values, True, steps)
    found = swap_as_server(pair, centre, True)
    assert found.difference.numpy().tolist() == [2, 4]
    assert (found.counts, found.steps, found.stops) == (True, steps, True)


def test_values_that_do_not_count_leave_the_centre():
    pair, centre = _PairOfOne(), ServedCentre(np.float32([1, 1]), alpha=0.5)
    swap_as_worker(pair, np.float32([np.nan, 0]), False, 3)
    found = centre.swap(pair, False)
    assert not found.counts
    assert centre.values.numpy().tolist() == [1, 1]
    # The worker finds the centre there.
    assert (-found.difference).numpy().tolist() == [1, 1]


def test_some_ranks_as_a_job_of_their_own():
    class _World:
        topology = Topology(3, ((0, 1), (2, 3)))

    assert GroupWire(_World(), (0, 3)).topology == Topology(1, ((0,), (1,)))
    assert GroupWire(_World(), (2, 3)).topology == Topology(1, ((0, 1),))
    assert GroupWire(_World(), [3]).topology == Topology(0, ((0,),))

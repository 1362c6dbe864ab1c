"""Tests `ElasticAveraging` in one process: its arguments, configuration, and refused uses."""

import collections
import types

import keras
import pytest
import tensorflow as tf

import tfposeidon as tp
from tests.helpers import models
from tfposeidon.communication import runtime, start
from tfposeidon.communication.topology import Topology
from tfposeidon.communication.wire import GroupWire, HorovodWire
from tfposeidon.elastic_averaging.calls import (
    Call,
    Request,
    make_call,
    send,
    sum_of_both,
    wait_for_call,
)
from tfposeidon.elastic_averaging.server import Served


def _sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sync_every": 0}, "`sync_every` must be an integer >= 1. Received: sync_every=0"),
        ({"alpha": 0.0}, r"`alpha` must be a number in \(0, 1\]. Received: alpha=0.0"),
        ({"alpha": 1.5}, "Received: alpha=1.5"),
        ({"server_alpha": -1}, "`server_alpha` must be a number in"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tp.ElasticAveraging(_sgd(), **arguments)


def test_moving_averages_of_weights_are_refused():
    with pytest.raises(ValueError, match="ElasticAveraging does not support use_ema"):
        tp.ElasticAveraging(keras.optimizers.SGD(use_ema=True))


def test_unknown_arguments_are_refused():
    with pytest.raises(TypeError, match="compression"):
        tp.ElasticAveraging(_sgd(), compression="fp16")


def test_training_on_one_rank_is_refused():
    model = models.mlp()
    model.compile(tp.ElasticAveraging(_sgd()), models.LOSS)
    with pytest.raises(ValueError, match="a server and at least one worker"):
        model.fit(*models.mlp.data(8), verbose=0)


@pytest.mark.parametrize(
    ("rank", "size", "message"),
    [
        (-1, 4, "an integer >= 0"),
        (4, 4, "one of two or more ranks. Received: server_rank=4 in a job of 4"),
        (0, 1, "one of two or more ranks. Received: server_rank=0 in a job of 1"),
    ],
)
def test_invalid_server_ranks_are_refused(rank, size, message):
    with pytest.raises(ValueError, match=message):
        start.check_server_rank(rank, size)


def test_models_are_saved_and_loaded_on_one_rank(tmp_path):
    model = models.mlp()
    made = tp.ElasticAveraging(_sgd(), sync_every=7, alpha=0.25, server_alpha=0.5)
    model.compile(made, models.LOSS)
    made.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras").optimizer
    expected = {"sync_every": 7, "alpha": 0.25, "server_alpha": 0.5}
    assert {name: loaded.get_config()[name] for name in expected} == expected
    # Evaluation needs neither a server nor a launcher.
    model.evaluate(*models.mlp.data(8), verbose=0)


class _PairOfOne:
    """Simulates both sides of a pair: a collective combines the last two values."""

    def __init__(self):
        self.topology = Topology(0, ((0,), (1,)))
        self._given = collections.defaultdict(list)

    def all_reduce(self, tensor, group, name, scale=1.0):
        self._given[name].append(tensor)
        return sum(self._given[name][-2:])

    def all_gather(self, tensor, group, name):
        self._given[name].append(tensor)
        return tf.concat(self._given[name][-2:], 0)


def test_the_global_weights_gain_alpha_times_the_difference():
    pair, served = _PairOfOne(), Served(tf.constant([1.0, 1.0]), 0.5, tf.zeros([0]))
    sum_of_both(pair, tf.constant([3.0, 5.0]), "tp.swap")
    served.swap(pair)
    assert served.center.numpy().tolist() == [2, 3]


@pytest.mark.parametrize("request_", Request)
@pytest.mark.parametrize("number", [0, 3])
def test_a_call_contains_its_kind_and_the_servers_request(number, request_):
    pair = _PairOfOne()
    make_call(pair, Call.TAKE, number)
    assert wait_for_call(pair, request_) == (Call.TAKE, number)
    # The worker's side joins the same sum.
    assert make_call(pair, Call.SWAP) is request_


def test_the_server_averages_the_newest_optimizer_states():
    served = Served(tf.zeros([1]), 0.5, tf.constant([9.0]))
    assert served.state.numpy().tolist() == [9]
    for worker, value, mean in ((1, 2.0, 2), (2, 4.0, 3), (1, 7.0, 7), (2, 5.0, 6)):
        pair = _PairOfOne()
        send(pair, tf.constant([value]), "tp.slots")
        served.receive_state(pair, worker)
        assert served.state.numpy().tolist() == [mean]


def test_reading_settings_does_not_initialize_the_job(monkeypatch):
    monkeypatch.setattr(runtime, "_wire", None)
    optimizer = tp.ElasticAveraging(_sgd())
    optimizer.build([keras.Variable([1.0])])
    assert optimizer.variables
    for read in (lambda: optimizer.alpha, lambda: optimizer.server_alpha, lambda: optimizer.plan):
        with pytest.raises(RuntimeError, match=r"Call tfposeidon.init\(server_rank=0\) first"):
            read()
    assert tp.ElasticAveraging(_sgd(), alpha=0.5).server_alpha == 0.5
    assert not runtime.has_begun()


def test_a_second_concurrent_training_is_refused():
    optimizer = tp.ElasticAveraging(_sgd())
    optimizer.build([keras.Variable([1.0])])
    optimizer.check_detached()
    optimizer.attach(types.SimpleNamespace(), 0)
    with pytest.raises(RuntimeError, match="still trains with the server"):
        optimizer.check_detached()
    optimizer.detach()
    optimizer.check_detached()


def test_a_group_of_ranks_has_its_own_topology():
    world = HorovodWire(Topology(3, ((0, 1), (2, 3))), {})
    assert GroupWire(world, (0, 3)).topology == Topology(1, ((0,), (1,)))
    assert GroupWire(world, (2, 3)).topology == Topology(1, ((0, 1),))
    assert GroupWire(world, [3]).topology == Topology(0, ((0,),))

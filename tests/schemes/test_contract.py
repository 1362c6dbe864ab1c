"""Checks the contract of all schemes on real ranks."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import contract
from tests.helpers import counting
from tests.helpers.training import SERVED, distributed

pytestmark = [
    pytest.mark.ranks("2", "2x2", core=True),
    pytest.mark.ranks("2x2", launcher="mpirun"),
]


def test_the_contract_holds_in_traced_functions(wire):
    """TensorFlow must neither fold nor merge collectives in a graph."""

    def compiled(function, *args):
        return tf.function(function, reduce_retracing=True, autograph=False)(*args)

    for scheme in contract.SCHEMES:
        for length in (1, 64):
            mean = contract.check(scheme, length, wire, run=compiled)
            _check_same_bits(mean, wire)


@pytest.mark.ranks("2", "2x2", core=True)
@pytest.mark.ranks("2+1")
@pytest.mark.ranks("2x2", launcher="mpirun")
def test_the_contract_holds_on_every_layout(wire):
    for scheme in contract.SCHEMES:
        for length in contract.LENGTHS:
            _check_same_bits(contract.check(scheme, length, wire), wire)


@pytest.mark.ranks("2x2", core=True)
@pytest.mark.ranks("2x2", launcher="mpirun")
def test_constant_gradients_are_exchanged(wire):
    """TensorFlow must not treat the exchanged gradient of a linear loss as a constant."""
    for scheme in (*(scheme for scheme, _ in contract.SCHEMES.values() if scheme.exact), SERVED):
        _check_constant_gradient(scheme)


def _check_constant_gradient(scheme):
    weight = keras.Variable(np.zeros(40, "float32"), name="weight")
    optimizer = distributed(keras.optimizers.SGD(1.0), scheme=scheme)
    step = tf.function(lambda: optimizer.apply([tf.ones(40)], [weight]), autograph=False)
    step()
    weight.assign(weight + 7.0)
    step()
    np.testing.assert_array_equal(weight.numpy(), 5.0, str(scheme))


def _check_same_bits(array, wire):
    everybody = wire.all_gather(
        tf.constant(array[None]), wire.topology.world, "contract/compare"
    ).numpy()
    for other in everybody:
        np.testing.assert_array_equal(other, everybody[0])


@pytest.mark.ranks("2+1", own_network=True)
def test_the_loopback_carries_the_predicted_bytes(wire):
    """The tolerance is for packet headers; test_bytes.py tests 2 x 2 ranks."""
    ranks = range(wire.topology.size)
    counting.check(
        wire, {"lo": lambda cost: sum(cost(wire.topology.seen_from(r)).bytes for r in ranks)}
    )

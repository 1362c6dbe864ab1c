"""The contract table on real ranks, in graphs, where TensorFlow could fold or merge collectives."""

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from tests import contract
from tests.on_ranks import counting
from tfposeidon import DistributedOptimizer
from tfposeidon.schemes import ShardedServer


def case_contract(wire):
    compiled = lambda function, *args: tf.function(function, reduce_retracing=True)(*args)  # noqa: E731
    for scheme in contract.SCHEMES:
        for length in contract.LENGTHS:
            mean = contract.check(scheme, length, wire, run=compiled)
            _check_same_bits(mean, wire)


def case_contract_eager(wire):
    for scheme in contract.SCHEMES:
        _check_same_bits(contract.check(scheme, 10_007, wire), wire)


def case_constant_gradients(wire):
    """Those of a linear loss: TensorFlow must not take a collective's result for a constant."""
    served = ShardedServer(update="server", pair_bytes=256)
    for scheme in (*(scheme for scheme, _ in contract.SCHEMES.values() if scheme.exact), served):
        _check_constant_gradient(scheme)


def _check_constant_gradient(scheme):
    weight = keras.Variable(np.zeros(40, "float32"), name="weight")
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), scheme=scheme)
    step = tf.function(lambda: optimizer.apply([tf.ones(40)], [weight]))
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


def case_bytes_on_the_wire(wire):
    """Checks that the loopback carries what `cost` says, within headers; MPI uses shared memory."""
    if hvd.mpi_enabled():
        return
    ranks = range(wire.topology.size)
    counting.check(
        wire, "lo", lambda cost: sum(cost(wire.topology.seen_from(r)).bytes for r in ranks)
    )

"""The contract table on real ranks, in graph mode, where TensorFlow could fold or merge collectives."""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from tests import contract
from tests.on_ranks import counting


def case_contract(wire):
    compiled = lambda function, *args: tf.function(function, reduce_retracing=True)(*args)  # noqa: E731
    for scheme in contract.SCHEMES:
        for length in contract.LENGTHS:
            mean = contract.check(scheme, length, wire, run=compiled)
            _check_same_bits(mean, wire)


def case_contract_eager(wire):
    for scheme in contract.SCHEMES:
        _check_same_bits(contract.check(scheme, 10_007, wire), wire)


def _check_same_bits(array, wire):
    everybody = wire.all_gather(tf.constant(array[None]), wire.topology.world, "contract/compare").numpy()
    for other in everybody:
        np.testing.assert_array_equal(other, everybody[0])


def case_bytes_on_the_wire(wire):
    """What the loopback carries is what `cost` says, within the headers of packets. MPI uses shared memory."""
    if hvd.mpi_enabled():
        return
    ranks = range(wire.topology.size)
    counting.check(wire, "lo", lambda cost: sum(cost(wire.topology.seen_from(r)).bytes for r in ranks))

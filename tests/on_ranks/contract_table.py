"""The contract table on real ranks, in graph mode, where TensorFlow could fold or merge collectives."""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from tests import contract
from tfposeidon.wire import exchange_objects


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
    length, repeats = 2**21, 3
    vector = tf.constant(contract.gradient(length, wire.topology.rank))
    for name, (scheme, _) in contract.SCHEMES.items():
        label = f"bytes.{name}".replace(" ", "_")
        exchange = tf.function(lambda x, scheme=scheme, label=label: scheme.exchange(x, (), wire, label)[0])
        exchange(vector)
        exchange_objects(None, wire, "ready")
        before = _loopback_bytes()
        for _ in range(repeats):
            exchange(vector)
        exchange_objects(None, wire, "done")
        carried = (_loopback_bytes() - before) / repeats
        ranks = range(wire.topology.size)
        expected = sum(scheme.cost(length, 4, wire.topology.seen_from(rank)).bytes for rank in ranks)
        assert abs(carried - expected) <= 0.03 * expected + 50_000, (
            f"{name}: {carried:.0f} B, expected {expected:.0f} B"
        )


def _loopback_bytes():
    with open("/sys/class/net/lo/statistics/tx_bytes") as stream:
        return int(stream.read())

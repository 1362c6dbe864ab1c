"""Bytes that an interface carries, beside what the schemes' costs say."""

import functools

import tensorflow as tf

from benchmarks.workers.task import payload_bytes
from tests import contract
from tfposeidon.wire import exchange_objects

LENGTH = 2**21
REPEATS = 3


def check(wire, interface, expect):
    """Exchanges by every scheme.

    Args:
      expect: From a scheme's cost, as a function of the topology, to the bytes that `interface` carries.
    """
    for name, (scheme, _) in contract.SCHEMES.items():
        label = f"bytes.{interface}.{name}".replace(" ", "_")
        vector = tf.constant(contract.gradient(LENGTH, wire.topology.rank))
        state = contract.settled_state(scheme, LENGTH, wire.topology)
        exchange = tf.function(lambda x, *state, scheme=scheme, label=label: scheme.exchange(x, state, wire, label)[0])
        exchange = functools.partial(exchange, vector, *state)
        exchange()
        exchange_objects(None, wire, "ready")
        before = payload_bytes(interface)
        for _ in range(REPEATS):
            exchange()
        exchange_objects(None, wire, "done")
        carried = (payload_bytes(interface) - before) / REPEATS
        expected = expect(functools.partial(scheme.cost, LENGTH, 4))
        assert abs(carried - expected) <= 0.03 * expected + 20_000, (
            f"{name} on {interface}: {carried:.0f} B, expected {expected:.0f} B"
        )

"""Bytes that an interface carries, beside what the schemes' costs say."""

import functools

import tensorflow as tf

from benchmarks.workers.task import payload_bytes
from tests import contract
from tfposeidon.wire import exchange_objects

LENGTH = 2**21
REPEATS = 3
TALK = 80_000
"""Bytes that Horovod's ranks tell each other in every cycle, more the longer an exchange takes on a busy machine."""


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
        # The least of some: what TCP sends again, where a rank had to wait for its processor, comes on top.
        carried = min(_carried(exchange, interface, wire) for _ in range(REPEATS))
        expected = expect(functools.partial(scheme.cost, LENGTH, 4))
        assert 0.97 * expected - 20_000 <= carried <= 1.03 * expected + TALK, (
            f"{name} on {interface}: {carried:.0f} B, expected {expected:.0f} B"
        )


def _carried(exchange, interface, wire):
    """Bytes of one exchange, counted between two points that all ranks have reached."""
    exchange_objects(None, wire, "ready")
    before = payload_bytes(interface)
    exchange_objects(None, wire, "counting")
    exchange()
    exchange_objects(None, wire, "done")
    return payload_bytes(interface) - before

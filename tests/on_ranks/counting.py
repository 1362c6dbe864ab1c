"""Bytes that an interface carries, beside what the schemes' costs say."""

import functools
from pathlib import Path

import tensorflow as tf

from tests import contract
from tfposeidon.wire import exchange_objects

LENGTH = 2**21
REPEATS = 3
HEADER_BYTES = 66
"""Ethernet, IP, and TCP with time stamps, of every packet as the interface counts it."""


def check(wire, interface, expect):
    """Exchanges by every scheme.

    Args:
      expect: From a scheme's cost, as a function of the topology, to the bytes that `interface` carries.
    """
    for name, (scheme, _) in contract.SCHEMES.items():
        label = f"bytes.{interface}.{name}".replace(" ", "_")
        vector = tf.constant(contract.gradient(LENGTH, wire.topology.rank))
        exchange = tf.function(lambda x, scheme=scheme, label=label: scheme.exchange(x, (), wire, label)[0])
        exchange(vector)
        exchange_objects(None, wire, "ready")
        before = payload_bytes(interface)
        for _ in range(REPEATS):
            exchange(vector)
        exchange_objects(None, wire, "done")
        carried = (payload_bytes(interface) - before) / REPEATS
        expected = expect(functools.partial(scheme.cost, LENGTH, 4))
        assert abs(carried - expected) <= 0.03 * expected + 20_000, (
            f"{name} on {interface}: {carried:.0f} B, expected {expected:.0f} B"
        )


def payload_bytes(interface):
    """What the interface has sent so far, without headers."""
    folder = Path("/sys/class/net") / interface / "statistics"
    sent, packets = (int((folder / name).read_text()) for name in ("tx_bytes", "tx_packets"))
    return sent - HEADER_BYTES * packets

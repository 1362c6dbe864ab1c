"""Compares the bytes that an interface carries with the costs of schemes."""

import dataclasses
import functools

import tensorflow as tf

from tests import contract
from tests.helpers.over_ranks import exchange_objects
from tfposeidon.lab.network import payload_bytes
from tfposeidon.schemes.sparse import SparseScheme

LENGTH = 2**21
TRIES = 10
DENSITY = 0.1
"""Density of sparse schemes, at which their bytes far exceed those of Horovod's own messages."""
TALK = 10_000
"""Bytes per rank of Horovod's own messages, which it sends in every cycle."""


def check(wire, expect):
    """Exchanges a vector by every scheme, and compares the bytes.

    Args:
      expect: Maps an interface to a function that computes its bytes. The function's argument
        maps a topology to the cost of a scheme.
    """
    for name, (scheme, _) in contract.SCHEMES.items():
        if isinstance(scheme, SparseScheme):
            scheme = dataclasses.replace(scheme, density=DENSITY)
        label = f"bytes.{name}".replace(" ", "_")
        vector = tf.constant(contract.gradient(LENGTH, wire.topology.rank))
        state = contract.settled_state(scheme, LENGTH, wire.topology)
        exchange = tf.function(
            lambda x, *state, scheme=scheme, label=label: scheme.exchange(x, state, wire, label)[0]
        )
        exchange = functools.partial(exchange, vector, *state)
        exchange()
        for interface, expected in expect.items():
            carried = expected(functools.partial(scheme.cost, LENGTH, 4))
            check_carried(exchange, interface, wire, carried, name)


def check_carried(exchange, interface, wire, expected, label, talk=0):
    """Compares the bytes of one exchange with the expected bytes, and returns them."""
    # Use the minimum of several tries, because TCP retransmits if a rank waits for its CPU.
    most = 1.02 * expected + TALK * wire.topology.size + talk
    carried = _carried(exchange, interface, wire)
    for _ in range(1, TRIES):
        if not any(exchange_objects(carried > most, wire, "above")):
            break
        carried = min(carried, _carried(exchange, interface, wire))
    assert 0.99 * expected - 20_000 <= carried <= most, (
        f"{label} on {interface}: {carried:.0f} B, expected {expected:.0f} B"
    )
    return carried


def _carried(exchange, interface, wire):
    """Returns the bytes of one exchange, counted between two synchronizations of all ranks."""
    exchange_objects(None, wire, "ready")
    before = payload_bytes(interface)
    exchange_objects(None, wire, "counting")
    exchange()
    exchange_objects(None, wire, "done")
    return payload_bytes(interface) - before

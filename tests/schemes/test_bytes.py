"""In the lab, loopbacks and links carry the bytes that were predicted for them."""

import pytest

from tests.helpers import counting

pytestmark = pytest.mark.ranks("2x2", lab="--inter 200mbit")


def _check(wire, interface, kind):
    node = wire.topology.node.ranks
    expected = lambda cost: sum(getattr(cost(wire.topology.seen_from(r)), kind) for r in node)  # noqa: E731
    counting.check(wire, interface, expected)


def test_bytes_on_the_link(wire):
    _check(wire, "eth0", "cross_bytes")


def test_bytes_on_the_loopback(wire):
    _check(wire, "lo", "node_bytes")

"""In the lab, loopbacks and links carry the bytes that were predicted for them."""

import pytest

from tests.helpers import counting

pytestmark = pytest.mark.ranks("2x2", lab="--inter 200mbit")


def test_bytes_on_the_link_and_on_the_loopback(wire):
    node = wire.topology.node.ranks

    def sums(kind):
        return lambda cost: sum(getattr(cost(wire.topology.seen_from(r)), kind) for r in node)

    counting.check(wire, {"eth0": sums("cross_bytes"), "lo": sums("node_bytes")})

"""In the lab, the loopback interface and the links carry the predicted bytes."""

import pytest

from tests.helpers import counting

pytestmark = pytest.mark.ranks("2x2", lab="--inter 200mbit")


def test_the_link_and_the_loopback_carry_the_predicted_bytes(wire):
    node = wire.topology.node.ranks

    def sums(kind):
        return lambda cost: sum(getattr(cost(wire.topology.seen_from(r)), kind) for r in node)

    counting.check(wire, {"eth0": sums("cross_bytes"), "lo": sums("node_bytes")})

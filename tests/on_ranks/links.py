"""In the lab, loopbacks and links carry the bytes that were predicted for them."""

from tests.on_ranks import counting


def case_bytes_on_the_link(wire):
    node = wire.topology.node.ranks
    counting.check(
        wire,
        "eth0",
        lambda cost: sum(cost(wire.topology.seen_from(rank)).cross_bytes for rank in node),
    )


def case_bytes_on_the_loopback(wire):
    node = wire.topology.node.ranks
    counting.check(
        wire,
        "lo",
        lambda cost: sum(cost(wire.topology.seen_from(rank)).node_bytes for rank in node),
    )

"""In the lab: what stays in a node goes over its loopback, what leaves it over its link, and both as predicted."""

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

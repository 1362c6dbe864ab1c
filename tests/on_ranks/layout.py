"""Nodes and groups on real ranks."""

import tfposeidon as tp
from tests.on_ranks.checks import Raises


def case_nodes_are_as_asked_for(wire):
    assert wire.topology.nodes == ((0, 1), (2, 3))
    assert tp.init(ranks_per_node=2) is wire.topology


def case_another_layout_is_refused(wire):
    with Raises(RuntimeError, "already runs as 4 rank.*2 x 2.*first tfposeidon.init"):
        tp.init(ranks_per_node=1)

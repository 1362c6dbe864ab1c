"""Tests topologies: their groups, invalid layouts, and printed text."""

import pytest

from tfposeidon.communication.topology import Group, Topology


def test_a_regular_layout_has_groups_within_and_across_nodes():
    topology = Topology.regular(5, 6, 2)
    assert topology.node == Group((4, 5))
    assert topology.across == Group((1, 3, 5))
    assert topology.groups() == tuple(map(Group, [(0, 1), (2, 3), (4, 5), (0, 2, 4), (1, 3, 5)]))


def test_larger_nodes_have_ranks_without_peers():
    topology = Topology.regular(1, 3, 2)
    assert topology.positions == 1
    assert topology.across is None
    assert topology.seen_from(2).across == Group((0, 2))


@pytest.mark.parametrize("nodes", [((0,),), ((0, 1, 2),), ((0,), (1,))])
def test_groups_of_all_ranks_create_no_process_set(nodes):
    assert Topology(0, nodes).groups() == ()


@pytest.mark.parametrize("nodes", [(), ((0, 1), (1,)), ((0,), (2,)), ((0,), ())])
def test_a_rank_on_no_node_or_two_nodes_is_refused(nodes):
    with pytest.raises(ValueError, match="each rank from 0 exactly once"):
        Topology(0, nodes)


def test_invalid_ranks_per_node_are_refused():
    with pytest.raises(
        ValueError,
        match=r"`ranks_per_node` must be an integer >= 1\. Received: ranks_per_node=0",
    ):
        Topology.regular(0, 4, 0)


def test_a_topology_prints_its_ranks_and_nodes():
    assert str(Topology.regular(0, 8, 4)) == "8 rank(s) on 2 node(s) (2 x 4)"
    assert str(Topology.regular(0, 3, 2)) == "3 rank(s) on 2 node(s) (2 + 1)"

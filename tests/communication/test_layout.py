"""Tests nodes and groups on real ranks."""

import pytest

import tfposeidon as tp
from tests.helpers.checks import Raises

pytestmark = [pytest.mark.ranks("2x2", core=True), pytest.mark.ranks("2x2", launcher="mpirun")]


def test_nodes_have_the_requested_layout(wire):
    assert wire.topology.nodes == ((0, 1), (2, 3))
    assert tp.init(ranks_per_node=2) is wire.topology


def test_another_layout_is_refused(wire):
    with Raises(RuntimeError, "already runs as 4 rank.*2 x 2.*first tfposeidon.init"):
        tp.init(ranks_per_node=1)

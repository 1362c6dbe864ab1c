"""Tests norms of variables whose parts are on different ranks."""

import numpy as np
import pytest
import tensorflow as tf

from tests.in_process import Cluster
from tfposeidon.communication.topology import Topology
from tfposeidon.sharded.scheme import sharded_norms

RANKS = 3


@pytest.mark.parametrize("scale", [1.0, 1e25, 1e-25])
def test_norms_of_parts_combine_to_the_norm_of_the_whole(scale):
    random = np.random.default_rng(0)
    whole = [(scale * random.normal(size=n)).astype("float32") for n in (192, 90)]
    expected = [np.linalg.norm(t.astype("float64")) for t in whole]

    def run(wire):
        mine = np.array_split(whole[0], RANKS)[wire.topology.rank]
        variables, rows = (
            ["in parts", "whole"],
            [[tf.constant(mine)] * 2, [tf.constant(whole[1])] * 2],
        )
        norms = sharded_norms(wire, lambda variable: variable == "in parts", "squares")
        return norms(variables, rows)

    results = Cluster(Topology.regular(0, RANKS, RANKS).nodes).run(run)
    for found in results:
        np.testing.assert_array_equal(found, results[0])
        np.testing.assert_allclose(found, np.transpose([expected] * 2), rtol=1e-6)

"""Tests the division of lists into parts, and the parallel tensor operator in one process."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.in_process import Cluster
from tfposeidon.communication.topology import Topology, balanced_parts, even_parts
from tfposeidon.exchange import parallel_operator
from tfposeidon.optimizers.layer_wise import local_norms

SHAPES = [(64, 3), (), (7, 5), (2, 2), (90,), (1, 1), (30, 30)]
TENSORS = [
    np.random.default_rng(i).normal(size=shape).astype("float32") for i, shape in enumerate(SHAPES)
]


def largest(sizes, cuts):
    return max(sum(sizes[begin:end]) for begin, end in itertools.pairwise([0, *cuts, len(sizes)]))


@pytest.mark.parametrize("parts", range(1, 8))
@pytest.mark.parametrize("seed", range(6))
def test_balanced_parts_have_the_smallest_possible_maximum(seed, parts):
    sizes = np.random.default_rng(seed).integers(0, 20, 7).tolist()
    cut = balanced_parts(sizes, parts)
    assert len(cut) == parts
    assert [cut[0][0], cut[-1][1]] == [0, 7]
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(cut))
    best = min(
        largest(sizes, cuts)
        for cuts in itertools.combinations_with_replacement(range(8), parts - 1)
    )
    assert max(sum(sizes[begin:end]) for begin, end in cut) == best


@pytest.mark.parametrize(("length", "parts"), [(0, 3), (2, 5), (7, 3), (12, 4)])
def test_even_parts_differ_by_at_most_one_element(length, parts):
    cut = even_parts(length, parts)
    sizes = [end - begin for begin, end in cut]
    assert sum(sizes) == length
    assert max(sizes) - min(sizes) <= 1
    assert [begin for begin, _ in cut[1:]] == [end for _, end in cut[:-1]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 16])
def test_parallel_norms_have_the_bits_of_one_rank(ranks):
    cluster = Cluster(Topology.regular(0, ranks, ranks).nodes)
    rows = [[tf.constant(t), tf.constant(2 * t)] for t in TENSORS]
    expected = local_norms(TENSORS, rows).numpy()
    for found in cluster.run(
        lambda wire: parallel_operator.parallel_norms(wire, "norms")(TENSORS, rows)
    ):
        np.testing.assert_array_equal(found, expected)
    # Each rank sends two numbers per layer to each other rank, and nothing else.
    assert sum(cluster.sent.values()) == 4 * 2 * len(TENSORS) * (ranks - 1)

"""Selects how the nodes of a job share the samples of a cache."""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Callable
from typing import Literal

from datacache.from_tfposeidon import exchange_objects, job_wire, require_equal
from datacache.levels.levels import Levels
from datacache.nodes.partitioned_reader import PartitionedReader
from datacache.nodes.reader import LocalReader, Reader
from datacache.pool.shard import owner_nodes

Partitioning = Literal["auto", "replicate", "split"]
# Numbers in the names of collectives. They are equal on all ranks, because ranks open the same
# caches in the same order.
_cache_numbers = itertools.count()


def choose_shard(
    fingerprint: str, fits: Callable[[int, int], bool], partition: Partitioning
) -> tuple[int, int]:
    """Returns the index of this node and the number of nodes that share the samples; collective.

    It returns (0, 1) if each node stores all samples.
    """
    wire = job_wire()
    if wire is None:
        return 0, 1
    node, nodes = wire.topology.node_index, len(wire.topology.nodes)
    is_asked = (
        partition == "auto" and nodes > 1 and wire.topology.rank == wire.topology.nodes[node][0]
    )
    answers = exchange_objects(
        [fingerprint, fits(node, nodes) if is_asked else True], wire, "tp.datacache"
    )
    require_equal(
        [theirs for theirs, _ in answers],
        "All ranks must open the same cache",
        "The fingerprint is computed from the source, `preprocess` and `version`. Check that all "
        "nodes have the same files with the same times, and run the same script.",
        lambda first, other: (f"fingerprint {first}", other),
        ValueError,
    )
    replicated = partition == "replicate" or (
        partition == "auto" and all(theirs for _, theirs in answers)
    )
    return (0, 1) if replicated or nodes == 1 else (node, nodes)


def open_reader(levels: Levels, samples: int, keeps_any: bool) -> Reader:
    """Opens the reader of this rank; all ranks must open the same caches in the same order."""
    wire = job_wire()
    # Without a store, the other node would produce a requested sample again each time.
    if wire is None or len(wire.topology.nodes) == 1 or not keeps_any:
        return LocalReader(levels)
    keep = levels.memory is not None and levels.memory.spec.shard.nodes == 1
    # Must be the seed of the stores' shards: the owner of a sample is the node with space for it.
    owners = owner_nodes(samples, len(wire.topology.nodes), seed=0)
    name = f"tp.datacache{next(_cache_numbers)}"
    partitioned = PartitionedReader(levels, wire, name, owners, keep)
    # Must be closed before Horovod shuts down, which would end the collectives of the exchange.
    atexit.register(partitioned.close_at_exit)
    return partitioned

"""How the nodes of a job share the samples of a cache."""

from __future__ import annotations

import atexit
import itertools
import sys
from collections.abc import Callable
from typing import Literal

from datacache.from_tfposeidon import exchange_objects, job_wire
from datacache.levels.levels import Levels
from datacache.nodes.partitioned_reader import PartitionedReader
from datacache.nodes.reader import LocalReader, Reader
from datacache.pool.shard import owner_nodes

Partitioning = Literal["auto", "replicate", "split"]
_numbers = itertools.count()


def shared_by(
    fingerprint: str, fits: Callable[[int, int], bool], partition: Partitioning
) -> tuple[int, int]:
    """Which of how many nodes keeps its part of the samples; node 0 of 1 where each keeps all.

    Args:
      fingerprint: Of the cache.
      fits: Whether all samples fit in memory on this of so many nodes; one rank of each is asked, where it matters.
      partition: As in `Cache`.

    Raises:
      ValueError: If ranks open different caches.
    """
    wire = job_wire()
    if wire is None:
        return 0, 1
    node, nodes = wire.topology.node_index, len(wire.topology.nodes)
    matters = (
        partition == "auto" and nodes > 1 and wire.topology.rank == wire.topology.nodes[node][0]
    )
    found = exchange_objects(
        [fingerprint, fits(node, nodes) if matters else True], wire, "tp.datacache"
    )
    for rank, (theirs, _) in enumerate(found):
        if theirs != found[0][0]:
            raise ValueError(
                f"All ranks must open the same cache. Received: another source, `preprocess` or `version` on rank "
                f"{rank} than on rank 0. See that nodes see the same files, with the same times, and run one script."
            )
    replicated = partition == "replicate" or (
        partition == "auto" and all(theirs for _, theirs in found)
    )
    return (0, 1) if replicated or nodes == 1 else (node, nodes)


def reader(levels: Levels, samples: int) -> Reader:
    """That of this rank: over nodes if there are several."""
    wire = job_wire()
    if wire is None or len(wire.topology.nodes) == 1:
        return LocalReader(levels)
    keep = levels.memory is not None and levels.memory.spec.shard.nodes == 1
    owners = owner_nodes(samples, len(wire.topology.nodes), seed=0)
    partitioned = PartitionedReader(levels, wire, f"tp.datacache{next(_numbers)}", owners, keep)
    # Before Horovod ends, which would take its thread along.
    atexit.register(_close, partitioned)
    return partitioned


def _close(reader: PartitionedReader) -> None:
    """At the end of a script that did not close its cache; one that failed does not wait for others."""
    if not hasattr(sys, "last_value") and not reader.closed:
        reader.close()

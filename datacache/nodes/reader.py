"""Reads batches from the tiers of this node, and from other nodes that share the samples."""

from __future__ import annotations

import atexit
import itertools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
from typing_extensions import override

from datacache.errors import Closed
from datacache.from_tfposeidon import exchange_objects, job_wire, require_equal
from datacache.nodes.sample_exchange import SampleExchange
from datacache.pool.spec import Arrays, owner_nodes, stack_samples
from datacache.tiers.tier import StoreTier

if TYPE_CHECKING:
    from datacache.from_tfposeidon import Wire

REQUEST_SAMPLES = 64
"""Number of samples to request from each other rank at a time. With fewer, the latency of messages
would dominate."""
Partitioning = Literal["auto", "replicate", "split"]
# Numbers in names of collectives: equal on all ranks, because they open caches in the same order.
_cache_numbers = itertools.count()


class Reader:
    """Reads batches from memory, after loading missing samples into it from this node's tiers."""

    waits_to_close = False
    """True if `close` waits for all ranks."""

    def __init__(self, tiers: StoreTier) -> None:
        self.tiers, self._counts = tiers, tiers.counts

    def look_ahead(self, shares: Sequence[np.ndarray]) -> Callable[[int], None]:
        """Prepares an epoch; returns a function to call with each step before its batch is read."""
        # Prefetching of batches is early enough for the tiers of this node.
        return lambda step: None

    def fill(self, indices: np.ndarray) -> dict[int, Arrays]:
        """Loads samples into memory; returns the samples that did not fit there, by index."""
        return self.tiers.fill(indices)

    def close(self) -> None:
        self.tiers.close()
        self.tiers = cast("StoreTier", Closed())

    def batch(self, indices: np.ndarray, into: Sequence[np.ndarray] | None = None) -> Arrays:
        """Returns an array `[n, *shape]` per component, padded at the end if shapes differ."""
        can_copy, made, arrays = self.tiers.can_copy(indices), 0, None
        while arrays is None:
            # `gather` verifies samples while it copies them, so here they need only be ready.
            missing = (self.tiers.not_ready if can_copy else self.tiers.missing)(indices)
            filled: dict[int, Arrays] = {}
            if missing.size:
                begin = time.perf_counter()
                filled = self.fill(missing)
                self._counts.add(wait_s=time.perf_counter() - begin)
            made += len(missing)
            if can_copy:
                # `gather` returns `None` if a sample was corrupted or cleared; try again then.
                arrays = self.tiers.gather(indices, into)
            else:
                arrays = stack_samples(self.tiers.collect(indices, filled), self.tiers.layout)
        self._counts.add(memory_hits=len(indices) - made, memory_misses=made)
        return arrays


class PartitionedReader(Reader):
    """Reads this node's samples from its tiers, and requests all others from their owners.

    Thus, only one node reads each sample from the source. Other nodes are not a tier of the chain:
    a tier claims samples while it fills a store, and two nodes that wait for each other's claims
    would deadlock. This reader holds no claims while it waits.
    """

    waits_to_close = True

    def __init__(
        self, tiers: StoreTier, wire: Wire, name: str, owner_nodes: np.ndarray, keep: bool
    ) -> None:
        super().__init__(tiers)
        self._topology, self._owner_nodes, self._keep = wire.topology, owner_nodes, keep
        self._lock = threading.Lock()
        self._coming: dict[int, Future[Arrays]] = {}
        self._exchange = SampleExchange(
            wire, name, tiers.layout, self._answer, lambda: keep and tiers.is_complete
        )

    @override
    def look_ahead(self, shares: Sequence[np.ndarray]) -> Callable[[int], None]:
        # Transfer the samples of the next window while the steps of the current window are read.
        steps = max(1, -(-REQUEST_SAMPLES * self._topology.size // max(1, len(shares[0]))))
        windows = [shares[begin : begin + steps] for begin in range(0, len(shares), steps)]
        lock, asked = threading.Lock(), 0
        # Drop received samples of an epoch that was left early.
        with self._lock:
            self._coming = {n: future for n, future in self._coming.items() if not future.done()}

        def reach(step: int) -> None:
            nonlocal asked
            # Threads of the input pipeline read several steps concurrently.
            with lock:
                wanted = step // steps + 2
                for window in windows[asked:wanted]:
                    self._ask(np.concatenate(window))
                asked = max(asked, wanted)

        return reach

    @override
    def fill(self, indices: np.ndarray) -> dict[int, Arrays]:
        # Refuse forked children before any request, because a child has no thread for answers.
        self.tiers.refuse_in_child(indices)
        # `Cache.warm` does not look ahead, and samples may have been cleared after `look_ahead`.
        self._ask(indices)
        with self._lock:
            # A batch across two epochs may contain a sample twice.
            coming = {n: self._coming.pop(n) for n in self._coming.keys() & indices.tolist()}
        # Produce this node's samples while the other samples are transferred.
        made = self.tiers.fill(indices[~np.isin(indices, list(coming))])
        for sample, future in coming.items():
            arrays = future.result()
            self._counts.add(received=1)
            if not (self._keep and self.tiers.put(sample, arrays)):
                made[sample] = arrays
        return made

    @override
    def close(self) -> None:
        # Unregister the callback, because `atexit` would keep every closed cache alive.
        atexit.unregister(self.close_at_exit)
        # Wait until all ranks have closed, because they may request samples until then.
        try:
            self._exchange.close()
        finally:
            super().close()

    def close_at_exit(self) -> None:
        """Closes the reader when Python exits, unless the script has failed."""
        # A script that failed with an exception must not wait for the other ranks.
        if not hasattr(sys, "last_value"):
            self.close()

    def _ask(self, indices: np.ndarray) -> None:
        """Requests the samples that other nodes own and no store of this node holds."""
        elsewhere = indices[self._owner_nodes[indices] != self._topology.node_index]
        # Do not verify samples here, because the later copy verifies them.
        elsewhere = self.tiers.lacks(elsewhere)
        with self._lock:
            new = [sample for sample in elsewhere.tolist() if sample not in self._coming]
            futures = self._exchange.ask(new, list(map(self._owner_rank, new)))
            # After the exchange has ended, it returns no futures, and this node produces samples.
            self._coming |= dict(zip(new, futures, strict=False))

    def _owner_rank(self, sample: int) -> int:
        """Returns the rank to ask: a node's ranks spread their requests over the owner's ranks."""
        node = self._topology.nodes[self._owner_nodes[sample]]
        return node[self._topology.position % len(node)]

    def _answer(self, indices: np.ndarray) -> list[Arrays]:
        """Returns samples that other ranks have requested, on the thread of the exchange."""
        self._counts.add(sent=len(indices))
        # Remove duplicates, because two ranks may have requested the same sample.
        made = self.tiers.fill(np.unique(self.tiers.missing(indices)))
        return self.tiers.collect(indices, made)


def choose_shard(
    fingerprint: str, fits: Callable[[int, int], bool], partition: Partitioning
) -> tuple[int, int]:
    """Returns this node's index and the number of nodes that share the samples.

    All ranks must call this. The result is (0, 1) if every node stores all samples.
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
    replicated = partition != "split" and all(theirs for _, theirs in answers)
    return (0, 1) if replicated or nodes == 1 else (node, nodes)


def open_reader(tiers: StoreTier, samples: int, keeps_any: bool) -> Reader:
    """Opens the reader of this rank; all ranks must open the same caches in the same order."""
    wire = job_wire()
    # Without a store, the owner would produce a sample again for each request.
    if wire is None or len(wire.topology.nodes) == 1 or not keeps_any:
        return Reader(tiers)
    keep = tiers.first_pool is not None and tiers.first_pool.spec.shard.nodes == 1
    owners = owner_nodes(samples, len(wire.topology.nodes))
    name = f"tp.datacache{next(_cache_numbers)}"
    partitioned = PartitionedReader(tiers, wire, name, owners, keep)
    # Close the reader before Horovod shuts down and ends the collectives of the exchange.
    atexit.register(partitioned.close_at_exit)
    return partitioned

"""Reader that requests samples from the nodes that own them."""

from __future__ import annotations

import atexit
import bisect
import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from datacache.levels.levels import Levels
from datacache.nodes.reader import Reader
from datacache.nodes.sample_exchange import SampleExchange
from datacache.pool.layout import Arrays

if TYPE_CHECKING:
    from datacache.from_tfposeidon import Wire

REQUEST_SAMPLES = 64
"""Samples to request from each other rank at a time. With fewer, the number of messages would
determine the time, not their bytes."""


class PartitionedReader(Reader):
    """Reads this node's samples from its tiers, and requests all others from their owners.

    So only one node reads each sample from the source. Other nodes are not a tier of the chain: a
    store is filled with samples claimed, and two nodes that wait for each other with claims would
    deadlock. This reader holds no claims while it waits.
    """

    def __init__(
        self, levels: Levels, wire: Wire, name: str, owner_nodes: np.ndarray, keep: bool
    ) -> None:
        super().__init__(levels)
        self._topology, self._owner_nodes, self._keep = wire.topology, owner_nodes, keep
        self._lock = threading.Lock()
        self._coming: dict[int, Future[Arrays]] = {}
        self._exchange = SampleExchange(wire, name, levels.layout, self._answer, self._is_complete)

    @override
    def look_ahead(self, shares: Sequence[np.ndarray]) -> Callable[[int], None]:
        # The samples of the next window are transferred while the steps of this one are read.
        begins = _window_begins(shares, REQUEST_SAMPLES * self._topology.size)
        windows = [
            np.concatenate(shares[begin:end])
            for begin, end in itertools.pairwise([*begins, len(shares)])
        ]
        waiting, lock = iter(windows), threading.Lock()
        self._forget_unread()
        asked = 0

        def reach(step: int) -> None:
            nonlocal asked
            # Threads of the input pipeline read several steps concurrently.
            with lock:
                wanted = bisect.bisect_right(begins, step) + 1
                for samples in itertools.islice(waiting, max(0, wanted - asked)):
                    self._ask(samples)
                asked = max(asked, wanted)

        return reach

    @override
    def fill(self, indices: np.ndarray) -> dict[int, Arrays]:
        # Must precede requests: a forked child lacks the thread that would receive the answers.
        self.levels.refuse_in_child(indices)
        # `Cache.warm` does not look ahead, and samples may have been cleared since.
        self._ask(indices)
        with self._lock:
            coming = {
                sample: self._coming.pop(sample)
                for sample in indices.tolist()
                if sample in self._coming
            }
        # Own samples are produced while the others are transferred.
        made = self.levels.fill(indices[~np.isin(indices, list(coming))])
        for sample, future in coming.items():
            arrays = future.result()
            self._counts.add(received=1)
            if not (self._keep and self.levels.put(sample, arrays)):
                made[sample] = arrays
        return made

    @override
    def close(self) -> None:
        # Otherwise every cache would live as long as its process.
        atexit.unregister(self.close_at_exit)
        # Waits until all ranks have closed, because they may request samples until then.
        try:
            self._exchange.close()
        finally:
            self._close_levels()

    def close_at_exit(self) -> None:
        """Closes the reader when Python exits, unless the script has failed."""
        # A failed script must not wait for the other ranks: `sys.last_value` holds an uncaught
        # exception.
        if not hasattr(sys, "last_value"):
            self.close()

    def _forget_unread(self) -> None:
        """Drops received samples of an epoch that was left early."""
        with self._lock:
            self._coming = {
                sample: future for sample, future in self._coming.items() if not future.done()
            }

    def _ask(self, indices: np.ndarray) -> None:
        """Requests those of the samples that other nodes own and memory does not hold."""
        elsewhere = indices[self._owner_nodes[indices] != self._topology.node_index]
        # Samples in memory are verified when they are copied.
        elsewhere = self.levels.not_ready(elsewhere)
        with self._lock:
            new = [sample for sample in elsewhere.tolist() if sample not in self._coming]
            futures = self._exchange.ask(new, list(map(self._owner_rank, new)))
            # The exchange returns no futures after its end; samples are then produced here.
            self._coming |= dict(zip(new, futures, strict=False))

    def _owner_rank(self, sample: int) -> int:
        """Returns the rank to ask; a node's ranks spread their requests over the owner's ranks."""
        node = self._topology.nodes[self._owner_nodes[sample]]
        return node[self._topology.position % len(node)]

    def _answer(self, indices: np.ndarray) -> list[Arrays]:
        """Returns samples that other ranks have requested, on the thread of the exchange."""
        self._counts.add(sent=len(indices))
        # Two ranks may have requested the same sample.
        made = self.levels.fill(np.unique(self.levels.missing(indices)))
        return self.levels.collect(indices, made)

    def _is_complete(self) -> bool:
        return self._keep and self.levels.is_complete


def _window_begins(shares: Sequence[np.ndarray], samples: int) -> list[int]:
    """Returns the steps at which windows start."""
    begins, count = [], 0
    for step, share in enumerate(shares):
        if count == 0:
            begins.append(step)
        count += len(share)
        if count >= samples:
            count = 0
    return begins

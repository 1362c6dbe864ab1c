"""Samples that are at home on other nodes."""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from datacache.levels.levels import Levels
from datacache.nodes.reader import Reader
from datacache.nodes.sample_exchange import SampleExchange
from datacache.pool.layout import Arrays

if TYPE_CHECKING:
    from datacache.from_tfposeidon import Wire

REQUEST_SAMPLES = 64
"""Samples to ask of each other rank at a time: with fewer, the number of messages counts and not their bytes."""


class PartitionedReader(Reader):
    """Reads each sample on its owner node only, and sends it from there to the nodes that need it.

    Levels do not lie on top of other nodes: who fills a pool has claimed samples in it, and two nodes that wait for
    each other with samples claimed would wait forever. So others are asked before the levels are, with nothing claimed.

    Args:
      levels: Of this node.
      wire: Of the job.
      name: The same on all ranks, another for each cache.
      owner_nodes: Index of the node that owns each sample, `[samples]` int64.
      keep: Whether this node keeps the samples of others, too.
    """

    def __init__(
        self, levels: Levels, wire: Wire, name: str, owner_nodes: np.ndarray, keep: bool
    ) -> None:
        super().__init__(levels)
        self._topology, self._owner_nodes, self._keep = wire.topology, owner_nodes, keep
        self._lock, self.closed = threading.Lock(), False
        self._coming: dict[int, Future[Arrays]] = {}
        self._exchange = SampleExchange(wire, name, levels.layout, self._answer, self._complete)

    def look_ahead(self, shares: Sequence[np.ndarray]) -> Callable[[int], None]:
        """While steps of one window are read, the next window's samples are on their way."""
        begins = _windows(shares, REQUEST_SAMPLES * self._topology.size)
        windows = [
            np.concatenate(shares[begin:end])
            for begin, end in itertools.pairwise([*begins, len(shares)])
        ]
        waiting, lock = iter(windows), threading.Lock()
        self._forget()
        asked = 0

        def reach(step: int) -> None:
            nonlocal asked
            with lock:
                wanted = bisect.bisect_right(begins, step) + 1
                for samples in itertools.islice(waiting, max(0, wanted - asked)):
                    self._ask(samples)
                asked = max(asked, wanted)

        return reach

    def fill(self, indices: np.ndarray) -> dict[int, Arrays]:
        """Brings samples from their owner nodes; see `Levels.fill`."""
        self.levels.refuse_in_child(indices)
        self._ask(indices)
        with self._lock:
            coming = {
                sample: self._coming.pop(sample)
                for sample in indices.tolist()
                if sample in self._coming
            }
        made = self.levels.fill(indices[~np.isin(indices, list(coming))])
        for sample, future in coming.items():
            arrays = future.result()
            self._counts.add(received=1)
            if not (self._keep and self.levels.put(sample, arrays)):
                made[sample] = arrays
        return made

    def close(self) -> None:
        """Ends it once all ranks have closed."""
        self.closed = True
        try:
            self._exchange.close()
        finally:
            self.levels.close()

    def _forget(self) -> None:
        """What came for a pass that was left early, and nobody has read."""
        with self._lock:
            self._coming = {
                sample: future for sample, future in self._coming.items() if not future.done()
            }

    def _ask(self, indices: np.ndarray) -> None:
        away = indices[self._owner_nodes[indices] != self._topology.node_index]
        # Whether those that memory has are whole is seen when they are copied.
        away = self.levels.not_ready(away)
        with self._lock:
            new = [sample for sample in away.tolist() if sample not in self._coming]
            self._coming |= dict(
                zip(new, self._exchange.ask(new, list(map(self._owner_rank, new))), strict=False)
            )

    def _owner_rank(self, sample: int) -> int:
        """Returns the rank to ask: ranks of a node ask different ranks of another."""
        node = self._topology.nodes[self._owner_nodes[sample]]
        return node[self._topology.position % len(node)]

    def _answer(self, indices: np.ndarray) -> list[Arrays]:
        self._counts.add(sent=len(indices))
        # Two ranks may have asked for the same one.
        made = self.levels.fill(np.unique(self.levels.missing(indices)))
        return self.levels.collect(indices, made)

    def _complete(self) -> bool:
        return self._keep and self.levels.is_complete


def _windows(shares: Sequence[np.ndarray], samples: int) -> list[int]:
    """The step at which each window begins; windows have at least so many samples, but for the last."""
    begins, count = [], 0
    for step, share in enumerate(shares):
        if count == 0:
            begins.append(step)
        count += len(share)
        if count >= samples:
            count = 0
    return begins

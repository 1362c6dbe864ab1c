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
from datacache.nodes.exchange import Exchange
from datacache.pool.filling import Arrays

if TYPE_CHECKING:
    from datacache.from_tfposeidon import Wire

REQUEST_SAMPLES = 64
"""Samples to ask of each other rank at a time: with fewer, the number of messages counts and not their bytes."""


class Partition:
    """The levels of this node, and over an exchange those of others: each sample is read on its home node only.

    Args:
      levels: Of this node.
      wire: Of the job.
      name: The same on all ranks, another for each cache.
      owner_nodes: The node of each sample.
      keep: Whether this node keeps the samples of others, too.
    """

    def __init__(
        self, levels: Levels, wire: Wire, name: str, owner_nodes: np.ndarray, keep: bool
    ) -> None:
        self._levels, self._topology, self._owner_nodes, self._keep = (
            levels,
            wire.topology,
            owner_nodes,
            keep,
        )
        self._counts = levels.counts
        self._lock, self.closed = threading.Lock(), False
        self._coming: dict[int, Future[Arrays]] = {}
        self._exchange = Exchange(wire, name, levels.layout, self._answer, self._complete)

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

    def batch(self, samples: np.ndarray, into: Sequence[np.ndarray] | None = None) -> Arrays:
        """See `Levels.batch`."""
        return self._levels.batch(samples, into, self.fill)

    def fill(self, samples: np.ndarray) -> dict[int, Arrays]:
        """See `Levels.fill`."""
        self._levels.filling.refuse_in_child(samples)
        self._ask(samples)
        with self._lock:
            coming = {
                sample: self._coming.pop(sample)
                for sample in samples.tolist()
                if sample in self._coming
            }
        made = self._levels.fill(sample for sample in samples.tolist() if sample not in coming)
        for sample, future in coming.items():
            arrays = future.result()
            self._counts.add(received=1)
            if not (self._keep and self._levels.put(sample, arrays)):
                made[sample] = arrays
        return made

    def close(self) -> None:
        """Ends it once all ranks have closed."""
        self.closed = True
        try:
            self._exchange.close()
        finally:
            self._levels.close()

    def _forget(self) -> None:
        """What came for a pass that was left early, and nobody has read."""
        with self._lock:
            self._coming = {
                sample: future for sample, future in self._coming.items() if not future.done()
            }

    def _ask(self, samples: np.ndarray) -> None:
        away = samples[self._owner_nodes[samples] != self._topology.node_index]
        # Whether those that memory has are whole is seen when they are copied.
        away = self._levels.filling.not_ready(self._levels.memory, away)
        with self._lock:
            new = [sample for sample in away.tolist() if sample not in self._coming]
            self._coming |= dict(
                zip(new, self._exchange.ask(new, list(map(self._owner, new))), strict=False)
            )

    def _owner(self, sample: int) -> int:
        """The rank to ask: ranks of a node ask different ranks of another."""
        node = self._topology.nodes[self._owner_nodes[sample]]
        return node[self._topology.position % len(node)]

    def _answer(self, samples: np.ndarray) -> list[Arrays]:
        self._counts.add(sent=len(samples))
        # Two ranks may have asked for the same one.
        return self._levels.samples(
            samples, self._levels.fill(np.unique(self._levels.missing(samples)))
        )

    def _complete(self) -> bool:
        return self._keep and self._levels.complete


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

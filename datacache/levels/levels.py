"""The levels of one node: memory, decoded samples on a disk, and stored samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from datacache.levels.stored import Stored
from datacache.pool.filling import POLL_S, Arrays, Filling
from datacache.pool.layout import Layout, stack_samples
from datacache.pool.pool import Pool
from datacache.windows import windows


class Levels:
    """Samples from the highest level that has them; what was lower is put above on the way.

    Args:
      stored: Of all samples.
      make: From stored samples, and their numbers for messages, to cached ones.
      layout: Of cached samples.
      memory: Pool of cached samples, if there is room for one.
      decoded: The same on a disk, if asked for.
      filling: How pools are filled.
    """

    def __init__(
        self,
        stored: Stored,
        make: Callable[[list[Arrays], np.ndarray], list[Arrays]],
        layout: Layout,
        memory: Pool | None,
        decoded: Pool | None,
        filling: Filling,
    ) -> None:
        self._stored, self._make, self.layout = stored, make, layout
        self.memory, self.decoded = memory, decoded
        self.filling, self.counts = filling, filling.counts

    def look_ahead(self, shares: Sequence[np.ndarray]) -> Callable[[int], None]:
        """Nothing to do: batches are read ahead anyway."""
        return lambda step: None

    def batch(
        self,
        samples: np.ndarray,
        into: Sequence[np.ndarray] | None = None,
        fill: Callable[[np.ndarray], dict[int, Arrays]] | None = None,
    ) -> Arrays:
        """One array per component, `[n, *shape]`.

        Args:
          samples: Their numbers, `[n]` int64.
          into: Arrays to use for a batch that memory holds.
          fill: Makes what memory lacks, in place of `fill`.

        Raises:
          SourceError: If a sample cannot be read; it names the sample.
        """
        fill = fill or self.fill
        if self.memory is not None and self.memory.can_copy(samples):
            return self._copied(self.memory, samples, into, fill)
        missing = self.missing(samples)
        self._count(samples, len(missing))
        return stack_samples(self.samples(samples, self._filled(missing, fill)), self.layout)

    def _copied(
        self,
        memory: Pool,
        samples: np.ndarray,
        into: Sequence[np.ndarray] | None,
        fill: Callable[[np.ndarray], dict[int, Arrays]],
    ) -> Arrays:
        """A batch of samples that have room; whether they are whole is seen on the way."""
        made = 0
        while True:
            absent = self.filling.not_ready(memory, samples)
            made += len(absent)
            self._filled(absent, fill)
            arrays = self.filling.gather(memory, samples, into)
            if arrays is not None:
                self._count(samples, made)
                return arrays

    def _filled(
        self, samples: np.ndarray, fill: Callable[[np.ndarray], dict[int, Arrays]]
    ) -> dict[int, Arrays]:
        if not samples.size:
            return {}
        self.filling.refuse_in_child(samples)
        begin = time.perf_counter()
        made = fill(samples)
        self.counts.add(wait_s=time.perf_counter() - begin)
        return made

    def _count(self, samples: np.ndarray, made: int) -> None:
        self.counts.add(memory_hits=len(samples) - made, memory_misses=made)

    def samples(self, samples: np.ndarray, made: dict[int, Arrays]) -> list[Arrays]:
        """Samples that memory holds, but for those that were made."""
        if self.memory is None:
            return [made[i] for i in samples.tolist()]
        return self.memory.read_samples(samples, made, self.fill)

    def missing(self, samples: np.ndarray) -> np.ndarray:
        """Those that memory does not hold whole."""
        return self.filling.missing(self.memory, samples)

    def fill(self, samples: Iterable[int]) -> dict[int, Arrays]:
        """Makes samples; those that memory did not take are returned."""
        numbers = np.array(list(samples), np.int64)
        if not numbers.size:
            return {}
        self.filling.refuse_in_child(numbers)
        if self._stored.streams:
            self._pour(numbers)
        made = map(self._into_memory, windows(numbers))
        return {sample: arrays for part in made for sample, arrays in part.items()}

    def put(self, sample: int, arrays: Arrays) -> bool:
        """Puts a sample that came from elsewhere where there is room; `False` if memory has none."""
        one = np.array([sample])
        if self.decoded is not None:
            self.filling.read_through(self.decoded, one, lambda _: [arrays])
        return sample in self.filling.read_through(self.memory, one, lambda _: [arrays])[1]

    @property
    def complete(self) -> bool:
        """Whether memory holds all samples there are."""
        return self.memory is not None and self.memory.filled == len(self._stored.source)

    def close(self) -> None:
        """Ends threads and mappings."""
        self._stored.close()
        for pool in (self.memory, self.decoded):
            if pool is not None:
                pool.close()

    def _into_memory(self, samples: np.ndarray) -> dict[int, Arrays]:
        made, kept = self.filling.read_through(self.memory, samples, self._decoded)
        self.counts.add(unkept=len(samples) - len(kept))
        return {sample: arrays for sample, arrays in made.items() if sample not in kept}

    def _decoded(self, samples: np.ndarray) -> list[Arrays]:
        if self.decoded is None:
            return self._made(samples)
        made, _ = self.filling.read_through(self.decoded, samples, self._made)
        self.counts.add(decoded_hits=len(samples) - len(made))
        return self.decoded.read_samples(samples, made, self._into_decoded)

    def _into_decoded(self, samples: np.ndarray) -> dict[int, Arrays]:
        return self.filling.read_through(self.decoded, samples, self._made)[0]

    def _made(self, samples: np.ndarray) -> list[Arrays]:
        return self._checked(samples, self._stored.samples(samples))

    def _checked(self, samples: np.ndarray, stored: list[Arrays]) -> list[Arrays]:
        made = self._make(stored, samples)
        name = self._stored.source.name
        return [
            self.layout.check(arrays, name, sample)
            for arrays, sample in zip(made, samples.tolist(), strict=True)
        ]

    def _pour(self, samples: np.ndarray) -> None:
        """Reads a stream from its beginning into the lowest pool, one process of the node for all."""
        pool = self._stored.pool or self.decoded or self.memory
        while pool is not None and self.filling.missing(pool, samples[pool.has_room(samples)]).size:
            with pool.claim_all() as mine:
                if mine:
                    self._pour_into(pool)
                    return
            time.sleep(POLL_S)

    def _pour_into(self, pool: Pool) -> None:
        lacking = set(
            self.filling.missing(
                pool, np.flatnonzero(pool.has_room(np.arange(len(self._stored.source))))
            ).tolist()
        )
        for sample, arrays in enumerate(self._stored.all()):
            if sample in lacking:
                stored = pool is self._stored.pool
                pool.put(
                    sample, arrays if stored else self._checked(np.array([sample]), [arrays])[0]
                )

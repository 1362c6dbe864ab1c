"""The order of samples: every one once per epoch over all ranks, however many ranks there are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


def permutation(length: int, seed: int, number: int) -> np.ndarray:
    """One of `0..length-1`, int64, that depends on seed and number alone; takes O(n log n) operations."""
    # NumPy promises the raw bits of a bit generator for good, but not what it makes of them.
    bits = np.random.Philox(key=[seed, number]).random_raw(length)
    return np.argsort(bits, kind="stable")


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far a job has come: all that it takes to go on, on any number of ranks.

    Attributes:
      epoch: Number of the epoch, from 0.
      samples: Samples of this epoch that all ranks together have been given.
    """

    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True, kw_only=True)
class Order:
    """Which samples each rank gets at each step.

    An epoch is a permutation of all samples, another one each time, that depends on seed and epoch alone. It is cut
    into global batches, and each of these into parts for the ranks, which differ by one sample at most. All ranks have
    as many steps: where the last batch would leave a rank without a sample, it joins the one before.

    Args:
      samples: How many there are.
      global_batch: Samples of one step over all ranks.
      seed: Of the permutations.
      shuffle: Whether to permute at all.

    Raises:
      ValueError: If there are no samples, the batch is empty, or the seed negative.

    Example:
    >>> order = Order(samples=7, global_batch=4, shuffle=False)
    >>> [share.tolist() for share, _ in order.shares(Position(), rank=1, ranks=2)]
    [[2, 3], [5, 6]]
    """

    samples: int
    global_batch: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        for name in ("samples", "global_batch"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` must be at least 1. Received: {name}={getattr(self, name)}"
                )
        if self.seed < 0:
            raise ValueError(f"`seed` must not be negative. Received: seed={self.seed}")

    def permutation(self, epoch: int) -> np.ndarray:
        """All samples in the order of an epoch, `[samples]` int64; takes O(n log n) operations."""
        if not self.shuffle:
            return np.arange(self.samples)
        return permutation(self.samples, self.seed, epoch)

    def shares(
        self, position: Position, rank: int, ranks: int
    ) -> Iterator[tuple[np.ndarray, Position]]:
        """What one rank gets in the rest of an epoch.

        Args:
          position: Where to begin.
          rank: Which rank.
          ranks: How many there are.

        Yields:
          For each step the samples of this rank, int64, and the position after it.

        Raises:
          ValueError: If a batch, or the rest of the epoch, has fewer samples than there are ranks.
        """
        order = self.permutation(position.epoch)
        for begin, end in self._batches(position.samples, ranks):
            batch = end - begin
            mine = slice(begin + batch * rank // ranks, begin + batch * (rank + 1) // ranks)
            after = Position(epoch=position.epoch, samples=end)
            yield order[mine], after if end < self.samples else Position(epoch=position.epoch + 1)

    def after(self, position: Position, steps: int, ranks: int) -> Position:
        """The position that many steps later, over as many epochs as that takes."""
        while steps > 0:
            ends = [end for _, end in self._batches(position.samples, ranks)]
            if steps < len(ends):
                return Position(epoch=position.epoch, samples=ends[steps - 1])
            steps -= len(ends)
            position = Position(epoch=position.epoch + 1)
        return position

    def steps(self, position: Position, ranks: int) -> int:
        """How many there are in the rest of an epoch; the same on every rank."""
        return len(self._batches(position.samples, ranks))

    def state_dict(self, position: Position) -> dict[str, Any]:
        """All that it takes to go on, for JSON."""
        return asdict(position) | {"of": self.samples, "seed": self.seed, "shuffle": self.shuffle}

    def load_state_dict(self, state: dict[str, Any]) -> Position:
        """The position that was saved, if it was with these samples in this order.

        Raises:
          ValueError: If it was with others.
        """
        here = self.state_dict(Position())
        for name, what in (("of", "number of samples"), ("seed", "seed"), ("shuffle", "`shuffle`")):
            if state[name] != here[name]:
                raise ValueError(
                    f"A job must go on with the samples that it began with. Received: a {what} of {here[name]}, and "
                    f"{state[name]} in the saved state. Use those, or begin a new job."
                )
        return Position(epoch=state["epoch"], samples=state["samples"])

    def _batches(self, done: int, ranks: int) -> list[tuple[int, int]]:
        """Begin and end of each global batch behind the first `done` samples."""
        left = self.samples - done
        if min(self.global_batch, left) < ranks:
            raise ValueError(
                f"Every rank must get a sample at each step. Received: global_batch={self.global_batch}, {left} "
                f"samples left in the epoch, {ranks} ranks. Use larger batches or fewer ranks."
            )
        bounds = [*range(done, self.samples, self.global_batch), self.samples]
        if bounds[-1] - bounds[-2] < ranks:
            del bounds[-2]
        return list(itertools.pairwise(bounds))

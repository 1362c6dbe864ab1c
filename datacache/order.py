"""Assigns each sample to exactly one rank in each epoch, for any number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from datacache.from_tfposeidon import check_integer


def permutation(length: int, seed: int, number: int) -> np.ndarray:
    """Returns permutation `number` of `0..length-1` for a seed, `[length]` int64, in O(n log n).

    The result depends on the arguments only, on any machine and with any release of NumPy.
    """
    # NumPy guarantees only the raw bits of a bit generator across releases. The sort is stable,
    # because the order of equal bits must not depend on the release either.
    bits = np.random.Philox(key=[seed, number]).random_raw(length)
    return np.argsort(bits, kind="stable")


@dataclass(frozen=True, kw_only=True)
class Position:
    """Progress of a job, from which any number of ranks can resume it.

    Attributes:
      epoch: Index of the epoch.
      samples: Number of samples of this epoch that all ranks together have received.
    """

    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True, kw_only=True)
class Order:
    """Determines the samples of each rank at each step.

    Each epoch is a different permutation of all samples, which depends on seed and epoch only. It
    is split into global batches, and each global batch into shares of the ranks, which differ by at
    most one sample in size. All ranks have the same number of steps: a last batch that would leave
    a rank without a sample is merged into the batch before it.

    Args:
      samples: Number of samples.
      global_batch: Number of samples of one step over all ranks.
      seed: Seed of the permutations.
      shuffle: True to permute the samples in each epoch; False to retain the order of indices.

    Raises:
      ValueError: If `samples` or `global_batch` is less than 1, or `seed` is negative. In methods
        with an argument `ranks`, if a batch has fewer samples than there are ranks.

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
        for name, least in (("samples", 1), ("global_batch", 1), ("seed", 0)):
            check_integer(name, getattr(self, name), least)

    def permutation(self, epoch: int) -> np.ndarray:
        """Returns the indices of all samples in the order of an epoch, `[samples]` int64.

        Args:
          epoch: Index of the epoch.

        Cost: O(n log n) operations.
        """
        if not self.shuffle:
            return np.arange(self.samples)
        return permutation(self.samples, self.seed, epoch)

    def shares(
        self, position: Position, rank: int, ranks: int
    ) -> Iterator[tuple[np.ndarray, Position]]:
        """Yields the samples of a rank for each remaining step of an epoch.

        Args:
          position: Position to start at.
          rank: Index of the rank.
          ranks: Number of ranks.

        Yields:
          Indices of the rank's samples in each step, int64, and the position after the step. If
          fewer samples are left than there are ranks, they form one step, in which some ranks have
          none.
        """
        order = self.permutation(position.epoch)
        for begin, end in self._batches(position.samples, ranks):
            batch = end - begin
            # Multiplication before division makes the shares differ by at most one sample.
            mine = slice(begin + batch * rank // ranks, begin + batch * (rank + 1) // ranks)
            after = Position(epoch=position.epoch, samples=end)
            yield order[mine], after if end < self.samples else Position(epoch=position.epoch + 1)

    def batches(
        self, position: Position, rank: int, ranks: int
    ) -> Iterator[tuple[np.ndarray, Position]]:
        """Yields the training samples of a rank, epoch after epoch without end.

        Args:
          position: Position to start at.
          rank: Index of the rank.
          ranks: Number of ranks.

        Yields:
          The same as `shares`, but every rank has samples at every step: if an epoch has fewer
          samples left than there are ranks, the first step of the next epoch includes them.
        """
        short = np.empty(0, np.int64)
        while True:
            if self._is_short(position, ranks):
                ((short, position),) = self.shares(position, rank, ranks)
            for share, after in self.shares(position, rank, ranks):
                yield np.concatenate([short, share]), after
                short, position = short[:0], after

    def after(self, position: Position, steps: int, ranks: int) -> Position:
        """Returns the position after a number of further steps of `batches`.

        Args:
          position: Position before these steps.
          steps: Number of steps.
          ranks: Number of ranks.
        """
        while steps > 0:
            if self._is_short(position, ranks):
                position = Position(epoch=position.epoch + 1)
            ends = [end for _, end in self._batches(position.samples, ranks)]
            if steps < len(ends):
                return Position(epoch=position.epoch, samples=ends[steps - 1])
            steps -= len(ends)
            position = Position(epoch=position.epoch + 1)
        return position

    def steps(self, position: Position, ranks: int) -> int:
        """Returns the number of steps of `batches` to the end of an epoch, equal on every rank.

        Args:
          position: Position to start at.
          ranks: Number of ranks.
        """
        return len(self._batches(0 if self._is_short(position, ranks) else position.samples, ranks))

    def state_dict(self, position: Position) -> dict[str, Any]:
        """Returns the state for resuming at a position, as JSON-serializable values.

        Args:
          position: Position to resume at.
        """
        # Leave out `global_batch`, which may change, because positions count samples and not steps.
        return asdict(position) | {"of": self.samples, "seed": self.seed, "shuffle": self.shuffle}

    def load_state_dict(self, state: dict[str, Any]) -> Position:
        """Returns the position that `state_dict` saved.

        Args:
          state: Result of `state_dict`, whose order may have had another `global_batch`.

        Raises:
          ValueError: If the number of samples, the seed or `shuffle` differs.
        """
        here = self.state_dict(Position())
        for name, what in (("of", "number of samples"), ("seed", "seed"), ("shuffle", "`shuffle`")):
            if state[name] != here[name]:
                raise ValueError(
                    "A resumed job must use the samples and the order of its saved state. "
                    f"Received: {what} {here[name]}, and {state[name]} in the saved state. Use the "
                    "saved value, or start a new job."
                )
        return Position(epoch=state["epoch"], samples=state["samples"])

    def _is_short(self, position: Position, ranks: int) -> bool:
        """Returns whether fewer samples are left in the epoch than there are ranks."""
        return self.samples - position.samples < ranks

    def _batches(self, done: int, ranks: int) -> list[tuple[int, int]]:
        """Returns start and end of each global batch after the first `done` samples."""
        if min(self.global_batch, self.samples) < ranks:
            raise ValueError(
                "Every rank must get a sample at each step. Received: "
                f"global_batch={self.global_batch}, {self.samples} samples, {ranks} ranks. Use "
                "a larger `global_batch`, more samples or fewer ranks."
            )
        bounds = [*range(done, self.samples, self.global_batch), self.samples]
        if len(bounds) > 2 and bounds[-1] - bounds[-2] < ranks:
            del bounds[-2]
        return list(itertools.pairwise(bounds))

"""Iterates over the samples of one rank, and tracks the progress of training on each dataset.

Batches are prefetched, and Keras reads one to build a model, so a batch that was read may not have
been trained on. The training loop therefore reports where training starts and counts its steps.
"""

from __future__ import annotations

import itertools
import math
import os
import weakref
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from datacache.from_tfposeidon import pipelines
from datacache.graphs import ONE_TO_ONE
from datacache.order import Order, Position

REMEDY = (
    "Pass the callback keras_callbacks.CachePosition(cache, data) to fit, or iterate over "
    "cache.counted(data). Create validation data with shuffle=False."
)
NAME = (
    "fit and CachePosition(cache, data) must receive the same `data`, including repeat() and "
    "take(), and no other code may iterate over `data` within an epoch."
)
MOST_AHEAD = 32
"""Number of steps by which a pipeline without buffers may read ahead of training. An iteration that
starts further ahead belongs to other code."""
AUTOTUNED = {"_buffer_size": math.inf, "_num_parallel_calls": os.cpu_count() or 1}
"""Largest number of elements that a dataset reads ahead, by the attribute that is AUTOTUNE."""
SAME_STEPS = ONE_TO_ONE | {"FlatMapDataset", "RepeatDataset", "TakeDataset", "TensorDataset"}
"""Kinds of datasets that have the same steps as the cache's dataset, or are part of it."""
Data = TypeVar("Data")


class EpochIterator:
    """Iterates over the samples of one rank by epoch, and tracks the progress of training.

    `begin_epoch` (in `fit`) or `go_on` (in a custom loop) starts training. Until `leave`,
    iterations start at the position of training. Without these calls, each complete iteration
    advances the epoch, so ranks could be at different epochs. If `all_whole` is false, the first
    iteration is the rest of an epoch.
    """

    def __init__(
        self, order: Order, rank: int, ranks: int, state: dict[str, Any] | None = None
    ) -> None:
        self.order, self._rank, self._ranks = order, rank, ranks
        self._next = Position() if state is None else order.load_state_dict(state)
        self._first = self._next
        self.all_whole = not self._first.samples
        # Compute the number now, so that an invalid batch size is reported before the first batch.
        self.epoch_steps = order.steps(Position(), ranks)
        # `_length` is the number of steps of the iteration: infinity for data that repeat, `None`
        # outside of training. `_next` advances when the last batch is read, before its step ends.
        self._begin, self._trained = self._next, 0
        self._ahead: float = MOST_AHEAD
        self._length: float | None = None
        self._reported = self._handed_out = False
        # `_passes` counts the iterations that started since `_begin`. `_chained` is the start of
        # the last iteration if the end of that iteration advances `_next`.
        self._passes = 0
        self._chained: Position | None = None

    def __len__(self) -> int:
        """Returns the number of steps of the next iteration."""
        return self._steps(self.start)

    @property
    def start(self) -> Position:
        """Position at which the next iteration starts."""
        if not self._trains_to_an_end:
            return self._next
        return self._position() if self._trained == self._length else self._begin

    def begin(self) -> tuple[Position, list[np.ndarray]]:
        """Starts the next iteration; returns its position and this rank's samples in each step."""
        self._refuse_others()
        self._passes += 1
        begin = self.start
        # All ranks are in the first epoch, even if some ranks have read a batch to build a model.
        ambiguous = begin.samples > 0 or (self._ranks > 1 and begin.epoch > self._first.epoch)
        if ambiguous and self.order.shuffle and not self._reported:
            raise RuntimeError(
                "On several ranks, or within an epoch, training must report the start of each "
                f"epoch of shuffled data. Received: an iteration from {begin} without a report. "
                f"{REMEDY}"
            )
        self._handed_out = True
        self._chained = None if self._trains_to_an_end else begin
        return begin, self.shares(begin)

    def shares(self, begin: Position) -> list[np.ndarray]:
        """Returns the indices of this rank's samples at each step of an iteration, int64."""
        batches = self.order.batches(begin, self._rank, self._ranks)
        return [share for share, _ in itertools.islice(batches, self._steps(begin))]

    def end(self, begin: Position) -> None:
        """Records that all batches of an iteration were read."""
        if self._next == begin == self._chained:
            self._next = self.order.after(begin, self._steps(begin), self._ranks)

    def begin_epoch(
        self,
        epoch: int,
        steps: int | None,
        length: float | None,
        *,
        steps_per_execution: int = 1,
        is_first: bool,
        ahead: float = MOST_AHEAD,
        begin: tuple[int, int] | None = None,
    ) -> None:
        """Starts an epoch of `fit`; see `Cache.begin_epoch`, and `steps_ahead` for `ahead`."""
        self._ahead = ahead + steps_per_execution
        if not self.all_whole:
            raise RuntimeError(
                "In fit, data must start at the beginning of an epoch. Received: a state after "
                f"{self._next.samples} samples of epoch {self._next.epoch}. Resume the job with "
                "keras_callbacks.Checkpoint, which skips these samples, or iterate over "
                "cache.counted(data)."
            )
        if length is None and steps not in (None, self.epoch_steps):
            raise RuntimeError(
                f"{NAME} Received: {steps} steps per epoch in fit, {self.epoch_steps} steps per "
                "epoch of the cache. Pass the data of fit: CachePosition(cache, data)."
            )
        length = self._checked(length)
        if length == math.inf and not steps:
            raise RuntimeError(
                "Data that repeat without end require `steps_per_epoch`. Received: "
                f"steps_per_epoch={steps}. Pass it to fit; an epoch has {self.epoch_steps} steps."
            )
        # Keras rounds an epoch up to whole executions, unless the data end earlier.
        executions = -(-steps // steps_per_execution) if steps else math.inf
        steps = int(min(executions * steps_per_execution, length))
        # Keras creates a new iterator over the data after this number of epochs of `fit`.
        epochs = length if length == math.inf else -(-length // steps)
        passes, within = divmod(epoch, epochs)
        if is_first and within and length < math.inf and length % steps:
            raise RuntimeError(
                "To resume in the middle of the dataset, its number of steps must be a multiple of"
                f" the steps per epoch of fit. Received: initial_epoch={epoch}, {steps} steps per "
                f"epoch, {length} steps in the dataset. Repeat the dataset: "
                "cache.dataset(...).repeat()."
            )
        if begin is not None:
            self._begin_at(Position(epoch=begin[0], samples=begin[1]), length)
        elif is_first or epochs == 1:
            more, rest = divmod(int(within) * steps, self.epoch_steps)
            position = self.order.after(Position(epoch=int(passes) + more), rest, self._ranks)
            self._begin_at(position, length)
        elif self._trained == self._length:
            self._begin_at(self._position(), length)

    def go_on(self, length: float | None, ahead: float = MOST_AHEAD) -> None:
        """Tracks a custom loop from the current position; the loop reports steps by `count`."""
        self._ahead = ahead
        position = self._position()
        if self.all_whole and position.samples:
            raise RuntimeError(
                "A loop that stopped within an epoch must resume with a new dataset. Received: the "
                f"dataset that stopped at {position}. Create a new one: cache.dataset(..., "
                "state=cache.state_dict(data))."
            )
        self._begin_at(position, max(self._checked(length), self._steps(position)))

    def leave(self) -> None:
        """Ends training; later iterations continue from its last position without a callback."""
        self._length, self._next = None, self._position()

    def count(self, steps: int) -> None:
        most = math.inf if self._length is None else self._length
        self._trained = int(min(self._trained + steps, most))

    def state_dict(self) -> dict[str, Any]:
        if self._handed_out and not self._reported:
            raise RuntimeError(
                "`state_dict` requires counted steps, because prefetching reads ahead of training. "
                f"Received: a dataset whose steps were not counted. {REMEDY}"
            )
        return self.order.state_dict(self._position())

    def _checked(self, length: float | None) -> float:
        """Returns the number of steps of the data, by default one epoch; rejects longer data."""
        if length not in (None, math.inf) and length > self.epoch_steps:
            raise RuntimeError(
                "Data must be at most one epoch, or repeat without end. Received: data of "
                f"{length} steps, for epochs of {self.epoch_steps} steps. Use repeat() without a "
                "count."
            )
        return self.epoch_steps if length is None else length

    def _begin_at(self, position: Position, length: float) -> None:
        self._begin = self._next = position
        self._trained, self._length, self._passes, self._reported = 0, length, 0, True

    @property
    def _trains_to_an_end(self) -> bool:
        """True in training on data that do not repeat; repeated data are read ahead of training."""
        return self._length not in (None, math.inf)

    def _refuse_others(self) -> None:
        """Raises `RuntimeError` for an iteration that starts before training needs it."""
        if self._trains_to_an_end and self._passes and self._trained != self._length:
            raise RuntimeError(
                f"{NAME} Received: another iteration over the data after {self._trained} of "
                f"{self._length} steps. Use a separate dataset for other iterations."
            )
        reach = self._trained + self.epoch_steps + self._ahead
        if self._length == math.inf and (self._passes + 1) * self.epoch_steps > reach:
            raise RuntimeError(
                f"{NAME} Received: iteration {self._passes + 1} over repeated data after "
                f"{self._trained} steps, with {self.epoch_steps} steps in each iteration. Use a "
                "separate dataset for other iterations."
            )

    def _steps(self, begin: Position) -> int:
        return self.epoch_steps if self.all_whole else self.order.steps(begin, self._ranks)

    def _position(self) -> Position:
        return self.order.after(self._begin, self._trained, self._ranks)


class Positions:
    """Finds the epoch iterator of the cache's dataset from which training data are derived."""

    def __init__(self) -> None:
        self._made: list[EpochIterator] = []
        # Refer weakly to datasets, so that their batches are freed when the script drops a dataset.
        self._of: weakref.WeakKeyDictionary[Any, EpochIterator] = weakref.WeakKeyDictionary()

    def add(self, data: Data, epochs: EpochIterator) -> Data:
        self._made.append(epochs)
        self._of[data] = epochs
        return data

    def of(self, data: Any = None) -> EpochIterator:
        """Returns the epoch iterator of a dataset; `None` selects the only iterator."""
        if not self._made:
            raise RuntimeError(
                "A position requires a dataset of the cache. Received: a cache with 0 datasets. "
                "Call cache.dataset() or cache.pydataset() first."
            )
        made_of = [data] if isinstance(data, keras.utils.PyDataset) else pipelines.datasets(data)
        found = [self._of[made] for made in made_of if made in self._of]
        candidates = found or self._made
        if len(candidates) > 1:
            raise RuntimeError(
                "`data` must identify the dataset in training if a cache has created several. "
                f"Received: a cache with {len(self._made)} datasets, and data={data!r:.100}, "
                f"derived from {len(found)} of them. Pass the dataset in training, or one derived "
                "from it by `map`: CachePosition(cache, data), cache.counted(data), "
                "cache.state_dict(data)."
            )
        return candidates[0]


def length(data: Any) -> float | None:
    """Returns the number of steps of a dataset: infinity if it repeats, `None` if unknown."""
    if isinstance(data, keras.utils.PyDataset):
        return len(data)
    if not isinstance(data, tf.data.Dataset):
        return None
    if others := {pipelines.kind_of(one) for one in pipelines.datasets(data)} - SAME_STEPS:
        raise RuntimeError(
            "`data` must have the steps of the cache's dataset in the same order. Received: data "
            f"with {min(others)}. Remove operations that shuffle, skip, filter or rebatch."
        )
    steps = int(data.cardinality())
    if steps == tf.data.INFINITE_CARDINALITY:
        return math.inf
    return None if steps == tf.data.UNKNOWN_CARDINALITY else steps


def steps_ahead(data: Any) -> float:
    """Returns the largest number of steps by which a pipeline may read ahead of training."""
    values = [
        (int(getattr(one, name)), most)
        for one in pipelines.datasets(data)
        for name, most in AUTOTUNED.items()
        if getattr(one, name, None) is not None
    ]
    return MOST_AHEAD + sum(most if n == tf.data.AUTOTUNE else n for n, most in values)

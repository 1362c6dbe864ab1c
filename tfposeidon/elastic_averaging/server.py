"""The server's side: centres, and a thread for each worker."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from tfposeidon.communication.wire import Wire
from tfposeidon.elastic_averaging.calls import Call, give, sum_of_both, wait_for_call
from tfposeidon.elastic_averaging.slots import ServedSlots, Slots

log = logging.getLogger("tfposeidon")

LOOKS_EVERY_S = 1.0
"""Seconds between two looks for workers that are late."""


class ServedCentre:
    """A centre on the server, which moves towards each worker that exchanges with it.

    Args:
      start: Its first values, a float32 vector.
      alpha: Share of a worker's difference by which it moves.
    """

    def __init__(self, start: tf.Tensor, alpha: float) -> None:
        # Less than nothing, as it is added to what workers give.
        self._minus, self._alpha = tf.Variable(-start, trainable=False), alpha
        self._lock = threading.Lock()

    @property
    def values(self) -> tf.Tensor:
        """Its values now, a float32 vector; they may be assigned while no worker trains."""
        # Without the lock, which is held while a worker exchanges that may have been lost.
        return -self._minus.read_value()

    @values.setter
    def values(self, values: tf.Tensor) -> None:
        with self._lock:
            self._minus.assign(-values)

    def swap(self, wire: Wire) -> None:
        """Exchanges with a worker that has called.

        Args:
          wire: Wire of the pair.
        """
        # One worker at a time: each sees what the one before has left.
        with self._lock:
            difference = sum_of_both(wire, self._minus.read_value(), "tp.swap")
            # In place: there are two vectors of the server's, and not three. Who reads waits.
            tf.raw_ops.ResourceApplyGradientDescent(
                var=self._minus.handle, alpha=self._alpha, delta=difference, use_locking=True
            )

    def give(self, wire: Wire) -> None:
        """Gives itself to a worker that has called.

        Args:
          wire: Wire of the pair.
        """
        give(wire, self.values, "tp.centre")


@dataclass
class Progress:
    """How far a worker has come.

    Attributes:
      exchanges: Exchanges so far.
      epochs: Epochs that it has ended.
      is_idle: True if it had no batch in the last one.
      has_ended: True if it trains no more.
      has_left: True if it calls no more.
      last_exchange_s: Time of its last exchange, as `time.monotonic` tells it.
    """

    exchanges: int = 0
    epochs: int = 0
    is_idle: bool = False
    has_ended: bool = False
    has_left: bool = False
    last_exchange_s: float = field(default_factory=time.monotonic)


class Server:
    """Serves workers, each on a thread of its own, until they have left.

    Args:
      wires: Wire of the pair with each worker, by the worker's rank.
      centres: Centres that workers exchange with, by number.
      slots: Slots of the optimizer of each centre.
      stall_limit_s: Seconds without an exchange after which a worker is said to be late; 0 for
        never.

    Attributes:
      progress: How far each worker has come, by its rank.
    """

    def __init__(
        self,
        wires: Mapping[int, Wire],
        centres: Sequence[ServedCentre],
        slots: Sequence[ServedSlots],
        stall_limit_s: float,
    ) -> None:
        self._wires, self._centres, self._slots = wires, centres, slots
        self._stall_limit_s = stall_limit_s
        # Horovod's thread carries out whatever is ready, one after another, while workers of other
        # pairs wait for it: a single one at a time, then, of what is large.
        self._transfer = threading.Lock()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._stops = self._lets_go = self._is_silent = False
        self._late: set[int] = set()
        self.progress = {rank: Progress() for rank in wires}

    def start(self) -> None:
        """Begins to serve."""
        for rank in self._wires:
            # Daemons: a server that fails does not wait for workers.
            threading.Thread(
                target=self._serve, args=(rank,), daemon=True, name=f"tfposeidon-serves-{rank}"
            ).start()

    def stop_workers(self) -> None:
        """Asks workers to stop; each learns of it in its next call but one."""
        self._stops = True

    def fall_silent(self) -> None:
        """Answers no more, as after an error: Horovod ends the job if nobody else does."""
        self._is_silent = True

    def centre(self, number: int) -> tf.Tensor:
        """Returns the values of a centre, a float32 vector.

        Args:
          number: Number of the centre.
        """
        return self._centres[number].values

    def slots(self, number: int) -> Slots:
        """Returns the slots of a centre's optimizer, as workers have handed them over.

        Args:
          number: Number of the centre.
        """
        return self._slots[number].now

    @property
    def exchanges(self) -> int:
        """Exchanges of all workers so far."""
        return sum(worker.exchanges for worker in self.progress.values())

    def let_go(self, centres: Sequence[tf.Tensor]) -> None:
        """Gives all workers the last centres, once none trains any more, and waits until they left.

        Args:
          centres: Values of each centre, float32 vectors.

        Raises:
          Exception: What a thread has raised, as when a worker was lost.
        """
        for served, values in zip(self._centres, centres, strict=True):
            served.values = values
        self._lets_go = True
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._all("has_left"))
        if self._error is not None:
            raise self._error

    def _all(self, state: str) -> bool:
        return all(getattr(worker, state) for worker in self.progress.values())

    def epochs(self) -> Iterator[int]:
        """Yields the number of the newest epoch, from 0, that workers have ended.

        That is as a mean over those that have batches. Numbers in between are left out where
        several epochs have ended since the last one was asked for. It ends when no worker trains
        any more, with the last epoch of the worker that came farthest.

        Raises:
          Exception: What a thread has raised, as when a worker was lost.
        """
        seen = 0
        while True:
            with self._changed:
                self._changed.wait_for(functools.partial(self._is_due, seen), LOOKS_EVERY_S)
                ended, is_last, error = self._ended_epochs(), self._all("has_ended"), self._error
            if error is not None:
                raise error
            self._report_late()
            if ended > seen:
                seen = ended
                yield ended - 1
            elif is_last:
                return

    def _is_due(self, seen: int) -> bool:
        return self._error is not None or self._ended_epochs() > seen or self._all("has_ended")

    def _ended_epochs(self) -> int:
        everybody = self.progress.values()
        # Epochs without a batch end at once, and would end those of the others early.
        counts = [worker.epochs for worker in everybody if not worker.is_idle]
        counts = counts or [worker.epochs for worker in everybody]
        # A worker may have stopped by itself: the others' last epoch is to end all the same.
        return max(counts) if self._all("has_ended") else sum(counts) // len(counts)

    def _report_late(self) -> None:
        if not self._stall_limit_s:
            return
        for rank, worker in self.progress.items():
            silent_s = time.monotonic() - worker.last_exchange_s
            if worker.has_ended or silent_s < self._stall_limit_s:
                self._late.discard(rank)
            elif rank not in self._late:
                self._late.add(rank)
                log.warning(
                    "tfposeidon: worker %d is alive, and has not exchanged for %.0f s.",
                    rank,
                    silent_s,
                )

    # ------------------------------------------------------------------ threads

    def _serve(self, rank: int) -> None:
        try:
            while not self.progress[rank].has_left:
                call, centre = wait_for_call(self._wires[rank], self._stops)
                if self._is_silent:
                    return
                self._answer(rank, call, centre)
        except BaseException as error:  # noqa: BLE001 (`epochs` raises it)
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _answer(self, rank: int, call: Call, centre: int) -> None:
        wire, worker = self._wires[rank], self.progress[rank]
        if call == Call.SWAP:
            self._centres[centre].swap(wire)
            worker.exchanges += 1
            worker.last_exchange_s = time.monotonic()
        elif call == Call.GIVE:
            with self._transfer:
                self._slots[centre].take(wire, rank)
        elif call == Call.TAKE:
            self._report_broken(rank)
            with self._transfer:
                self._centres[centre].give(wire)
                self._slots[centre].give(wire)
        elif call == Call.ASK:
            sum_of_both(wire, tf.constant([int(self._lets_go)], tf.int64), "tp.answer")
        elif call != Call.ALIVE:
            with self._changed:
                if call in (Call.EPOCH, Call.EMPTY_EPOCH):
                    worker.epochs += 1
                    worker.is_idle = call == Call.EMPTY_EPOCH
                worker.has_ended = worker.has_ended or call == Call.ENDED
                worker.has_left = call == Call.LEAVE
                self._changed.notify_all()

    def _report_broken(self, rank: int) -> None:
        # At the end all workers take the centre.
        if not self.progress[rank].has_ended:
            log.warning(
                "tfposeidon: the weights of worker %d are not finite; it goes on from the centre.",
                rank,
            )

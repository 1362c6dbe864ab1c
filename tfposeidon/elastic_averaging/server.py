"""Server side of asynchronous training: global weights, and a thread for each worker.

Think of `Server` as a set of request loops. Each waits for calls of one worker and answers them,
while the main thread reads `epochs` and evaluates.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from tfposeidon.communication.wire import Wire
from tfposeidon.elastic_averaging.calls import (
    Call,
    ServedSlots,
    Slots,
    give,
    sum_of_both,
    wait_for_call,
)

log = logging.getLogger("tfposeidon")

LOOKS_EVERY_S = 1.0
"""Seconds between checks for late workers."""


class ServedCenter:
    """Global weights on the server, which each exchange moves toward a worker's weights.

    `start` is a float32 vector, and `alpha` the share of a worker's difference that is added.
    """

    def __init__(self, start: tf.Tensor, alpha: float) -> None:
        # Stored negated, so that one sum all-reduce yields x - center.
        self._minus, self._alpha = tf.Variable(-start, trainable=False), alpha
        self._lock = threading.Lock()

    @property
    def values(self) -> tf.Tensor:
        """Current values, a float32 vector; they may be assigned while no worker trains."""
        # Without the lock, which an exchange with a lost worker may hold.
        return -self._minus.read_value()

    @values.setter
    def values(self, values: tf.Tensor) -> None:
        with self._lock:
            self._minus.assign(-values)

    def swap(self, wire: Wire) -> None:
        """Exchanges with a worker that has called."""
        # One worker at a time: each receives the result of the previous exchange.
        with self._lock:
            difference = sum_of_both(wire, self._minus.read_value(), "tp.swap")
            # In place: the server stores two vectors instead of three. Locking makes readers wait.
            tf.raw_ops.ResourceApplyGradientDescent(
                var=self._minus.handle, alpha=self._alpha, delta=difference, use_locking=True
            )

    def give(self, wire: Wire) -> None:
        """Sends its values to a worker that has called."""
        give(wire, self.values, "tp.center")


@dataclass
class Progress:
    """Progress of one worker."""

    exchanges: int = 0
    epochs: int = 0
    # True if its last epoch had no batch.
    is_idle: bool = False
    has_ended: bool = False
    # True after the worker's last call.
    has_left: bool = False
    # As of `time.monotonic`.
    last_exchange_s: float = field(default_factory=time.monotonic)


class Server:
    """Serves workers, each in its own thread, until they have left.

    After `stall_limit_s` seconds without an exchange, a worker is reported as late; 0 disables it.
    """

    def __init__(
        self,
        wires: Mapping[int, Wire],
        centers: Sequence[ServedCenter],
        slots: Sequence[ServedSlots],
        stall_limit_s: float,
    ) -> None:
        self._wires, self._centers, self._slots = wires, centers, slots
        self._stall_limit_s = stall_limit_s
        # Horovod's single thread runs ready collectives in sequence, while workers of other pairs
        # wait for it. So only one large transfer runs at a time.
        self._transfer = threading.Lock()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._stops = self._lets_go = self._is_silent = False
        self._late: set[int] = set()
        self.progress = {rank: Progress() for rank in wires}

    def start(self) -> None:
        """Starts to serve."""
        for rank in self._wires:
            # Daemons: a failing server must not wait for workers.
            threading.Thread(
                target=self._serve, args=(rank,), daemon=True, name=f"tfposeidon-serves-{rank}"
            ).start()

    def stop_workers(self) -> None:
        """Asks workers to stop; each receives the request in its second call from now."""
        self._stops = True

    def fall_silent(self) -> None:
        """Stops answering, as after an error: Horovod ends the job unless another rank does."""
        self._is_silent = True

    def center(self, number: int) -> tf.Tensor:
        """Returns the values of a center, a float32 vector."""
        return self._centers[number].values

    def slots(self, number: int) -> Slots:
        """Returns a center's optimizer state, a mean of the newest states of workers."""
        return self._slots[number].now

    @property
    def exchanges(self) -> int:
        """Exchanges of all workers so far."""
        return sum(worker.exchanges for worker in self.progress.values())

    def let_go(self, centers: Sequence[tf.Tensor]) -> None:
        """Sends final weights to all workers after training, and waits until they have left.

        `centers` are float32 vectors. It raises the error of a thread, such as a lost worker.
        """
        for served, values in zip(self._centers, centers, strict=True):
            served.values = values
        self._lets_go = True
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._all("has_left"))
        if self._error is not None:
            raise self._error

    def _all(self, state: str) -> bool:
        return all(getattr(worker, state) for worker in self.progress.values())

    def epochs(self) -> Iterator[int]:
        """Yields the index of the newest epoch that workers have ended, as a mean over workers.

        Only workers with batches count. It skips epochs that ended while the caller was busy. After
        training has ended, the last epoch is that of the most advanced worker. It raises the error
        of a thread, such as a lost worker.
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
        # Epochs without a batch end immediately, and would end those of other workers early.
        counts = [worker.epochs for worker in everybody if not worker.is_idle]
        counts = counts or [worker.epochs for worker in everybody]
        # A worker may have stopped early; the last epoch of the others must still be counted.
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
                    "tfposeidon: worker %d is alive but has not exchanged for %.0f s.",
                    rank,
                    silent_s,
                )

    # ------------------------------------------------------------------ threads

    def _serve(self, rank: int) -> None:
        try:
            while not self.progress[rank].has_left:
                call, center = wait_for_call(self._wires[rank], self._stops)
                if self._is_silent:
                    return
                self._answer(rank, call, center)
        except BaseException as error:  # noqa: BLE001 (`epochs` raises it)
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _answer(self, rank: int, call: Call, center: int) -> None:
        wire, worker = self._wires[rank], self.progress[rank]
        if call == Call.SWAP:
            self._centers[center].swap(wire)
            worker.exchanges += 1
            worker.last_exchange_s = time.monotonic()
        elif call == Call.GIVE:
            with self._transfer:
                self._slots[center].take(wire, rank)
        elif call == Call.TAKE:
            self._report_broken(rank)
            with self._transfer:
                self._centers[center].give(wire)
                self._slots[center].give(wire)
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
        # At the end, all workers take the global weights.
        if not self.progress[rank].has_ended:
            log.warning(
                "tfposeidon: worker %d has non-finite weights and continues from the global "
                "weights.",
                rank,
            )

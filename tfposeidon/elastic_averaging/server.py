"""Server side of asynchronous training: global weights, and a thread for each worker.

Think of `Server` as a set of request loops. Each waits for calls of one worker and answers them,
while the main thread iterates over `epochs` and evaluates.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from tfposeidon.communication.wire import Wire
from tfposeidon.elastic_averaging.calls import (
    Call,
    ServedState,
    send,
    send_state,
    sum_of_both,
    sum_of_numbers,
    wait_for_call,
)

log = logging.getLogger("tfposeidon")

# Time between checks for late workers.
_CHECK_INTERVAL_S = 1.0


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
        # Reads without the lock, because an exchange with a lost worker may hold it.
        return -self._minus.read_value()

    @values.setter
    def values(self, values: tf.Tensor) -> None:
        with self._lock:
            self._minus.assign(-values)

    def swap(self, wire: Wire) -> None:
        """Exchanges with a worker after its call."""
        # One worker at a time: each receives the result of the previous exchange.
        with self._lock:
            difference = sum_of_both(wire, self._minus.read_value(), "tp.swap")
            # In place, so that the server stores two vectors instead of three. Readers wait.
            tf.raw_ops.ResourceApplyGradientDescent(
                var=self._minus.handle, alpha=self._alpha, delta=difference, use_locking=True
            )


@dataclass
class Progress:
    """Progress of one worker."""

    exchanges: int = 0
    epochs: int = 0
    # True if the last epoch had no batch.
    is_idle: bool = False
    has_ended: bool = False
    # True after the worker's last call.
    has_left: bool = False
    last_exchange_s: float = field(default_factory=time.monotonic)


class Server:
    """Serves workers, each in its own thread, until they have left.

    After `stall_limit_s` seconds without an exchange, a worker is reported as late; 0 disables it.
    """

    def __init__(
        self,
        wires: Mapping[int, Wire],
        centers: Sequence[ServedCenter],
        states: Sequence[ServedState],
        stall_limit_s: float,
    ) -> None:
        self.centers, self.states = centers, states
        self.progress = {rank: Progress() for rank in wires}
        # True to ask workers to stop; each receives the request in its second call from then.
        self.stops = False
        # True to stop answering after an error, so that Horovod ends the job.
        self.is_silent = False
        self._wires, self._stall_limit_s = wires, stall_limit_s
        # One thread of Horovod runs the collectives of all pairs in sequence. With several large
        # transfers at a time, all of their workers would wait.
        self._transfer = threading.Lock()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._releases = False
        self._late: set[int] = set()

    def start(self) -> None:
        """Starts the threads."""
        for rank in self._wires:
            # Daemons: a failing server must not wait for workers.
            threading.Thread(
                target=self._serve, args=(rank,), daemon=True, name=f"tfposeidon-serves-{rank}"
            ).start()

    def release(self) -> None:
        """Releases all workers after training, and waits until they have left.

        It raises the error of a thread, such as a lost worker.
        """
        self._releases = True
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._all("has_left"))
        if self._error is not None:
            raise self._error

    def _all(self, state: str) -> bool:
        return all(getattr(worker, state) for worker in self.progress.values())

    def epochs(self) -> Iterator[int]:
        """Yields the index of the newest epoch that workers have ended, as a mean over workers.

        Only workers with batches count. Epochs that ended while the caller was busy are skipped.
        After training, the last epoch is that of the most advanced worker. It raises the error of
        a thread, such as a lost worker.
        """
        seen = 0
        while True:
            with self._changed:
                if self._error is not None:
                    raise self._error
                ended, is_last = self._epochs()
                if ended <= seen and not is_last:
                    self._changed.wait(_CHECK_INTERVAL_S)
            self._report_late()
            if ended > seen:
                seen = ended
                yield ended - 1
            elif is_last:
                return

    def _epochs(self) -> tuple[int, bool]:
        """Returns the number of epochs that workers have ended, and whether it is final."""
        workers, is_last = self.progress.values(), self._all("has_ended")
        # Epochs without a batch end immediately, and would end those of other workers early.
        counts = [worker.epochs for worker in workers if not worker.is_idle]
        counts = counts or [worker.epochs for worker in workers]
        # A worker may have stopped early. The last epoch of the others must still be counted.
        return max(counts) if is_last else sum(counts) // len(counts), is_last

    def _report_late(self) -> None:
        if not self._stall_limit_s:
            return
        for rank, worker in self.progress.items():
            silent_s = time.monotonic() - worker.last_exchange_s
            if worker.has_ended or silent_s < self._stall_limit_s:
                self._late.discard(rank)
            elif rank not in self._late:
                self._late.add(rank)
                text = "tfposeidon: worker %d is alive but has not exchanged for %.0f s."
                log.warning(text, rank, silent_s)

    # ------------------------------------------------------------------ threads

    def _serve(self, rank: int) -> None:
        try:
            while not self.progress[rank].has_left:
                call, center = wait_for_call(self._wires[rank], self.stops)
                if self.is_silent:
                    return
                self._answer(rank, call, center)
        except BaseException as error:  # noqa: BLE001 (`epochs` raises it)
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _answer(self, rank: int, call: Call, center: int) -> None:
        wire, worker = self._wires[rank], self.progress[rank]
        if call == Call.SWAP:
            self.centers[center].swap(wire)
            worker.exchanges += 1
            worker.last_exchange_s = time.monotonic()
        elif call == Call.GIVE:
            with self._transfer:
                self.states[center].take(wire, rank)
        elif call == Call.TAKE:
            self._send_all(rank, center)
        elif call == Call.ASK:
            sum_of_numbers(wire, int(self._releases), "tp.answer")
        elif call != Call.ALIVE:
            with self._changed:
                if call in (Call.EPOCH, Call.EMPTY_EPOCH):
                    worker.epochs += 1
                    worker.is_idle = call == Call.EMPTY_EPOCH
                worker.has_ended = worker.has_ended or call == Call.ENDED
                worker.has_left = call == Call.LEAVE
                self._changed.notify_all()

    def _send_all(self, rank: int, center: int) -> None:
        # In training, only a worker with non-finite weights takes the global weights.
        if not self.progress[rank].has_ended:
            log.warning(
                "tfposeidon: worker %d has non-finite weights and continues from the global "
                "weights.",
                rank,
            )
        with self._transfer:
            send(self._wires[rank], self.centers[center].values, "tp.center")
            send_state(self._wires[rank], self.states[center].now)

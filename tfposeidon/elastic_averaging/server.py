"""Serves global weights to asynchronous workers, with a thread for each worker.

Think of `Server` as a set of request loops. Each loop waits for calls of one worker and answers
them, while the main thread iterates over `epochs` and evaluates.
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
    Request,
    receive,
    send,
    sum_of_both,
    wait_for_call,
)

log = logging.getLogger("tfposeidon")

# The server checks for late workers at this interval.
_CHECK_INTERVAL_S = 1.0


class Served:
    """Global weights and optimizer state of one optimizer on the server, as float32 vectors.

    An exchange with a worker's weights `x` adds `alpha (x - center)` to `center`. The state is
    the average of the newest states that workers have sent. When a worker sends a second state, a
    new average starts with this state, so that each worker counts once, and the server stores a
    single vector. The average may then be the state of one fast worker.
    """

    def __init__(self, center: tf.Tensor, alpha: float, state: tf.Tensor) -> None:
        # Stored negated, so that one sum all-reduce yields x - center.
        self._minus, self._alpha = tf.Variable(-center, trainable=False), alpha
        self._state = tf.Variable(state, trainable=False)
        # Workers whose states are averaged; `None` for the state at the start.
        self._senders: set[int | None] = {None}
        self._lock = threading.Lock()

    @property
    def center(self) -> tf.Tensor:
        """Current global weights, a float32 vector; assign them only while no worker trains."""
        # Read without the lock, because an exchange with a lost worker may hold it.
        return -self._minus.read_value()

    @center.setter
    def center(self, values: tf.Tensor) -> None:
        self._minus.assign(-values)

    @property
    def state(self) -> tf.Tensor:
        return self._state.read_value()

    def swap(self, wire: Wire) -> None:
        # Serve one worker at a time, so that each receives the result of the previous exchange.
        with self._lock:
            difference = sum_of_both(wire, self._minus.read_value(), "tp.swap")
            _subtract(self._minus, self._alpha, difference)

    def receive_state(self, wire: Wire, worker: int) -> None:
        state = receive(wire, "tp.slots")
        if self._senders & {worker, None}:
            self._senders.clear()
        self._senders.add(worker)
        _subtract(self._state, 1.0 / len(self._senders), self._state - state)


def _subtract(variable: tf.Variable, factor: float, values: tf.Tensor) -> None:
    # Update in place, so that the server stores no further vector. The variable's lock makes
    # readers wait.
    tf.raw_ops.ResourceApplyGradientDescent(
        var=variable.handle, alpha=factor, delta=values, use_locking=True
    )


@dataclass
class Progress:
    exchanges: int = 0
    epochs: int = 0
    # True if the last epoch had no batch.
    is_idle: bool = False
    is_late: bool = False
    has_ended: bool = False
    has_left: bool = False
    last_exchange_s: float = field(default_factory=time.monotonic)


class Server:
    """Serves workers, each in its own thread, until they have left.

    The server reports a worker as late after `stall_limit_s` seconds without an exchange; 0
    disables the report.
    """

    def __init__(
        self, wires: Mapping[int, Wire], served: Sequence[Served], stall_limit_s: float
    ) -> None:
        self.served = served
        self.progress = {rank: Progress() for rank in wires}
        # A worker receives a new request with its second call at the latest.
        self.request = Request.TRAIN
        # Set to True after an error to answer no more calls, so that Horovod ends the job.
        self.is_silent = False
        self._wires, self._stall_limit_s = wires, stall_limit_s
        # One thread of Horovod runs the collectives of all pairs in sequence. If several large
        # transfers ran at the same time, all of their workers would wait.
        self._transfer = threading.Lock()
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def start(self) -> None:
        for rank in self._wires:
            # Use daemon threads, because a failing server must not wait for workers.
            threading.Thread(
                target=self._serve, args=(rank,), daemon=True, name=f"tfposeidon-serves-{rank}"
            ).start()

    def release(self) -> None:
        """Releases all workers, and waits until they have left; raises the error of any thread."""
        self.request = Request.LEAVE
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._all("has_left"))
        if self._error is not None:
            raise self._error

    def _all(self, state: str) -> bool:
        return all(getattr(worker, state) for worker in self.progress.values())

    def epochs(self) -> Iterator[int]:
        """Yields the index of the newest completed epoch, by the mean of workers' epochs.

        Skips epochs that end while the caller is busy. Raises the first error of a thread, such as
        the loss of a worker.
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
        # Epochs without a batch end immediately, and would end the epochs of other workers early.
        counts = [worker.epochs for worker in workers if not worker.is_idle]
        counts = counts or [worker.epochs for worker in workers]
        # A worker may have stopped early. The last epoch of the other workers must still count.
        return max(counts) if is_last else sum(counts) // len(counts), is_last

    def _report_late(self) -> None:
        limit_s = self._stall_limit_s or float("inf")
        for rank, worker in self.progress.items():
            silent_s = time.monotonic() - worker.last_exchange_s
            was_late, worker.is_late = worker.is_late, silent_s >= limit_s and not worker.has_ended
            if worker.is_late and not was_late:
                text = "tfposeidon: worker %d is alive but has not exchanged weights for %.0f s."
                log.warning(text, rank, silent_s)

    # ------------------------------------------------------------------ threads

    def _serve(self, rank: int) -> None:
        try:
            while not self.progress[rank].has_left:
                call, center = wait_for_call(self._wires[rank], self.request)
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
            self.served[center].swap(wire)
            worker.exchanges += 1
            worker.last_exchange_s = time.monotonic()
        elif call == Call.GIVE:
            with self._transfer:
                self.served[center].receive_state(wire, rank)
        elif call == Call.TAKE:
            self._send_all(rank, self.served[center])
        else:
            with self._changed:
                if call in (Call.EPOCH, Call.EMPTY_EPOCH):
                    worker.epochs += 1
                    worker.is_idle = call == Call.EMPTY_EPOCH
                worker.has_ended |= call == Call.ENDED
                worker.has_left = call == Call.LEAVE
                self._changed.notify_all()

    def _send_all(self, rank: int, served: Served) -> None:
        # In training, only a worker with non-finite weights requests the global weights.
        if not self.progress[rank].has_ended:
            log.warning(
                "tfposeidon: worker %d has non-finite weights and continues from the global "
                "weights.",
                rank,
            )
        with self._transfer:
            send(self._wires[rank], served.center, "tp.center")
            send(self._wires[rank], served.state, "tp.slots")

"""Transfers calls, weights and optimizer state between workers and the server.

Think of each worker and the server as a pair with its own communicator. A call is an all-reduce of
one number that identifies the next operation. The server always waits for calls, and reads the
global weights only after a call, so a worker can call at any time. The server's summand encodes the
request that was current when the server began to wait.

Collectives run eagerly in this module, so Horovod matches them by their order, which is fixed: a
worker calls sequentially, and the server has one thread per worker. The collectives use none of
TensorFlow's threads, because TensorFlow may have only one, which training steps occupy.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time

import tensorflow as tf

from tfposeidon.communication.wire import Wire

# A call is encoded as `call + _KINDS * center`, where `center` is the index of an optimizer.
_KINDS = 16
# The server adds a request times this value, which is larger than any encoded call.
_REQUESTS = 2**32
# Maximum seconds between two calls of a worker; a short stall limit reduces this interval.
_MAX_SILENCE_S = 7.5
# A worker that waits for its release calls the server at this interval.
_QUERY_INTERVAL_S = 0.1


class Call(enum.IntEnum):
    """Kinds of calls. Data follow a call only if its comment describes them."""

    # Prevents Horovod from reporting a stall while a worker is slow.
    ALIVE = 1
    # A sum all-reduce of the worker's weights and the negated center follows.
    SWAP = 2
    EPOCH = 3
    ENDED = 4
    # The worker's last call.
    LEAVE = 5
    # The worker ended an epoch without a batch.
    EMPTY_EPOCH = 6
    # The worker's optimizer state follows.
    GIVE = 7
    # The global weights follow, and then the server's optimizer state.
    TAKE = 8


class Request(enum.IntEnum):
    """Requests of the server to all workers, in the order in which they occur."""

    TRAIN = 0
    STOP = 1
    # All workers have ended training, and each may leave.
    LEAVE = 2


def make_call(wire: Wire, call: Call, center: int = 0) -> Request:
    number = sum_of_both(wire, tf.constant([call + _KINDS * center], tf.int64), "tp.call")
    return Request(int(number[0]) // _REQUESTS)


def wait_for_call(wire: Wire, request: Request) -> tuple[Call, int]:
    """Waits for the worker's next call; returns its kind and the index of its center."""
    number = sum_of_both(wire, tf.constant([_REQUESTS * request], tf.int64), "tp.call")
    center, call = divmod(int(number[0]) % _REQUESTS, _KINDS)
    return Call(call), center


def sum_of_both(wire: Wire, mine: tf.Tensor, name: str) -> tf.Tensor:
    """Returns the sum of the vectors of both sides, with the same bits on both sides."""
    return wire.all_reduce(mine, wire.topology.world, name)


def send(wire: Wire, vector: tf.Tensor, name: str) -> None:
    """Sends a float32 vector to the other side of a pair, which calls `receive`."""
    wire.all_gather(vector, wire.topology.world, name)


def receive(wire: Wire, name: str) -> tf.Tensor:
    return wire.all_gather(tf.zeros([0]), wire.topology.world, name)


class Worker:
    """Worker's side of a pair: exchanges values, and calls the server in between.

    Without these calls, Horovod would end the job after `stall_limit_s` seconds; 0 disables the
    limit.
    """

    def __init__(self, wire: Wire, stall_limit_s: float) -> None:
        self._wire = wire
        # Call four times between two checks for stalls, which Horovod runs four times per limit.
        self._silence_s = min(_MAX_SILENCE_S, stall_limit_s / 16 or _MAX_SILENCE_S)
        # A thread holds the lock during a call and the transfer of the data that follow.
        self._lock = threading.RLock()
        self._quits = threading.Event()
        self.request = Request.TRAIN
        # Use a daemon thread, because a failing script must not wait for it.
        threading.Thread(target=self._keep_alive, daemon=True, name="tfposeidon-alive").start()

    def _keep_alive(self) -> None:
        # If the job is ending, the next exchange raises the error.
        with contextlib.suppress(tf.errors.OpError):
            while not self._quits.wait(self._silence_s):
                with self._lock:
                    if not self._quits.is_set():
                        self._call(Call.ALIVE)

    def _call(self, call: Call, center: int = 0) -> None:
        with self._lock:
            self.request = make_call(self._wire, call, center)

    def swap(self, center: int, values: tf.Tensor) -> tf.Tensor:
        """Exchanges finite float32 values with a center; returns `values - center`."""
        with self._lock:
            self._call(Call.SWAP, center)
            return sum_of_both(self._wire, values, "tp.swap")

    def send_state(self, center: int, state: tf.Tensor) -> None:
        with self._lock:
            self._call(Call.GIVE, center)
            send(self._wire, state, "tp.slots")

    def take(self, center: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns a center's values and optimizer state."""
        with self._lock:
            self._call(Call.TAKE, center)
            return receive(self._wire, "tp.center"), receive(self._wire, "tp.slots")

    def end_epoch(self, has_trained: bool) -> None:
        self._call(Call.EPOCH if has_trained else Call.EMPTY_EPOCH)

    def wait_for_others(self) -> None:
        """Notifies the server of the end of training, and waits until it releases this worker."""
        self._call(Call.ENDED)
        while self.request != Request.LEAVE:
            time.sleep(_QUERY_INTERVAL_S)
            self._call(Call.ALIVE)

    def leave(self) -> None:
        self.stop_calling()
        self._call(Call.LEAVE)

    def stop_calling(self) -> None:
        """Stops the background calls; after an error, Horovod then ends the job."""
        self._quits.set()

"""Worker side of a pair with the server.

A `Worker` calls the server for exchanges, and a background thread calls it while steps are slow.
"""

from __future__ import annotations

import threading
import time

import tensorflow as tf

from tfposeidon.communication.wire import Wire
from tfposeidon.elastic_averaging.calls import (
    Call,
    Slots,
    give_slots,
    make_call,
    receive,
    receive_slots,
    sum_of_both,
)

LONGEST_SILENCE_S = 15.0
"""Longest time in seconds between calls, unless the stall limit requires a shorter one."""
ASKS_EVERY_S = 0.2
"""Seconds between questions to the server whether it releases the worker."""


class Worker:
    """Calls the server for exchanges, and in between, so that Horovod does not report a stall.

    Horovod ends a job in which a rank is late by `stall_limit_s` seconds; 0 disables the limit.
    """

    def __init__(self, wire: Wire, stall_limit_s: float) -> None:
        self._wire = wire
        # Horovod checks at intervals of a quarter of the limit.
        self._silence_s = min(LONGEST_SILENCE_S, stall_limit_s / 8 or LONGEST_SILENCE_S)
        self._lock = threading.Lock()
        self._last_call_s = time.monotonic()
        self._quits = threading.Event()
        # True once the server has asked workers to stop.
        self.stops = False
        # Seconds that exchanges have taken so far.
        self.waited_s = 0.0

    def start(self) -> None:
        """Starts the background calls to the server."""
        # A daemon: a failing script must not wait for it.
        threading.Thread(target=self._keep_alive, daemon=True, name="tfposeidon-alive").start()

    def _keep_alive(self) -> None:
        while not self._quits.wait(self._silence_s / 2):
            with self._lock:
                if self._quits.is_set():
                    return
                if time.monotonic() - self._last_call_s < self._silence_s / 2:
                    continue
                try:
                    self._call(Call.ALIVE)
                except tf.errors.OpError:
                    # The job is ending, and the next exchange raises the reason.
                    return

    def _call(self, call: Call, centre: int = 0) -> None:
        self.stops = make_call(self._wire, call, centre) or self.stops
        self._last_call_s = time.monotonic()

    def swap(self, centre: int, values: tf.Tensor) -> tf.Tensor:
        """Exchanges with a center; returns `values` minus the center, the same bits as the server.

        `values` is a float32 vector, all finite.
        """
        begin_s = time.perf_counter()
        with self._lock:
            self._call(Call.SWAP, centre)
            difference = sum_of_both(self._wire, values, "tp.swap")
        self.waited_s += time.perf_counter() - begin_s
        return difference

    def give_slots(self, centre: int, slots: Slots) -> None:
        """Sends this worker's optimizer state to the server."""
        with self._lock:
            self._call(Call.GIVE, centre)
            give_slots(self._wire, slots)

    def take(self, centre: int) -> tuple[tf.Tensor, Slots]:
        """Returns a center's values, a float32 vector, and the server's optimizer state."""
        with self._lock:
            self._call(Call.TAKE, centre)
            centre_now = receive(self._wire, "tp.centre", tf.float32)
            return centre_now, receive_slots(self._wire)

    def end_epoch(self, has_trained: bool) -> None:
        """Notifies the server of the end of an epoch, with or without a batch."""
        with self._lock:
            self._call(Call.EPOCH if has_trained else Call.EMPTY_EPOCH)

    def wait_for_others(self) -> None:
        """Notifies the server of the end of training, and waits until it releases this worker."""
        with self._lock:
            self._call(Call.ENDED)
        while not self._ask():
            time.sleep(ASKS_EVERY_S)

    def _ask(self) -> bool:
        with self._lock:
            self._call(Call.ASK)
            answer = sum_of_both(self._wire, tf.constant([0], tf.int64), "tp.answer")
        return bool(answer.numpy()[0])

    def leave(self) -> None:
        """Calls the server for the last time."""
        with self._lock:
            self._quits.set()
            self._call(Call.LEAVE)

    def fall_silent(self) -> None:
        """Stops calling, as after an error: Horovod ends the job unless another rank does."""
        self._quits.set()

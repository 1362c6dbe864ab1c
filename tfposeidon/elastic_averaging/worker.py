"""A worker's side of its pair with the server."""

from __future__ import annotations

import threading
import time

import tensorflow as tf

from tfposeidon.communication.wire import Wire
from tfposeidon.elastic_averaging.calls import Call, make_call, receive, sum_of_both
from tfposeidon.elastic_averaging.slots import Slots, give_slots, receive_slots

LONGEST_SILENCE_S = 15.0
"""Seconds after which a worker tells that it is alive, where limits are no shorter."""
ASKS_EVERY_S = 0.2
"""Seconds between two questions whether the server lets go."""


class Worker:
    """Calls the server: at exchanges, and in between so that Horovod does not take it for stalled.

    Args:
      wire: Wire of the pair of this worker and the server.
      stall_limit_s: Seconds after which Horovod ends a job in which a rank is late; 0 for never.

    Attributes:
      stops: True once the server has asked workers to stop.
      waited_s: Seconds that exchanges have taken so far.
    """

    def __init__(self, wire: Wire, stall_limit_s: float) -> None:
        self._wire = wire
        # Horovod looks at intervals of a quarter of the limit.
        self._silence_s = min(LONGEST_SILENCE_S, stall_limit_s / 8 or LONGEST_SILENCE_S)
        self._lock = threading.Lock()
        self._last_call_s = time.monotonic()
        self._quits = threading.Event()
        self.stops = False
        self.waited_s = 0.0

    def start(self) -> None:
        """Begins to tell the server that this worker is alive."""
        # A daemon: a script that fails does not wait for it.
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
                    # The job ends: the next exchange says why.
                    return

    def _call(self, call: Call, centre: int = 0) -> None:
        self.stops = make_call(self._wire, call, centre) or self.stops
        self._last_call_s = time.monotonic()

    def swap(self, centre: int, values: tf.Tensor) -> tf.Tensor:
        """Exchanges with one of the server's centres.

        Args:
          centre: Number of the centre.
          values: This worker's values, a float32 vector; all finite.

        Returns:
          The values less the centre's, the same bits as the server has.
        """
        begin_s = time.perf_counter()
        with self._lock:
            self._call(Call.SWAP, centre)
            difference = sum_of_both(self._wire, values, "tp.swap")
        self.waited_s += time.perf_counter() - begin_s
        return difference

    def give_slots(self, centre: int, slots: Slots) -> None:
        """Hands the server this worker's slots.

        Args:
          centre: Number of the centre.
          slots: Slots of the optimizer that exchanges with it.
        """
        with self._lock:
            self._call(Call.GIVE, centre)
            give_slots(self._wire, slots)

    def take(self, centre: int) -> tuple[tf.Tensor, Slots]:
        """Returns a centre, a float32 vector, and the server's slots.

        Args:
          centre: Number of the centre.
        """
        with self._lock:
            self._call(Call.TAKE, centre)
            centre_now = receive(self._wire, "tp.centre", tf.float32)
            return centre_now, receive_slots(self._wire)

    def end_epoch(self, has_trained: bool) -> None:
        """Tells the server that this worker has ended an epoch.

        Args:
          has_trained: False for an epoch without a batch.
        """
        with self._lock:
            self._call(Call.EPOCH if has_trained else Call.EMPTY_EPOCH)

    def wait_for_others(self) -> None:
        """Tells the server that this worker trains no more, and waits until it is let go."""
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
        """Calls no more, as after an error: Horovod ends the job if nobody else does."""
        self._quits.set()

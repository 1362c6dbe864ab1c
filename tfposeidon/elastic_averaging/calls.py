"""Calls of workers to the server, for which the server always waits, and optimizer state in them.

A worker and the server are a pair with its own communicator. A call is an all-reduce of one number,
which identifies the next operation. So workers call at any time, and the server reads the global
weights only after a call. To that number the server adds a stop flag, as it was when it began to
wait. A `Worker` calls for exchanges, and a background thread calls while steps are slow.

Collectives here run eagerly. Horovod matches them by their order, which is the order of a worker's
calls: a worker calls sequentially, and the server has one thread per worker. They use none of
TensorFlow's threads, of which there may be only one, for the steps.
"""

from __future__ import annotations

import enum
import threading
import time
from typing import NamedTuple

import tensorflow as tf

from tfposeidon.communication.wire import Wire

_KINDS = 16
"""Multiplier that packs a call and the index of a center into one integer."""
_STOP = 2**32
"""Stop flag that the server adds to a call; larger than any call."""

LONGEST_SILENCE_S = 15.0
"""Longest time in seconds between calls, unless the stall limit requires a shorter one."""
ASKS_EVERY_S = 0.2
"""Seconds between questions to the server whether it releases the worker."""


class Call(enum.IntEnum):
    """Kinds of calls."""

    ALIVE = 1
    """Keeps Horovod from reporting the server as stalled while a worker is slow. No data follow."""
    SWAP = 2
    """An exchange with a center follows, to which both sides contribute."""
    EPOCH = 3
    """The worker has ended an epoch. No data follow."""
    ENDED = 4
    """The worker has finished training. No data follow."""
    ASK = 5
    """An answer follows: 1 if the server releases the worker, else 0."""
    LEAVE = 6
    """The worker's last call."""
    EMPTY_EPOCH = 7
    """The worker has ended an epoch without a batch. No data follow."""
    GIVE = 8
    """The worker's optimizer state follows."""
    TAKE = 9
    """The global weights follow, and then the server's optimizer state."""


def make_call(wire: Wire, call: Call, center: int = 0) -> bool:
    """Calls the server about a center; returns whether the server asks workers to stop."""
    return _sum(wire, call + _KINDS * center) >= _STOP


def wait_for_call(wire: Wire, stops: bool) -> tuple[Call, int]:
    """Waits for the worker's next call; returns its kind and the index of its center."""
    number = _sum(wire, _STOP * stops) % _STOP
    return Call(number % _KINDS), number // _KINDS


def _sum(wire: Wire, number: int) -> int:
    return int(sum_of_both(wire, tf.constant([number], tf.int64), "tp.call").numpy()[0])


def sum_of_both(wire: Wire, mine: tf.Tensor, name: str) -> tf.Tensor:
    """Returns the sum of both sides' vectors, with the same bits on both."""
    return wire.all_reduce(mine, wire.topology.world, name)


def give(wire: Wire, vector: tf.Tensor, name: str) -> None:
    """Sends a vector, `[n]`, to the other side of a pair, which calls `receive`."""
    wire.all_gather(vector, wire.topology.world, name)


def receive(wire: Wire, name: str, dtype: tf.DType) -> tf.Tensor:
    """Returns the vector that the other side of a pair sends with `give`."""
    return wire.all_gather(tf.zeros([0], dtype), wire.topology.world, name)


class Slots(NamedTuple):
    """Optimizer state as a float32 vector, with its number of steps, as bias correction uses it."""

    values: tf.Tensor
    steps: int


def give_slots(wire: Wire, slots: Slots) -> None:
    """Sends optimizer state to the other side of a pair, which calls `receive_slots`."""
    give(wire, slots.values, "tp.slots")
    give(wire, tf.constant([slots.steps], tf.int64), "tp.steps")


def receive_slots(wire: Wire) -> Slots:
    """Returns the optimizer state that the other side of a pair sends with `give_slots`."""
    values = receive(wire, "tp.slots", tf.float32)
    return Slots(values, int(receive(wire, "tp.steps", tf.int64).numpy()[0]))


class ServedSlots:
    """Optimizer state on the server: a mean of the newest states that workers have sent.

    Workers start with it in a resumed run, and after their weights were not finite. A second state
    of the same worker starts a new mean, so that each worker counts once without a stored vector
    per worker. So a fast worker's state may temporarily be the whole mean.
    """

    def __init__(self, start: Slots) -> None:
        self._start_steps = start.steps
        self._values = tf.Variable(start.values, trainable=False)
        self._steps: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def now(self) -> Slots:
        """The mean of the states, and of their numbers of steps."""
        with self._lock:
            steps = list(self._steps.values()) or [self._start_steps]
            return Slots(self._values.read_value(), sum(steps) // len(steps))

    def take(self, wire: Wire, worker: int) -> None:
        """Receives a worker's state after its call, and updates the mean."""
        slots = receive_slots(wire)
        with self._lock:
            if worker in self._steps:
                self._steps.clear()
            self._steps[worker] = slots.steps
            # In place, since the state may be twice as large as the weights.
            tf.raw_ops.ResourceApplyGradientDescent(
                var=self._values.handle,
                alpha=1.0 / len(self._steps),
                delta=self._values - slots.values,
                use_locking=True,
            )

    def give(self, wire: Wire) -> None:
        """Sends the state to a worker after its call."""
        give_slots(wire, self.now)


# ------------------------------------------------------------------ worker


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

    def _call(self, call: Call, center: int = 0) -> None:
        self.stops = make_call(self._wire, call, center) or self.stops
        self._last_call_s = time.monotonic()

    def swap(self, center: int, values: tf.Tensor) -> tf.Tensor:
        """Exchanges with a center; returns `values` minus the center, the same bits as the server.

        `values` is a float32 vector, all finite.
        """
        begin_s = time.perf_counter()
        with self._lock:
            self._call(Call.SWAP, center)
            difference = sum_of_both(self._wire, values, "tp.swap")
        self.waited_s += time.perf_counter() - begin_s
        return difference

    def give_slots(self, center: int, slots: Slots) -> None:
        """Sends this worker's optimizer state to the server."""
        with self._lock:
            self._call(Call.GIVE, center)
            give_slots(self._wire, slots)

    def take(self, center: int) -> tuple[tf.Tensor, Slots]:
        """Returns a center's values, a float32 vector, and the server's optimizer state."""
        with self._lock:
            self._call(Call.TAKE, center)
            center_now = receive(self._wire, "tp.center", tf.float32)
            return center_now, receive_slots(self._wire)

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

"""Contribution of a rank to a synchronization, its result, and the thread of the exchange.

Think of a `Flight` as a future: the training thread starts it and reads the result steps later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import tensorflow as tf


class Sent(NamedTuple):
    """Contribution of this rank: trained weights minus global weights, and averaged statistics.

    `count` is the rank's weight, a float32 scalar: 0 without samples or with values that are not
    finite. `finite` is a bool scalar for the differences, equal on all ranks of a replica.
    """

    differences: list[tf.Tensor]
    statistics: list[tf.Tensor]
    count: tf.Tensor
    finite: tf.Tensor


class Found(NamedTuple):
    """Result of an exchange, the same on all ranks except for the new scheme `states`.

    `total` is the sum of all weights, a float32 scalar. `counts` is a bool scalar: any rank
    contributed and the means are finite. `absent` is the number of ranks without data, a float32
    scalar.
    """

    means: list[tf.Tensor]
    statistics: list[tf.Tensor]
    states: list[tf.Tensor]
    total: tf.Tensor
    counts: tf.Tensor
    absent: tf.Tensor


class Flight:
    """Exchange in a thread, with the contribution of this rank."""

    def __init__(self, sent: Sent, exchange: Callable[[], Found]) -> None:
        self.sent = sent
        self._future: Future[Found] = Future()
        # A daemon: a failing job must not wait for ranks that have exited.
        thread = threading.Thread(
            target=_run, args=(exchange, self._future), daemon=True, name="tfposeidon-exchange"
        )
        thread.start()
        self._thread = thread

    @property
    def has_failed(self) -> bool:
        """True once the exchange has ended with an error."""
        return self._future.done() and self._future.exception() is not None

    def found(self) -> Found:
        """Waits for the exchange, and returns its result or raises its error."""
        return self._future.result()

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until the exchange has ended, with or without an error."""
        self._thread.join(timeout_s)


def _run(exchange: Callable[[], Found], future: Future[Found]) -> None:
    try:
        future.set_result(exchange())
    except BaseException as error:  # noqa: BLE001 (it is raised where the result is asked for)
        future.set_exception(error)

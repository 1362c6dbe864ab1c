"""Contribution of a rank to a synchronization, its result, and a thread that exchanges them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import tensorflow as tf


class Sent(NamedTuple):
    """Contribution of this rank.

    Attributes:
      differences: Its weights minus the global ones, one tensor for each trained variable.
      statistics: Its averaged state of layers.
      count: Its weight, a float32 scalar: 0 if it has trained on nothing, or is not finite.
      finite: True if its differences are finite, a bool scalar; the same on all ranks of a replica.
    """

    differences: list[tf.Tensor]
    statistics: list[tf.Tensor]
    count: tf.Tensor
    finite: tf.Tensor


class Found(NamedTuple):
    """Result of an exchange, the same on all ranks but for `states`.

    Attributes:
      means: Mean difference of each trained variable.
      statistics: Mean of each statistic.
      states: New state of the schemes.
      total: Sum of the weights of all ranks, a float32 scalar.
      counts: True if any rank has contributed and the means are finite, a bool scalar.
      absent: Number of ranks without data, a float32 scalar.
    """

    means: list[tf.Tensor]
    statistics: list[tf.Tensor]
    states: list[tf.Tensor]
    total: tf.Tensor
    counts: tf.Tensor
    absent: tf.Tensor


class Flight:
    """An exchange in a thread, with the contribution of this rank."""

    def __init__(self, sent: Sent, exchange: Callable[[], Found]) -> None:
        self.sent = sent
        self._future: Future[Found] = Future()
        # A daemon: a job that ends with an error does not wait for ranks that are gone.
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
        """Waits until the exchange is over, whatever its outcome."""
        self._thread.join(timeout_s)


def _run(exchange: Callable[[], Found], future: Future[Found]) -> None:
    try:
        future.set_result(exchange())
    except BaseException as error:  # noqa: BLE001 (it is raised where the result is asked for)
        future.set_exception(error)

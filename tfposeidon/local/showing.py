"""Assigns global weights to the variables for user code, and local weights for steps.

`fit` calls the hooks and callbacks of `Showing`. Weights that user code assigns before `fit` or
between epochs become the new global weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.local.synchronization import Synchronization
from tfposeidon.training.equal_steps import has_batch_hooks
from tfposeidon.training.global_metrics import SAVING
from tfposeidon.training.hooks import FitHooks


class Showing:
    """Switches a model's variables between global and local weights around steps and callbacks.

    If user code assigns weights while the global weights are shown, all ranks continue from them.
    """

    def __init__(self, find: Callable[[], Synchronization | None]) -> None:
        # `find` returns `None` before the optimizer is built, because some models build their
        # optimizers only in the first step.
        self._find = find
        # The first step after `fit` may communicate, because all ranks execute it together.
        self._checks_next_step = False
        self._shows_after_steps = True

    def hooks(self) -> FitHooks:
        first = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: self.restart_if_assigned(),
            on_test_begin=lambda logs: self.show(),
            on_epoch_end=lambda epoch, logs: self.show(),
            on_train_end=lambda logs: self._end_fit(),
        )
        # The user's callbacks may have assigned weights.
        last = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: self.restart_if_assigned()
        )
        return FitHooks(
            first=[first],
            last=[last],
            around=self._around,
            begin_step=self._begin_step,
            end_step=self._end_step,
            is_in_step=False,
        )

    def show(self) -> None:
        if (synchronization := self._find()) is not None:
            synchronization.weights.show()

    def _begin_step(self) -> None:
        synchronization = self._find()
        if synchronization is None:
            return
        if self._checks_next_step:
            self._checks_next_step = False
            self.restart_if_assigned()
            if not synchronization.weights.has_begun:
                # In `fit`, `AgreedStop` compares assigned weights.
                synchronization.weights.check_equal()
        elif synchronization.weights.was_assigned:
            raise RuntimeError(
                "Weights must not be assigned between two steps, because the next "
                "synchronization overwrites them. Received: weights that differ from the global "
                "weights. Assign them before fit or between epochs; in a custom loop, call "
                "LocalUpdates.restart_from_weights() afterwards, on all ranks."
            )
        synchronization.begin_step()

    def _end_step(self, steps: int) -> None:
        if (synchronization := self._find()) is None:
            return
        synchronization.end_step(steps)
        if self._shows_after_steps:
            synchronization.weights.show()

    @contextlib.contextmanager
    def _around(self, callbacks: Sequence[Any]) -> Iterator[None]:
        self._checks_next_step = False
        self._shows_after_steps = any(map(reads_after_batches, callbacks))
        try:
            yield
        finally:
            self._shows_after_steps = True
            self.show()

    def _end_fit(self) -> None:
        """Ends a `fit`. The first step afterwards checks whether weights were assigned."""
        self.restart_if_assigned()
        self._checks_next_step = True
        if (synchronization := self._find()) is not None:
            synchronization.warn_if_none_has_completed()

    def restart_if_assigned(self) -> None:
        """Shows the global weights, and restarts all ranks if weights were assigned on any of them.

        All ranks must call this method together.
        """
        synchronization = self._find()
        if synchronization is None or not synchronization.weights.has_begun:
            return
        synchronization.weights.show()
        was_assigned = synchronization.weights.was_assigned
        if any(exchange_objects(was_assigned, runtime.wire(), "tp.assigned")):
            synchronization.restart()


def reads_after_batches(callback: Any) -> bool:
    """Returns whether a callback may read or save weights after batches."""
    if isinstance(callback, SAVING) and callback.save_freq != "epoch":
        return True
    # Other callbacks of Keras read weights only at the end of epochs, and `keras_callbacks` handle
    # global weights.
    return has_batch_hooks(callback)

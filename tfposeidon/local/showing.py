"""Shows the global weights of `LocalUpdates` to the code of users, and hides them in steps."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from typing_extensions import override

from tfposeidon.communication import agreement, runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.local.synchronization import Synchronization
from tfposeidon.training.equal_steps import has_batch_hooks
from tfposeidon.training.hooks import FitHooks


class Showing:
    """Shows and hides the global weights of one optimizer.

    Weights that are assigned while they are shown are those from which all ranks go on.

    Args:
      find: Function that returns the synchronization; `None` before the optimizer is built.
      prepare: Called before the first step, to carry averaged state of layers.
      end_fit: Called at the end of `fit`.
    """

    def __init__(
        self,
        find: Callable[[], Synchronization | None],
        prepare: Callable[[], None],
        end_fit: Callable[[], None],
    ) -> None:
        self._find, self._prepare, self._end_fit = find, prepare, end_fit
        # After `fit` all ranks take the first step, which may communicate.
        self._looks_once = False
        self._shows_after_steps = True

    def hooks(self, model: Any, check_steps: Callable[[int], None]) -> FitHooks:
        """Returns what `fit` of a model does for the optimizer."""
        reference: Callable[[], Any] = weakref.ref(model)

        def begin_step() -> None:
            check_steps(reference().steps_per_execution)
            self._begin_step()

        return FitHooks(
            first=[First(self)],
            last=[Last(self)],
            around=self._around,
            begin_step=begin_step,
            end_step=self._end_step,
            is_in_step=False,
        )

    def show(self) -> None:
        """Puts the global weights into the variables, until the next step."""
        if (synchronization := self._find()) is not None:
            synchronization.weights.show()

    def _begin_step(self) -> None:
        synchronization = self._find()
        if synchronization is None:
            return
        if self._looks_once:
            self._looks_once = False
            self.restart_if_assigned()
        elif synchronization.weights.was_assigned:
            raise RuntimeError(
                "Weights that are assigned between two steps are lost in the next synchronization. "
                "Received: other weights than the global ones that were shown. Assign them before "
                "fit or between epochs; in a loop of your own, call "
                "LocalUpdates.restart_from_weights() afterwards, on all ranks."
            )
        if not synchronization.weights.has_begun:
            # Statistics move in the step, before it comes to the optimizer.
            self._prepare()
        synchronization.begin_step()

    def _end_step(self, steps: int) -> None:
        # The first step builds the optimizers of some models.
        if (synchronization := self._find()) is None:
            return
        synchronization.end_step(steps)
        if self._shows_after_steps:
            synchronization.weights.show()

    @contextlib.contextmanager
    def _around(self, callbacks: Sequence[Any]) -> Iterator[None]:
        self._looks_once = False
        self._shows_after_steps = any(map(looks_after_batches, callbacks))
        try:
            yield
        finally:
            self._shows_after_steps = True
            self.show()

    def end_fit(self) -> None:
        """Ends a `fit`: the first step after it looks whether other weights were assigned."""
        self.restart_if_assigned()
        self._looks_once = True
        self._end_fit()

    def restart_if_assigned(self, are_equal: bool = True) -> None:
        """Shows the global weights, and makes all ranks go on from those that were assigned.

        All ranks call it together. `are_equal=False` is for weights that a broadcast may follow.

        Raises:
          RuntimeError: On all ranks, if weights should be equal and are not.
        """
        synchronization = self._find()
        if synchronization is None or not synchronization.weights.has_begun:
            return
        weights = synchronization.weights
        weights.show()
        own = [weights.was_assigned, weights.checksum()]
        everybody = exchange_objects(own, runtime.wire(), "tp.assigned")
        if are_equal:
            agreement.require_equal(
                [checksum for _, checksum in everybody],
                "All ranks must begin with the same weights",
                "Assign them on all ranks, or give fit keras_callbacks.BroadcastVariables().",
            )
        if any(was_assigned for was_assigned, _ in everybody):
            synchronization.restart()


class First(keras.callbacks.Callback):
    """Shows the global weights before callbacks of the user look at them."""

    def __init__(self, showing: Showing) -> None:
        super().__init__()
        self._showing = showing

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        # A broadcast may follow, and the state that other callbacks restore.
        self._showing.restart_if_assigned(are_equal=False)

    @override
    def on_test_begin(self, logs: Any = None) -> None:
        self._showing.show()

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._showing.show()

    @override
    def on_train_end(self, logs: Any = None) -> None:
        self._showing.end_fit()


class Last(keras.callbacks.Callback):
    """Goes on from the weights that callbacks of the user have assigned."""

    def __init__(self, showing: Showing) -> None:
        super().__init__()
        self._showing = showing

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._showing.restart_if_assigned()

    @override
    def on_train_end(self, logs: Any = None) -> None:
        self._showing.show()


def looks_after_batches(callback: Any) -> bool:
    """Returns whether a callback may look at weights, or save them, after batches."""
    # Subclasses may do more.
    if type(callback) in (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore):
        return bool(callback.save_freq != "epoch")
    # All others of Keras look at the end of epochs only; our own know of global weights.
    is_known = type(callback).__module__.split(".")[0] in ("keras", "keras_callbacks")
    if is_known and not isinstance(callback, keras.callbacks.LambdaCallback):
        return False
    return has_batch_hooks(callback)

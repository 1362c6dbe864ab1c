"""Weights that each rank of a model trains by itself: when its global weights are shown instead."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from tfposeidon.communication import agreement, runtime
from tfposeidon.communication.wire import exchange_objects


class LocalWeights:
    """Shows the global weights whenever code of users runs, and hides them in steps.

    Weights that are assigned while they are shown are those from which all ranks go on. With
    optimizers that exchange gradients all of this does nothing.

    Args:
      find: Function that returns the model's optimizers that communicate.

    Attributes:
      shows_after_steps: False in a `fit` whose callbacks do not look at weights after batches.
    """

    def __init__(self, find: Callable[[], list[Any]]) -> None:
        self._find = find
        self._looks_once = False
        self.shows_after_steps = True

    @property
    def exist(self) -> bool:
        """True if ranks train weights of their own."""
        return bool(self.optimizers)

    @property
    def optimizers(self) -> list[Any]:
        """Optimizers of the model that let ranks train weights of their own."""
        return [optimizer for optimizer in self._find() if optimizer.has_local_weights]

    @property
    def _weights(self) -> list[Any]:
        return _weights_of(self.optimizers)

    def show(self) -> None:
        """Puts the global weights into the variables, until the next step."""
        for weights in self._weights:
            weights.show()

    def begin_step(self, optimizers: Sequence[Any]) -> None:
        """Puts this rank's own weights into the variables."""
        every = _weights_of(optimizers)
        if self._looks_once:
            # The first step after `fit`, which all ranks take. In `fit` some may have no batch.
            self._looks_once = False
            self.restart_if_assigned()
        elif any(weights.was_assigned for weights in every):
            raise RuntimeError(
                "Weights that are assigned between two steps are lost in the next synchronization. "
                "Received: other weights than the global ones that were shown. Assign them before "
                "fit or between epochs; in a loop of your own, call "
                "LocalUpdates.restart_from_weights() afterwards, on all ranks."
            )
        for weights in every:
            weights.begin()

    def end_step(self, optimizers: Sequence[Any], steps: int) -> None:
        """Counts steps, which may synchronize the ranks."""
        for optimizer in optimizers:
            optimizer.end_step(steps)
        if self.shows_after_steps:
            for weights in _weights_of(optimizers):
                weights.show()

    def end_fit(self) -> None:
        """Ends a `fit`: the first step after it looks whether other weights were assigned."""
        self.restart_if_assigned()
        self._looks_once = self.exist
        for optimizer in self.optimizers:
            optimizer.end_fit()

    @contextlib.contextmanager
    def in_fit(self, looks: bool) -> Iterator[None]:
        """Surrounds a `fit`; `looks` says that its callbacks look at weights after batches."""
        self.shows_after_steps, self._looks_once = looks, False
        try:
            yield
        finally:
            self.shows_after_steps = True
            self.show()

    def note_assigned(self) -> None:
        """Takes the values that are shown for the global weights, as a checkpoint restores them."""
        for weights in self._weights:
            weights.note_assigned()

    def restart_if_assigned(self, are_equal: bool = True) -> None:
        """Shows the global weights, and makes all ranks go on from those that were assigned.

        All ranks call it together. `are_equal=False` is for weights that a broadcast may follow.

        Raises:
          RuntimeError: On all ranks, if weights should be equal and are not.
        """
        self.show()
        every = [weights for weights in self._weights if weights.has_begun]
        if not every:
            return
        own = [any(one.was_assigned for one in every), [one.checksum() for one in every]]
        everybody = exchange_objects(own, runtime.wire(), "tp.assigned")
        if are_equal:
            agreement.require_equal(
                [checksums for _, checksums in everybody],
                "All ranks must begin with the same weights",
                "Assign them on all ranks, or give fit keras_callbacks.BroadcastVariables().",
            )
        if any(was_assigned for was_assigned, _ in everybody):
            for optimizer in self.optimizers:
                optimizer.restart_from_weights()


def _weights_of(optimizers: Sequence[Any]) -> list[Any]:
    every = [optimizer.weights_beside for optimizer in optimizers]
    return [weights for weights in every if weights is not None]


def looks_after_batches(callback: Any) -> bool:
    """Returns whether a callback may look at weights, or save them, after batches."""
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        return callback.save_freq != "epoch"
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        return bool(callback.save_freq != "epoch")
    # All others of Keras look at the end of epochs only; our own know of global weights.
    is_known = type(callback).__module__.split(".")[0] in ("keras", "keras_callbacks")
    if is_known and not isinstance(callback, keras.callbacks.LambdaCallback):
        return False
    return has_batch_hooks(callback)


def has_batch_hooks(callback: Any) -> bool:
    """Returns whether a callback does anything in the middle of an epoch of training."""
    hooks = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
    base = keras.callbacks.Callback
    return any(
        getattr(getattr(callback, hook), "__func__", None) is not getattr(base, hook)
        for hook in hooks
    )

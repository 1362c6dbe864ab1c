"""Epochs have as many steps as the rank with the fewest batches, and end on all ranks together."""

from __future__ import annotations

from typing import Any

import keras

from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.optimizers.wrapping import innermost
from tfposeidon.training import session


def with_equal_epochs(callbacks: list[Any]) -> list[Any]:
    """Callbacks for `fit` on several ranks.

    What counts steps comes before the others, because they may communicate at the end of an epoch;
    what ends training comes after them, because they may ask for it.
    """
    return [EqualSteps(may_stop=any(map(_may_stop, callbacks))), *callbacks, AgreedStop()]


def _may_stop(callback: Any) -> bool:
    """Whether a callback may set `stop_training` in the middle of an epoch."""
    if isinstance(callback, keras.callbacks.TerminateOnNaN | keras.callbacks.LambdaCallback):
        return True
    if type(callback).__module__.split(".")[0] in ("keras", "keras_callbacks"):
        return False
    hooks = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
    base = keras.callbacks.Callback
    return any(
        getattr(getattr(callback, hook), "__func__", None) is not getattr(base, hook)
        for hook in hooks
    )


class EqualSteps(keras.callbacks.Callback):
    """Ends each epoch, on all ranks, after the fewest batches that any rank has.

    Where every rank knows its number of batches, and steps are executed one by one, the smallest is
    agreed on when training begins and costs nothing. Otherwise, and where a callback may stop training in the middle
    of an epoch, ranks that are done with it take part in the others' next step with nothing to give, which tells
    those to stop, too.

    Args:
      may_stop: Whether a callback of this rank may stop training in the middle of an epoch.
    """

    def __init__(self, may_stop: bool = False) -> None:
        super().__init__()
        self._may_stop = may_stop

    def on_train_begin(self, logs: Any = None) -> None:
        everybody = exchange_objects(
            [self.params.get("steps"), self._may_stop], runtime.wire(), "tp.steps"
        )
        steps = [number for number, _ in everybody]
        known = None not in steps
        # Keras gives this dictionary to all callbacks: rates by fractions of an epoch are alike only if its steps are.
        self.params["steps"] = min(steps) if known else None
        equal = known and len(set(steps)) == 1
        self._limit = (
            min(steps) if equal or (known and self.model.steps_per_execution == 1) else None
        )
        if not equal:
            counts = ", ".join(
                "unknown" if s is None else str(s) for s in sorted(set(steps), key=str)
            )
            runtime.say(
                "tfposeidon: ranks have different or unknown numbers of batches (%s); each epoch ends on all ranks "
                "after the fewest that any of them has.",
                counts,
            )
        self._session = session.of(self.model)
        self._watches = self._limit is None or any(may_stop for _, may_stop in everybody)
        if self.model.run_eagerly and len(self._session.optimizers) > 1:
            self._watches = self._limit is None
            _check_limit_is_known(self._limit)
        if self._session.watch_absence(self._watches):
            self.model.make_train_function(force=True)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._done = 0
        self._open, self._trained = True, False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._limit is not None and batch >= self._limit:
            raise StopIteration
        self._skipping = self._session.is_skipping
        self._before = self._session.steps_done if self._watches else 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._done = batch + 1
        self._trained = self._trained or not self._skipping
        if not self._watches or self._skipping:
            return
        cut_short = self._session.steps_done - self._before < self.model.steps_per_execution
        if cut_short or self._session.absent_ranks:
            raise StopIteration

    def on_test_begin(self, logs: Any = None) -> None:
        self._end_steps()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._end_steps()

    def _end_steps(self) -> None:
        if not getattr(self, "_open", False):
            return
        self._open = False
        if self._watches:
            # A resumed epoch may have been at its end already, on all ranks.
            if self._trained or not self._done or self._limit is None:
                self._session.finish_epoch()
        elif self._limit is not None and self._done < self._limit:
            raise RuntimeError(
                f"Every rank must do the {self._limit} steps per epoch that were agreed on. Received: only "
                f"{self._done} on rank {runtime.rank()}: its data ran out early, while other ranks go on. Give it more "
                "data, or leave steps_per_epoch out."
            )


class AgreedStop(keras.callbacks.Callback):
    """Stops training on all ranks after the epoch in which any rank wants to stop, and keeps them from parting.

    Before the first epoch and after each, ranks compare what has to be alike beside the weights.

    Raises:
      RuntimeError: On all ranks alike, naming the first difference.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        self._begun = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        # A callback that restores something on one rank alone (BackupAndRestore) begins at another epoch.
        if not self._begun:
            _check_settings(
                exchange_objects(_settings(self.model, epoch), runtime.wire(), "tp.begin")
            )
        self._begun = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        mine = [bool(self.model.stop_training), _settings(self.model, epoch)]
        everybody = exchange_objects(mine, runtime.wire(), "tp.stop")
        _check_settings([settings for _, settings in everybody])
        self.model.stop_training = any(stop for stop, _ in everybody)


def _check_limit_is_known(limit: int | None) -> None:
    if limit is None:
        raise ValueError(
            "With run_eagerly=True and several optimizers every rank must know its number of batches. Received: data "
            "of unknown length. Leave run_eagerly out, or give fit steps_per_epoch."
        )


def _settings(model: keras.Model, epoch: int) -> dict[str, Any]:
    """What ranks must hold alike beside the weights, as JSON can carry it."""
    settings: dict[str, Any] = {
        "epoch": epoch,
        "trainable variables": [v.path for v in model.trainable_variables],
    }
    for number, optimizer in enumerate(session.optimizers_of(model)):
        inner = innermost(optimizer)
        of_which = f" of optimizer {number}" if number else ""
        settings[f"learning rate{of_which}"] = float(optimizer.learning_rate)
        settings[f"momentum{of_which}"] = _as_float(getattr(inner, "momentum", None))
        settings[f"weight decay{of_which}"] = _as_float(inner.weight_decay)
    return settings


def _as_float(value: Any) -> float | None:
    return None if value is None else float(value)


def _check_settings(everybody: list[dict[str, Any]]) -> None:
    for rank, other in enumerate(everybody):
        for what, value in everybody[0].items():
            if other[what] != value:
                raise RuntimeError(
                    f"All ranks must train alike. Received: {what} {_description(value, other[what])} on rank 0, "
                    f"{_description(other[what], value)} on rank {rank}. Callbacks that set or restore it belong on all "
                    "ranks and must see the same metrics there (keras_callbacks.MetricAverage); of what one rank "
                    "restores, use keras_callbacks.Checkpoint."
                )


def _description(value: Any, other: Any) -> str:
    """The value; of a long list, how many there are and the first that the other list has not."""
    if not isinstance(value, list):
        return str(value)
    more = [item for item in value if item not in other]
    return f"{len(value)}" + (f" ({more[0]!r} among them)" if more else "")

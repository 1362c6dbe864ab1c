"""Keras callbacks with a server of global weights: some run on the server, others are refused.

The server holds the global weights and their metrics, and takes no training steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from tfposeidon.training.layer_averages import SAVING

_AT_THE_SERVER = (
    *SAVING,
    keras.callbacks.CSVLogger,
    keras.callbacks.EarlyStopping,
    keras.callbacks.TensorBoard,
)
"""Keras callbacks that run on the server only: they save, stop, or log the global weights."""
_BY_STEPS = {
    "every_n_steps": "every_n_steps=None",
    "save_freq": 'save_freq="epoch"',
    "update_freq": 'update_freq="epoch"',
}
"""Arguments that may be numbers of steps, and their supported replacements."""


def acts_at_server(callback: Any) -> bool:
    """Returns whether a callback runs on the server only; others set `acts_at_server = True`."""
    return isinstance(callback, _AT_THE_SERVER) or getattr(callback, "acts_at_server", False)


def check(callback: Any) -> None:
    """Refuses callbacks that need steps or rates on the server, or stop a single worker."""
    name = type(callback).__name__
    if isinstance(callback, keras.callbacks.ReduceLROnPlateau):
        raise ValueError(
            "ElasticAveraging does not support ReduceLROnPlateau: workers hold the learning rates,"
            " and the server holds the metrics of the global weights. Received: ReduceLROnPlateau."
            " Use a schedule of keras.optimizers.schedules, or "
            "keras_callbacks.LearningRateSchedule."
        )
    if isinstance(callback, keras.callbacks.TerminateOnNaN) and not callback.raise_error:
        raise ValueError(
            "ElasticAveraging does not support TerminateOnNaN without raise_error: a worker "
            "whose weights are not finite continues from the global weights, and the other "
            "workers continue without a worker that stops. Received: TerminateOnNaN. Leave it "
            "out, or use TerminateOnNaN(raise_error=True), which ends the job."
        )
    for argument, instead in _BY_STEPS.items():
        value = getattr(callback, argument, None)
        if acts_at_server(callback) and (isinstance(value, int) or value == "batch"):
            raise ValueError(
                f"With ElasticAveraging, {name} must act at the end of epochs, because it runs on "
                f"the server, which takes no steps. Received: {name}({argument}={value!r}). Use "
                f"{instead}."
            )


def with_announced_metrics(callbacks: list[Any], names: Callable[[], list[str]]) -> list[Any]:
    """Inserts before each `CSVLogger` a callback that adds columns for later epochs' metrics."""
    found: list[Any] = []
    for callback in callbacks:
        # It takes its columns from the logs of the first epoch.
        if isinstance(callback, keras.callbacks.CSVLogger):
            announce = functools.partial(_announce, callback, names)
            found.append(keras.callbacks.LambdaCallback(on_epoch_end=announce))
        found.append(callback)
    return found


def _announce(
    logger: keras.callbacks.CSVLogger, names: Callable[[], list[str]], epoch: int, logs: Any
) -> None:
    """Sets a logger's columns after earlier callbacks have extended the logs of an epoch."""
    # The logger would guess names of validation metrics from those of training.
    if logger.keys is None:
        logger.keys = sorted({*logs, *names()})


def fate_without_snapshot(callbacks: list[Any]) -> str:
    """Returns the state of the global weights after a failure, for jobs without a snapshot."""
    saving = [type(callback).__name__ for callback in callbacks if isinstance(callback, SAVING)]
    remedy = "fit received no keras_callbacks.Checkpoint"
    if saving:
        return (
            f"only the global weights that {saving[0]} saved at the end of an epoch remain, "
            f"because {remedy}"
        )
    return f"the global weights are lost, because {remedy}"

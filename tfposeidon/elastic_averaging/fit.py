"""`fit` with a server: workers train at their own pace, and the server evaluates and saves.

On workers, Keras's `fit` runs between two callbacks that exchange with the server. The server holds
the global weights and takes no steps: it runs callback hooks at the end of the workers' epochs.
Some callbacks run there, and others are refused.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import keras
from typing_extensions import override

from tfposeidon.communication import runtime
from tfposeidon.elastic_averaging import job
from tfposeidon.training import session
from tfposeidon.training.global_metrics import SAVING

log = logging.getLogger("tfposeidon")


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


def run(original: Any, call: inspect.BoundArguments) -> Any:
    """Runs `fit` on a worker, or serves; collective, and returns the role's history."""
    _check_arguments(call.arguments)
    if job.is_server():
        return _serve(call.arguments)
    return _work(original, call)


def _check_arguments(arguments: dict[str, Any]) -> None:
    """Refuses arguments of `fit` that a server does not support."""
    job.check_roles()
    if arguments["validation_split"]:
        raise ValueError(
            "ElasticAveraging does not support validation_split: the server evaluates the global "
            "weights on separate data. Received: "
            f"validation_split={arguments['validation_split']}. Pass validation_data instead."
        )
    for callback in arguments["callbacks"]:
        check_callback(callback)


# ------------------------------------------------------------------ worker


def _work(original: Any, call: inspect.BoundArguments) -> Any:
    arguments = call.arguments
    worker = _Worker(arguments)
    # `end` is first in the list, so that other callbacks see the global weights at the end.
    # `worker` is last, so that it starts after the server's callbacks have restored a run.
    end = keras.callbacks.LambdaCallback(on_train_end=lambda logs: worker.end())
    callbacks = [c for c in arguments["callbacks"] if not acts_at_server(c)]
    arguments["callbacks"] = [end, *callbacks, worker]
    arguments["validation_data"] = None
    try:
        return original(*call.args, **call.kwargs)
    finally:
        # For training that has ended with an error.
        worker.fall_silent()


class _Worker(keras.callbacks.Callback):
    """Keras callback of a worker, which starts with the server's weights, at its epoch."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self._arguments = arguments
        self._link: Any = None
        self._has_trained = False

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        self._optimizers, epoch = job.begin_fit(self._arguments)
        if epoch is not None:
            session.of(self.model).resume_at(epoch, 0)
        self._link = job.start_worker(self._optimizers)

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._has_trained = False

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._has_trained = True
        self._stop_if_asked()

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        is_last = self.model.stop_training or epoch + 1 == self.params["epochs"]
        job.end_epoch(self._link, self._optimizers, self._has_trained, is_last)
        # An epoch without a batch has not checked for it.
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        if self._link.stops:
            self.model.stop_training = True

    def end(self) -> None:
        """Ends together with the other workers, with the server's last weights."""
        job.end_worker(self._link, self._optimizers)
        self._link = None
        session.of(self.model).begin_where_asked()

    def fall_silent(self) -> None:
        """Stops calling the server, unless `end` has completed."""
        if self._link is not None:
            self._link.fall_silent()


# ------------------------------------------------------------------ server


def _serve(arguments: dict[str, Any]) -> Any:
    """Serves the workers, and evaluates when they end epochs; returns the server's history."""
    model = arguments["self"]
    log.warning("tfposeidon: rank %d serves %d worker(s).", runtime.rank(), runtime.workers().size)
    callbacks = keras.callbacks.CallbackList(
        arguments["callbacks"],
        add_history=True,
        add_progbar=arguments["verbose"] != 0,
        model=model,
        # No progress bar per batch, since the server has no batches. "auto" remains here only in a
        # terminal.
        verbose=2 if arguments["verbose"] else 0,
        epochs=arguments["epochs"],
        steps=1,
    )
    model.stop_training = False
    callbacks.on_train_begin()
    # Here, after callbacks such as Checkpoint may have restored an earlier run.
    optimizers, epoch = job.begin_fit(arguments)
    own = _Serving(arguments, callbacks, optimizers)
    savers = [c.on_job_failure for c in callbacks.callbacks if hasattr(c, "on_job_failure")]
    without = fate_without_snapshot(callbacks.callbacks)
    with job.saved_at_failure(own.server, own.show, savers, without):
        # In the same way as Keras on workers.
        logs = own.end_epochs(epoch or arguments["initial_epoch"])
        own.show()
        # Before workers take the weights: callbacks may change the weights of the model.
        callbacks.on_train_end(logs)
        job.let_workers_go(own.server, optimizers)
    session.of(model).begin_where_asked()
    return model.history


class _Serving:
    """The server's part in one `fit`; it serves from construction on."""

    def __init__(self, arguments: dict[str, Any], callbacks: Any, optimizers: list[Any]) -> None:
        self._arguments, self._callbacks, self._optimizers = arguments, callbacks, optimizers
        self._model = arguments["self"]
        callbacks.callbacks = _with_announced_metrics(callbacks.callbacks, self._metrics_to_come)
        self.server = job.start_server(optimizers)

    def show(self) -> None:
        """Assigns the global weights to the model."""
        job.show_centers(self.server, self._optimizers)

    def end_epochs(self, first: int) -> dict[str, Any]:
        """Ends epochs as workers end theirs, from `first` on; returns the logs of the last one."""
        logs: dict[str, Any] = {}
        begun = first
        self._begin_epoch(begun)
        for number in self.server.epochs():
            if not self._model.stop_training:
                epoch = first + number
                self._skip_to(begun, epoch)
                logs = self._end_epoch(epoch, range(begun, epoch + 1))
                begun = epoch + 1
            if self._model.stop_training:
                self.server.stop_workers()
            else:
                self._begin_epoch(begun)
        return logs

    def _begin_epoch(self, epoch: int) -> None:
        if epoch < self._arguments["epochs"]:
            self._callbacks.on_epoch_begin(epoch)

    def _skip_to(self, begun: int, epoch: int) -> None:
        """Skips epochs that ended during an evaluation: each would have the same global weights."""
        if epoch > begun:
            log.warning(
                "tfposeidon: epoch(s) %d to %d ended during an evaluation; the server continues "
                "with epoch %d.",
                begun + 1,
                epoch,
                epoch + 1,
            )
            self._begin_epoch(epoch)

    def _end_epoch(self, epoch: int, ended: range) -> dict[str, Any]:
        self.show()
        logs: dict[str, Any] = {"exchanges": float(self.server.exchanges)}
        if self._is_validated(ended):
            logs |= self._metrics_of_center()
        self._callbacks.on_epoch_end(epoch, logs)
        return logs

    def _is_validated(self, epochs: range) -> bool:
        if self._arguments["validation_data"] is None:
            return False
        every = self._arguments["validation_freq"]
        return any(
            (e + 1) % every == 0 if isinstance(every, int) else e + 1 in every for e in epochs
        )

    def _metrics_of_center(self) -> dict[str, Any]:
        arguments = self._arguments
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(arguments["validation_data"])
        found = self._model.evaluate(
            x,
            y,
            sample_weight=sample_weight,
            batch_size=arguments["validation_batch_size"] or arguments["batch_size"],
            steps=arguments["validation_steps"],
            callbacks=self._callbacks,
            verbose=0,
            return_dict=True,
        )
        return {f"val_{name}": value for name, value in found.items()}

    def _metrics_to_come(self) -> list[str]:
        if self._arguments["validation_data"] is None:
            return []
        try:
            names = self._model.get_metrics_result()
        except ValueError:
            # The names of unbuilt metrics are unknown until they have seen data.
            return list(self._metrics_of_center())
        return [f"val_{name}" for name in names]


# ------------------------------------------------------------------ callbacks


def acts_at_server(callback: Any) -> bool:
    """Returns whether a callback runs on the server only; others set `acts_at_server = True`."""
    return isinstance(callback, _AT_THE_SERVER) or getattr(callback, "acts_at_server", False)


def check_callback(callback: Any) -> None:
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


def _with_announced_metrics(callbacks: list[Any], names: Callable[[], list[str]]) -> list[Any]:
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

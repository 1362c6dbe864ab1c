"""Runs `fit` with a server: workers train at their own pace, and the server evaluates and saves.

On workers, Keras's `fit` runs between two callbacks that exchange weights with the server. The
server holds the global weights and takes no training steps. When workers end epochs, the server
calls the hooks of callbacks that save, stop or log. `check_callback` refuses callbacks that need
training steps on the server.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import keras
from typing_extensions import override

from tfposeidon.communication import runtime
from tfposeidon.elastic_averaging import job
from tfposeidon.elastic_averaging.calls import Request
from tfposeidon.training import session
from tfposeidon.training.global_metrics import SAVING

log = logging.getLogger("tfposeidon")

# These Keras callbacks run on the server only, because they use the global weights or metrics.
_AT_SERVER = (
    *SAVING,
    keras.callbacks.CSVLogger,
    keras.callbacks.EarlyStopping,
    keras.callbacks.TensorBoard,
)
# Callback arguments that may be numbers of steps, and the values that the server supports.
_PER_EPOCH = {"every_n_steps": "None", "save_freq": '"epoch"', "update_freq": '"epoch"'}


def run(original: Any, call: inspect.BoundArguments) -> Any:
    arguments = call.arguments
    job.check_roles()
    if arguments["validation_split"]:
        raise ValueError(
            "ElasticAveraging does not support validation_split, because the server evaluates the "
            "global weights on separate data. Received: "
            f"validation_split={arguments['validation_split']}. Pass validation_data instead."
        )
    for callback in arguments["callbacks"]:
        check_callback(callback)
    return _Serving(arguments).run() if job.is_server() else _run_worker(original, call)


# ------------------------------------------------------------------ worker


def _run_worker(original: Any, call: inspect.BoundArguments) -> Any:
    arguments = call.arguments
    worker = _Worker(arguments)
    # `end` is first in the list, so that other callbacks see the global weights when training ends.
    # `worker` is last, so that it starts after the server's callbacks have restored a run.
    end = keras.callbacks.LambdaCallback(on_train_end=lambda logs: worker.end())
    callbacks = [c for c in arguments["callbacks"] if not acts_at_server(c)]
    arguments |= {"callbacks": [end, *callbacks, worker], "validation_data": None}
    try:
        return original(*call.args, **call.kwargs)
    finally:
        # `stop_calling` has an effect only if training ended with an error.
        if worker.link is not None:
            worker.link.stop_calling()


class _Worker(keras.callbacks.Callback):
    """Callback that starts a worker with the server's weights and epoch, and reports epoch ends."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self._arguments = arguments
        self.link: Any = None

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        self._optimizers, epoch = job.begin_fit(self._arguments)
        if epoch is not None:
            session.of(self.model).resume_at(epoch, 0)
        self.link = job.start_worker(self._optimizers)

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
        # Send everything before `end_epoch`, because the server then evaluates and saves.
        for optimizer in self._optimizers:
            if is_last:
                optimizer.exchange_last()
            optimizer.send_state()
        self.link.end_epoch(self._has_trained)
        # An epoch without a batch has not checked for the server's request yet.
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        self.model.stop_training |= self.link.request >= Request.STOP

    def end(self) -> None:
        job.end_worker(self.link, self._optimizers)
        session.of(self.model).reset_initial_epoch()


# ------------------------------------------------------------------ server


class _Serving:
    """Server's side of one `fit`: it evaluates the global weights, and calls the callbacks."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments, self._model = arguments, arguments["self"]
        self._callbacks = keras.callbacks.CallbackList(
            arguments["callbacks"],
            add_history=True,
            add_progbar=arguments["verbose"] != 0,
            model=self._model,
            # Print one line per epoch, because the server has no batches for a progress bar.
            verbose=2 if arguments["verbose"] else 0,
            epochs=arguments["epochs"],
            steps=1,
        )

    def run(self) -> Any:
        """Serves until all workers have ended; returns the history."""
        workers = runtime.workers().size
        log.warning("tfposeidon: rank %d serves %d worker(s).", runtime.rank(), workers)
        self._model.stop_training = False
        self._callbacks.on_train_begin()
        # Begin only now, because callbacks such as Checkpoint may have restored an earlier run.
        self._optimizers, epoch = job.begin_fit(self._arguments)
        callbacks = self._callbacks.callbacks
        savers = [c.on_job_failure for c in callbacks if hasattr(c, "on_job_failure")]
        without = (
            "global weights that no callback saved at the end of an epoch are lost, because fit "
            "received no keras_callbacks.Checkpoint"
        )
        with job.serving(self._optimizers, savers, without) as self._server:
            # Begin with the same epoch as Keras on workers.
            logs = self._end_epochs(epoch or self._arguments["initial_epoch"])
            job.show_centers(self._server, self._optimizers)
            # Call this before workers are released, because callbacks may change the weights.
            self._callbacks.on_train_end(logs)
        session.of(self._model).reset_initial_epoch()
        return self._model.history

    def _end_epochs(self, next_epoch: int) -> dict[str, Any]:
        """Ends each epoch after the workers have ended it; returns the logs of the last epoch."""
        logs: dict[str, Any] = {}
        first = next_epoch
        self._begin_epoch(first)
        for number in self._server.epochs():
            if not self._model.stop_training:
                epoch = first + number
                if epoch > next_epoch:
                    # The skipped epochs would evaluate the same global weights.
                    log.warning(
                        "tfposeidon: epoch(s) %d to %d ended during an evaluation; the server "
                        "continues with epoch %d.",
                        next_epoch + 1,
                        epoch,
                        epoch + 1,
                    )
                    self._begin_epoch(epoch)
                ended = range(next_epoch, epoch + 1)
                logs = self._end_epoch(epoch, self._validates(ended, is_first=next_epoch == first))
                next_epoch = epoch + 1
            if self._model.stop_training:
                self._server.request = Request.STOP
            else:
                self._begin_epoch(next_epoch)
        return logs

    def _begin_epoch(self, epoch: int) -> None:
        if epoch < self._arguments["epochs"]:
            self._callbacks.on_epoch_begin(epoch)

    def _validates(self, ended: range, is_first: bool) -> bool:
        every = self._arguments["validation_freq"]
        # As in Keras, any `validation_freq` is valid without validation data.
        if self._arguments["validation_data"] is None:
            return False
        # Validate in the first epoch, because its logs determine the columns of `CSVLogger`.
        return is_first or any(
            (e + 1) % every == 0 if isinstance(every, int) else e + 1 in every for e in ended
        )

    def _end_epoch(self, epoch: int, validates: bool) -> dict[str, Any]:
        job.show_centers(self._server, self._optimizers)
        exchanges = sum(worker.exchanges for worker in self._server.progress.values())
        logs: dict[str, Any] = {"exchanges": float(exchanges)}
        if validates:
            logs |= self._evaluate()
        self._callbacks.on_epoch_end(epoch, logs)
        return logs

    def _evaluate(self) -> dict[str, Any]:
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


# ------------------------------------------------------------------ callbacks


def acts_at_server(callback: Any) -> bool:
    """Returns whether a callback runs on the server only, by its class or by `acts_at_server`."""
    return isinstance(callback, _AT_SERVER) or getattr(callback, "acts_at_server", False)


def check_callback(callback: Any) -> None:
    """Refuses callbacks that need steps or learning rates on the server, or stop one worker."""
    name = type(callback).__name__
    if isinstance(callback, keras.callbacks.ReduceLROnPlateau):
        raise ValueError(
            "ElasticAveraging does not support ReduceLROnPlateau, because workers hold the rates, "
            "and the server holds the metrics of the global weights. Received: ReduceLROnPlateau. "
            "Use a schedule of keras.optimizers.schedules, or keras_callbacks.LearningRateSchedule."
        )
    if isinstance(callback, keras.callbacks.TerminateOnNaN) and not callback.raise_error:
        raise ValueError(
            "ElasticAveraging does not support TerminateOnNaN without raise_error, because a "
            "worker with non-finite weights continues from the global weights, and if a worker "
            "stops, the others continue. Received: TerminateOnNaN. Leave it out, or use "
            "TerminateOnNaN(raise_error=True), which ends the job."
        )
    for argument, instead in _PER_EPOCH.items():
        value = getattr(callback, argument, None)
        if acts_at_server(callback) and (isinstance(value, int) or value == "batch"):
            raise ValueError(
                f"With ElasticAveraging, {name} must act at the end of epochs, because it runs on "
                f"the server, which takes no steps. Received: {name}({argument}={value!r}). Use "
                f"{argument}={instead}."
            )

"""`fit` where a server keeps the centre: workers train at their own pace, the server evaluates."""

from __future__ import annotations

import contextlib
import inspect
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import keras
from typing_extensions import override

from tfposeidon.asynchronous import job
from tfposeidon.asynchronous.server import Server
from tfposeidon.communication import agreement, runtime
from tfposeidon.training import session

log = logging.getLogger("tfposeidon")

_AT_THE_SERVER = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.EarlyStopping,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.TensorBoard,
)
"""Callbacks of Keras that act on the server alone: they save, stop, or write about the centre."""


def check(arguments: dict[str, Any]) -> None:
    """Refuses what `fit` cannot do with a server.

    Args:
      arguments: Arguments of `fit`, by name, with a list of callbacks.

    Raises:
      ValueError: In a job of one rank or without a server, with `validation_split`, or with a
        callback that sets rates by the centre's metrics.
    """
    job.check_roles()
    if arguments["validation_split"]:
        raise ValueError(
            "With ElasticAveraging the server evaluates the centre, on data of its own. Received: "
            f"validation_split={arguments['validation_split']}. Give validation_data."
        )
    for callback in arguments["callbacks"]:
        if isinstance(callback, keras.callbacks.ReduceLROnPlateau):
            raise ValueError(
                "With ElasticAveraging rates are the workers', and metrics of the centre the "
                "server's. Received: ReduceLROnPlateau. Use a schedule, or "
                "keras_callbacks.LearningRateSchedule."
            )


def fit(original: Any, call: inspect.BoundArguments) -> Any:
    """Runs `fit` on a worker, or serves; all ranks call it together.

    Args:
      original: Keras's `fit`.
      call: Its arguments, with a list of callbacks.

    Returns:
      The history: a worker's of training, the server's of the centre.
    """
    if job.is_server():
        return _serve(call.arguments)
    return _work(original, call)


# ------------------------------------------------------------------ workers


def _work(original: Any, call: inspect.BoundArguments) -> Any:
    arguments = call.arguments
    own = _Worker(arguments["epochs"])
    # First at the end, as the others are to see the centre; last at the begin, after what the
    # server's have restored there.
    callbacks = [c for c in arguments["callbacks"] if not _acts_at_server(c)]
    arguments["callbacks"] = [_Last(own), *callbacks, _First(own)]
    arguments["validation_data"] = None
    try:
        return original(*call.args, **call.kwargs)
    finally:
        # Where training has ended with an error.
        own.fall_silent()


class _Worker:
    """A worker's part in one `fit`.

    Args:
      epochs: Epochs that `fit` is to end with.
    """

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs
        self._link: Any = None

    def begin(self, model: keras.Model) -> None:
        """Begins with the server's weights, at its epoch."""
        self._optimizers = _optimizers(model)
        epoch = _agreed_epoch(job.begin(self._optimizers, {"epochs": self._epochs}))
        if epoch is not None:
            session.of(model).resume_at(epoch, 0)
        self._link = job.start_worker(self._optimizers)

    @property
    def stops(self) -> bool:
        """True once the server has asked workers to stop."""
        return bool(self._link.stops)

    def end_epoch(self) -> None:
        """Tells the server that an epoch has ended."""
        job.end_epoch(self._link, self._optimizers)

    def end(self) -> None:
        """Ends together with the other workers, with the server's last weights."""
        job.end_worker(self._link, self._optimizers)
        self._link = None

    def fall_silent(self) -> None:
        """Calls the server no more, unless it was left in good order."""
        if self._link is not None:
            self._link.fall_silent()


class _First(keras.callbacks.Callback):
    def __init__(self, worker: _Worker) -> None:
        super().__init__()
        self._worker = worker

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        self._worker.begin(self.model)

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._worker.stops:
            self.model.stop_training = True

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._worker.end_epoch()


class _Last(keras.callbacks.Callback):
    def __init__(self, worker: _Worker) -> None:
        super().__init__()
        self._worker = worker

    @override
    def on_train_end(self, logs: Any = None) -> None:
        self._worker.end()
        session.of(self.model).begin_where_asked()


def _acts_at_server(callback: Any) -> bool:
    return isinstance(callback, _AT_THE_SERVER) or getattr(callback, "acts_at_server", False)


# ------------------------------------------------------------------ the server


def _serve(arguments: dict[str, Any]) -> Any:
    model, epochs = arguments["self"], arguments["epochs"]
    log.warning("tfposeidon: rank %d serves %d worker(s).", runtime.rank(), runtime.workers().size)
    callbacks = keras.callbacks.CallbackList(
        arguments["callbacks"],
        add_history=True,
        add_progbar=arguments["verbose"] != 0,
        model=model,
        # Never batches, of which the server has none; "auto" is left where there is a terminal.
        verbose=2 if arguments["verbose"] else 0,
        epochs=epochs,
        steps=1,
    )
    model.stop_training = False
    callbacks.on_train_begin()
    optimizers = _optimizers(model)
    # Callbacks such as Checkpoint may have restored an earlier run.
    resumed = session.of(model).resumed_epoch
    epoch = _agreed_epoch(job.begin(optimizers, {"epochs": epochs, "epoch": resumed}))
    epoch = arguments["initial_epoch"] if epoch is None else epoch
    server = job.start_server(optimizers)
    with _saving_at_failure(callbacks, lambda: job.show_centres(server, optimizers)):
        logs: dict[str, Any] = {}
        callbacks.on_epoch_begin(epoch)
        for number in server.epochs():
            if model.stop_training:
                continue
            job.show_centres(server, optimizers)
            logs = _logs(model, arguments, callbacks, server, epoch + number)
            callbacks.on_epoch_end(epoch + number, logs)
            if model.stop_training:
                server.stop_workers()
            elif epoch + number + 1 < epochs:
                callbacks.on_epoch_begin(epoch + number + 1)
        job.show_centres(server, optimizers)
        # Before workers take the centre: callbacks may give the model other weights.
        callbacks.on_train_end(logs)
        job.let_workers_go(server, optimizers)
    session.of(model).begin_where_asked()
    return model.history


def _logs(
    model: Any, arguments: dict[str, Any], callbacks: Any, server: Server, epoch: int
) -> dict[str, Any]:
    """Returns metrics of the centre, and how often workers have exchanged so far."""
    logs: dict[str, Any] = {"exchanges": float(server.exchanges)}
    data, every = arguments["validation_data"], arguments["validation_freq"]
    is_due = (epoch + 1) % every == 0 if isinstance(every, int) else epoch + 1 in every
    if data is not None and is_due:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        found = model.evaluate(
            x,
            y,
            sample_weight=sample_weight,
            batch_size=arguments["validation_batch_size"] or arguments["batch_size"],
            steps=arguments["validation_steps"],
            callbacks=callbacks,
            verbose=0,
            return_dict=True,
        )
        logs |= {f"val_{name}": value for name, value in found.items()}
    return logs


@contextlib.contextmanager
def _saving_at_failure(callbacks: Any, show: Any) -> Iterator[None]:
    """Lets callbacks save the centre before an error, or a launcher, ends the server.

    Launchers end all ranks by SIGTERM where one has failed, and by SIGKILL seconds later.
    """

    def end(*_: Any) -> None:
        # What is being done is interrupted here, in the main thread.
        sys.exit(128 + signal.SIGTERM)

    previous = signal.signal(signal.SIGTERM, end) if _is_main_thread() else None
    try:
        yield
    except BaseException:
        if previous is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        show()
        saving = [c for c in callbacks.callbacks if hasattr(c, "on_job_failure")]
        for callback in saving:
            callback.on_job_failure()
        log.warning(
            "tfposeidon: the job ends; %s.",
            "the server has saved the centre"
            if saving
            else "the centre is lost, as fit was given no keras_callbacks.Checkpoint",
        )
        raise
    finally:
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)


def _is_main_thread() -> bool:
    # Python sets handlers of signals there only.
    return threading.current_thread() is threading.main_thread()


# ------------------------------------------------------------------ both


def _optimizers(model: Any) -> list[Any]:
    """Returns the model's optimizers, all of which exchange with the server.

    Raises:
      ValueError: If one does not, or is not built.
    """
    found = session.of(model).optimizers
    if not all(optimizer.is_asynchronous for optimizer in found):
        raise ValueError(
            "All optimizers of a model exchange with the server, or none. Received: "
            f"{[type(optimizer).__name__ for optimizer in found]}. Use ElasticAveraging for each."
        )
    if model.built and len(found) == 1 and not found[0].built:
        found[0].build(model.trainable_variables)
    if not all(optimizer.built for optimizer in found):
        raise ValueError(
            "The server takes no step, and has to know the variables before. Received: a model or "
            "an optimizer that is not built. Call model.build(input_shape) and, where a model has "
            "several, optimizer.build(variables) for each before fit."
        )
    session.of(model).carry_statistics()
    return found


def _agreed_epoch(everybody: list[dict[str, Any]]) -> int | None:
    agreement.require_equal(
        [given["epochs"] for given in everybody],
        "All ranks must train for the same epochs",
        "Give fit the same `epochs` on the server and on all workers.",
    )
    server = runtime.server_rank()
    assert server is not None
    epoch = everybody[server]["epoch"]
    return None if epoch is None else int(epoch)

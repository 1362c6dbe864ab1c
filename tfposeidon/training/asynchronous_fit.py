"""`fit` where a server keeps the centre: workers train at their own pace, the server evaluates."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable
from typing import Any

import keras
from typing_extensions import override

from tfposeidon.asynchronous import job
from tfposeidon.asynchronous.last_centre import saved_at_failure
from tfposeidon.asynchronous.server import Server
from tfposeidon.communication import agreement, runtime
from tfposeidon.training import asynchronous_callbacks, session

log = logging.getLogger("tfposeidon")


def check(arguments: dict[str, Any]) -> None:
    """Refuses what `fit` cannot do with a server.

    Args:
      arguments: Arguments of `fit`, by name, with a list of callbacks.

    Raises:
      ValueError: In a job of one rank or without a server, with `validation_split`, or with a
        callback that could not do what it is for.
    """
    job.check_roles()
    if arguments["validation_split"]:
        raise ValueError(
            "With ElasticAveraging the server evaluates the centre, on data of its own. Received: "
            f"validation_split={arguments['validation_split']}. Give validation_data."
        )
    for callback in arguments["callbacks"]:
        asynchronous_callbacks.check(callback)


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
    own = _Worker(_settings(arguments))
    # First at the end, as the others are to see the centre; last at the begin, after what the
    # server's have restored there.
    callbacks = [c for c in arguments["callbacks"] if not asynchronous_callbacks.acts_at_server(c)]
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
      settings: Arguments of `fit` that all ranks are told.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._link: Any = None

    def begin(self, model: keras.Model) -> None:
        """Begins with the server's weights, at its epoch."""
        self._optimizers = _optimizers(model)
        epoch = _agreed_epoch(job.begin(self._optimizers, self._settings))
        if epoch is not None:
            session.of(model).resume_at(epoch, 0)
        self._link = job.start_worker(self._optimizers)

    @property
    def stops(self) -> bool:
        """True once the server has asked workers to stop."""
        return bool(self._link.stops)

    def end_epoch(self, has_trained: bool) -> None:
        """Tells the server that an epoch has ended.

        Args:
          has_trained: False for an epoch without a batch.
        """
        self._link.end_epoch(has_trained)

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
        self._has_trained = False

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        self._worker.begin(self.model)

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._has_trained = False

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._has_trained = True
        if self._worker.stops:
            self.model.stop_training = True

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._worker.end_epoch(self._has_trained)


class _Last(keras.callbacks.Callback):
    def __init__(self, worker: _Worker) -> None:
        super().__init__()
        self._worker = worker

    @override
    def on_train_end(self, logs: Any = None) -> None:
        self._worker.end()
        session.of(self.model).begin_where_asked()


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
    settings = {**_settings(arguments), "epoch": session.of(model).resumed_epoch}
    # As Keras takes it on workers.
    first = _agreed_epoch(job.begin(optimizers, settings)) or arguments["initial_epoch"]
    server = job.start_server(optimizers)

    def show() -> None:
        job.show_centres(server, optimizers)

    savers = [c.on_job_failure for c in callbacks.callbacks if hasattr(c, "on_job_failure")]
    without = asynchronous_callbacks.fate_without_snapshot(callbacks.callbacks)
    with saved_at_failure(show, savers, without):
        if first < arguments["epochs"]:
            callbacks.on_epoch_begin(first)
        logs = _evaluate_epochs(model, arguments, callbacks, server, first, show)
        show()
        # Before workers take the centre: callbacks may give the model other weights.
        callbacks.on_train_end(logs)
        job.let_workers_go(server, optimizers)
    session.of(model).begin_where_asked()
    return model.history


def _evaluate_epochs(
    model: Any, arguments: dict[str, Any], callbacks: Any, server: Server, first: int, show: Any
) -> dict[str, Any]:
    """Ends the server's epochs as workers end theirs; returns the last logs."""
    logs: dict[str, Any] = {}
    begun, epochs = first, arguments["epochs"]
    for number in server.epochs():
        if model.stop_training:
            server.stop_workers()
            continue
        epoch = first + number
        if epoch > begun:
            # While the server evaluated. Each of them would show the same centre.
            log.warning(
                "tfposeidon: epoch(s) %d to %d ended meanwhile; the server goes on with epoch %d.",
                begun + 1,
                epoch,
                epoch + 1,
            )
            callbacks.on_epoch_begin(epoch)
        show()
        logs = _logs(model, arguments, callbacks, server, range(begun, epoch + 1))
        callbacks.on_epoch_end(epoch, logs)
        begun = epoch + 1
        if model.stop_training:
            server.stop_workers()
        elif begun < epochs:
            callbacks.on_epoch_begin(begun)
    return logs


def _logs(
    model: Any, arguments: dict[str, Any], callbacks: Any, server: Server, epochs: Iterable[int]
) -> dict[str, Any]:
    """Returns metrics of the centre, and how often workers have exchanged so far."""
    logs: dict[str, Any] = {"exchanges": float(server.exchanges)}
    data, every = arguments["validation_data"], arguments["validation_freq"]
    is_due = any((e + 1) % every == 0 if isinstance(every, int) else e + 1 in every for e in epochs)
    if data is None or not is_due:
        known = [] if data is None else [f"val_{name}" for name in model.get_metrics_result()]
        asynchronous_callbacks.announce_metrics(callbacks.callbacks, [*logs, *known])
    else:
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


def _settings(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns arguments of `fit` that have to be the same on all ranks."""
    return {name: arguments[name] for name in ("epochs", "initial_epoch")}


def _agreed_epoch(everybody: list[dict[str, Any]]) -> int | None:
    server = runtime.server_rank()
    assert server is not None
    epoch = everybody[server].pop("epoch")
    agreement.require_equal(
        everybody,
        "All ranks must train for the same epochs",
        "Give fit the same `epochs` and `initial_epoch` on the server and on all workers.",
        agreement.at_first_entry(),
    )
    return None if epoch is None else int(epoch)

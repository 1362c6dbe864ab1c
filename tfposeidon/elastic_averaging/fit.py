"""`fit` with a server: workers train at their own pace, and the server evaluates.

On workers, Keras's `fit` runs between two callbacks that exchange with the server. On the server,
`serving` replaces it.
"""

from __future__ import annotations

import inspect
from typing import Any

import keras
from typing_extensions import override

from tfposeidon.elastic_averaging import callbacks as own_callbacks
from tfposeidon.elastic_averaging import job, serving
from tfposeidon.training import session


def _check(arguments: dict[str, Any]) -> None:
    """Refuses arguments of `fit` that a server does not support."""
    job.check_roles()
    if arguments["validation_split"]:
        raise ValueError(
            "ElasticAveraging does not support validation_split: the server evaluates the global "
            "weights on separate data. Received: "
            f"validation_split={arguments['validation_split']}. Pass validation_data instead."
        )
    for callback in arguments["callbacks"]:
        own_callbacks.check(callback)


def run(original: Any, call: inspect.BoundArguments) -> Any:
    """Runs `fit` on a worker, or serves; collective, and returns the role's history."""
    _check(call.arguments)
    if job.is_server():
        return serving.serve(call.arguments)
    return _work(original, call)


def _work(original: Any, call: inspect.BoundArguments) -> Any:
    arguments = call.arguments
    worker = _Worker(arguments)
    # `end` is first in the list, so that other callbacks see the global weights at the end.
    # `worker` is last, so that it starts after the server's callbacks have restored a run.
    end = keras.callbacks.LambdaCallback(on_train_end=lambda logs: worker.end())
    callbacks = [c for c in arguments["callbacks"] if not own_callbacks.acts_at_server(c)]
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

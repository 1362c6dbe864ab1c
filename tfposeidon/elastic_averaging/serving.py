"""`fit` of a server: it evaluates the global weights, and its callbacks save and stop.

The server runs Keras's callback hooks at the end of the workers' epochs, without steps of its own.
"""

from __future__ import annotations

import logging
from typing import Any

import keras

from tfposeidon.communication import runtime
from tfposeidon.elastic_averaging import callbacks as own_callbacks
from tfposeidon.elastic_averaging import job
from tfposeidon.elastic_averaging.last_centre import saved_at_failure
from tfposeidon.training import session

log = logging.getLogger("tfposeidon")


def serve(arguments: dict[str, Any]) -> Any:
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
    without = own_callbacks.fate_without_snapshot(callbacks.callbacks)
    with saved_at_failure(own.server, own.show, savers, without):
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
        callbacks.callbacks = own_callbacks.with_announced_metrics(
            callbacks.callbacks, self._metrics_to_come
        )
        self.server = job.start_server(optimizers)

    def show(self) -> None:
        """Assigns the global weights to the model."""
        job.show_centres(self.server, self._optimizers)

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
            logs |= self._metrics_of_centre()
        self._callbacks.on_epoch_end(epoch, logs)
        return logs

    def _is_validated(self, epochs: range) -> bool:
        if self._arguments["validation_data"] is None:
            return False
        every = self._arguments["validation_freq"]
        return any(
            (e + 1) % every == 0 if isinstance(every, int) else e + 1 in every for e in epochs
        )

    def _metrics_of_centre(self) -> dict[str, Any]:
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
            return list(self._metrics_of_centre())
        return [f"val_{name}" for name in names]

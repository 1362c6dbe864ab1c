"""Samples per second, bytes sent and communication that computation does not hide."""

from __future__ import annotations

import time
from typing import Any

import keras

from keras_callbacks._model_state import optimizers, samples_seen
from keras_callbacks._tensorboard import ScalarWriter
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.training.session import optimizers_of


class Throughput(keras.callbacks.Callback):
    """Adds speed to each epoch's logs, the same on every rank, and to TensorBoard.

    - `samples_per_second`: of all ranks together, by the slowest rank's clock.
    - `exposed_communication`: share of the time in which the step waited for the exchange after its
      last gradient (mean over ranks); only with `DistributedOptimizer`.
    - `megabytes_sent`: payload that this job's rank 0 sends per step, as the plan predicts.

    The first step of an epoch is left out: the very first one traces and compiles.

    Args:
      log_dir: Where rank 0 writes TensorBoard scalars, if given.
    """

    def __init__(self, log_dir: str | None = None) -> None:
        super().__init__()
        self.log_dir = log_dir
        self._scalars = ScalarWriter(log_dir)
        self._started: tuple[float, float, float] | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._scalars.open()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._started = None
        self._finished: list[float] = [0.0, 0.0, 0.0]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._started is None:
            self._started = self._now()

    def on_test_begin(self, logs: Any = None) -> None:
        self._finish()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._finish()
        everybody = exchange_objects(self._finished, runtime.wire(), "tp.throughput")
        slowest = max(seconds for seconds, _, _ in everybody)
        if logs is None or slowest <= 0:
            return
        speed = {
            "samples_per_second": sum(samples for _, samples, _ in everybody) / slowest,
            "exposed_communication": sum(exposed / (s or 1.0) for s, _, exposed in everybody)
            / len(everybody),
            "megabytes_sent": self._bytes_sent() / 1e6,
        }
        logs.update(speed)
        self._scalars.write({f"throughput/{name}": value for name, value in speed.items()}, epoch)

    def on_train_end(self, logs: Any = None) -> None:
        self._scalars.close()

    def _finish(self) -> None:
        # Keras sets its loss tracker back for validation, so this comes first and only once.
        if self._started is not None:
            self._finished = [
                now - then for now, then in zip(self._now(), self._started, strict=True)
            ]
            self._started = None

    def _now(self) -> tuple[float, float, float]:
        samples = samples_seen(self.model) or 0.0
        exposed = sum(getattr(optimizer, "exposed_s", 0.0) for optimizer in optimizers(self.model))
        return time.perf_counter(), samples, exposed

    def _bytes_sent(self) -> float:
        mine = sum(
            optimizer.plan.cost.bytes for optimizer in optimizers_of(self.model) if optimizer.built
        )
        return exchange_objects(mine, runtime.wire(), "tp.bytes")[0]

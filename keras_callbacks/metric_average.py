"""Averages metrics over ranks, so that all ranks decide alike."""

from __future__ import annotations

from typing import Any

import keras

from tfposeidon import runtime
from tfposeidon.wire import exchange_objects


class MetricAverage(keras.callbacks.Callback):
    """Replaces each metric, at the end of epochs and evaluations, by its average over ranks.

    Ranks weigh by the samples they saw, as Keras's loss tracker counts them. Put it before callbacks
    that decide by metrics, such as EarlyStopping and ReduceLROnPlateau: they then do the same on
    every rank. `evaluate` reports averages, too, if it gets this callback.
    """

    def __init__(self) -> None:
        super().__init__()
        self._trained: float | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._trained = None

    def on_test_begin(self, logs: Any = None) -> None:
        # Keras sets the tracker back right after this.
        self._trained = self._samples_seen()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        _average(logs, self._samples_seen())

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # Validation metrics were averaged in on_test_end; averaging equal values changes nothing.
        _average(logs, self._samples_seen() if self._trained is None else self._trained)

    def _samples_seen(self) -> float:
        tracker = next((m for m in self.model.metrics if m.name == "loss"), None)
        return float(tracker.count.numpy()) if tracker is not None else 1.0


def _average(logs: dict[str, Any] | None, weight: float) -> None:
    if not logs or runtime.size() == 1:
        return
    mine = {name: float(value) for name, value in logs.items()}
    everybody = exchange_objects([weight, mine], runtime.wire(), "tp.metrics")
    total = sum(w for w, _ in everybody)
    for name in mine:
        values = [(w if total else 1.0, metrics[name]) for w, metrics in everybody if name in metrics]
        weights = sum(w for w, _ in values)
        if all(value == values[0][1] for _, value in values):
            logs[name] = values[0][1]
        elif weights:
            logs[name] = sum(w * value for w, value in values) / weights

"""Averages metrics over ranks, so that all ranks decide alike."""

from __future__ import annotations

from typing import Any

import keras

from keras_callbacks._model_state import samples_seen
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects


class MetricAverage(keras.callbacks.Callback):
    """Replaces each metric in the logs of an epoch by its average over ranks.

    Ranks weigh by the samples they saw, in training and in validation, as Keras's loss tracker counts
    them. Put it before callbacks that decide by metrics, such as EarlyStopping and ReduceLROnPlateau:
    they then do the same on every rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self._trained: float | None = None
        self._validated = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._trained = None

    def on_test_begin(self, logs: Any = None) -> None:
        # Keras sets the tracker back right after this.
        self._trained = self._samples_seen()

    def on_test_end(self, logs: Any = None) -> None:
        self._validated = self._samples_seen()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        trained = self._samples_seen() if self._trained is None else self._trained
        if logs and runtime.size() > 1:
            logs.update(_averages(logs, trained, self._validated))

    def _samples_seen(self) -> float:
        # Without a loss tracker nobody counts, and ranks weigh the same.
        seen = samples_seen(self.model)
        return 1.0 if seen is None else seen


def _averages(logs: dict[str, Any], trained: float, validated: float) -> dict[str, float]:
    mine = {
        name: [validated if name.startswith("val_") else trained, float(value)]
        for name, value in logs.items()
    }
    everybody = exchange_objects(mine, runtime.wire(), "tp.metrics")
    pairs = {name: [metrics[name] for metrics in everybody if name in metrics] for name in mine}
    return {name: _weighted_mean(values) for name, values in pairs.items()}


def _weighted_mean(pairs: list[list[float]]) -> float:
    total = sum(weight for weight, _ in pairs)
    if not total:
        return sum(value for _, value in pairs) / len(pairs)
    return sum(weight * value for weight, value in pairs) / total

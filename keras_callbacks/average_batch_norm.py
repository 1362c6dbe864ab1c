"""Averages the moving statistics of batch normalisation over ranks."""

from __future__ import annotations

from typing import Any

import keras

from tfposeidon.communication import runtime
from tfposeidon.exchange import replicas


class AverageBatchNorm(keras.callbacks.Callback):
    """Averages moving means and variances over ranks before each evaluation and at each epoch's end.

    During training every rank keeps statistics of its own batches; without this, ranks evaluate and
    save different models. Put it before `MetricAverage` and `Checkpoint`.
    """

    def on_test_begin(self, logs: Any = None) -> None:
        self._average()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._average()

    def _average(self) -> None:
        layers = [
            m
            for m in self.model._flatten_layers()
            if isinstance(m, keras.layers.BatchNormalization)
        ]
        statistics = [v for layer in layers for v in (layer.moving_mean, layer.moving_variance)]
        replicas.average(statistics, runtime.wire())

"""Averages the moving statistics of batch normalization over ranks."""

from __future__ import annotations

from typing import Any

import keras
from typing_extensions import override

from tfposeidon.exchange import replicas
from tfposeidon.training import session
from tfposeidon.training.statistics import moving_statistics


class AverageBatchNorm(keras.callbacks.Callback):
    """Averages the moving statistics of batch normalization over ranks.

    It does so before each evaluation and at the end of each epoch. In training every rank's
    `BatchNormalization` layers see that rank's batches only, and their moving statistics differ
    from rank to rank. Without this callback ranks would evaluate and save different models. All
    ranks take part, and all of them hold the same means (in float32) afterwards.

    Put it before `MetricAverage` and `Checkpoint`.

    Cost: one all-reduce of all moving statistics of the model, 4 bytes for each element.

    >>> import keras_callbacks
    >>> callbacks = [keras_callbacks.AverageBatchNorm(), keras_callbacks.MetricAverage()]
    """

    @override
    def on_test_begin(self, logs: Any = None) -> None:
        self._average()

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._average()

    def _average(self) -> None:
        replicas.average(moving_statistics(self.model), session.of(self.model).wire)

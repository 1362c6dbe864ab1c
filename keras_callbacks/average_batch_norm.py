"""Averages moving statistics of layers over ranks, and sums partial state."""

from __future__ import annotations

from typing import Any

import keras
from typing_extensions import override

from tfposeidon.exchange import replicas
from tfposeidon.state.placement import Placement
from tfposeidon.training import session
from tfposeidon.training.entries import variables_of


class AverageBatchNorm(keras.callbacks.Callback):
    """Averages the moving statistics of layers over ranks.

    The callback runs before each evaluation and at the end of each epoch. In training, every rank's
    `BatchNormalization` layers see only that rank's batches, so moving statistics differ between
    ranks. The same applies to floating-point variables of other layers that receive no gradient,
    such as codebooks (`tp.state.register` changes this). Without this callback, ranks would
    evaluate and save different models. All ranks take part, and all of them hold the same means (in
    float32) afterwards. For state registered as partial, rank 0 receives the sum over ranks, and
    all others zeros.

    Put it before `MetricAverage` and `Checkpoint`.

    Cost: one all-reduce of these variables, 4 bytes per element.

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
        wire = session.of(self.model).wire
        replicas.average(variables_of(self.model, Placement.AVERAGED), wire)
        replicas.collect(variables_of(self.model, Placement.PARTIAL), wire)

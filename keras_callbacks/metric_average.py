"""Averages metrics over ranks, so that all ranks decide alike."""

from __future__ import annotations

from typing import Any

import keras
from typing_extensions import override

from keras_callbacks._model_state import samples_seen
from tfposeidon.communication.wire import Wire, exchange_objects
from tfposeidon.training import session


class MetricAverage(keras.callbacks.Callback):
    """Replaces each metric in the logs of an epoch by its mean over ranks.

    Each rank computes metrics of its own data. All ranks exchange them at the end of the epoch and
    get the same means, in which a rank weighs by the samples it has seen: in training for metrics
    of training, in validation for those that begin with `"val_"`. Exact for metrics that are means
    over samples (losses, accuracies), an approximation for others, such as the area under a curve.

    Put it before callbacks that decide by metrics (`EarlyStopping`, `ReduceLROnPlateau`,
    `ModelCheckpoint`): they then do the same on every rank. Ranks that lack a metric, as where only
    some of them validate, get the mean over those that have it. On one rank it changes nothing.

    Cost: one exchange of some 50 bytes for each metric, once per epoch.

    >>> import keras, keras_callbacks
    >>> callbacks = [
    ...     keras_callbacks.MetricAverage(),
    ...     keras.callbacks.EarlyStopping("val_loss", patience=3),
    ... ]
    """

    def __init__(self) -> None:
        super().__init__()
        self._trained: float | None = None
        self._validated = 0.0

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._trained = None

    @override
    def on_test_begin(self, logs: Any = None) -> None:
        # Keras resets the loss tracker right after this, and counts validation from 0.
        self._trained = self._samples_seen()

    @override
    def on_test_end(self, logs: Any = None) -> None:
        self._validated = self._samples_seen()

    @override
    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        wire = session.of(self.model).wire
        trained = self._samples_seen() if self._trained is None else self._trained
        if logs is not None and wire.topology.size > 1:
            logs.update(_averages(logs, trained, self._validated, wire))

    def _samples_seen(self) -> float:
        # Without a loss tracker nothing counts samples, and ranks weigh the same.
        seen = samples_seen(self.model)
        return 1.0 if seen is None else seen


def _averages(
    logs: dict[str, Any], trained: float, validated: float, wire: Wire
) -> dict[str, float]:
    own = {
        name: [validated if name.startswith("val_") else trained, float(value)]
        for name, value in logs.items()
    }
    ranks = exchange_objects(own, wire, "tp.metrics")
    # A rank may lack a metric, such as `val_loss` where only some ranks validate: it gets the mean
    # of the others, by which callbacks on all ranks decide alike.
    names = dict.fromkeys(name for metrics in ranks for name in metrics)
    pairs = {name: [metrics[name] for metrics in ranks if name in metrics] for name in names}
    return {name: _weighted_mean(values) for name, values in pairs.items()}


def _weighted_mean(pairs: list[list[float]]) -> float:
    """Returns the mean of pairs of weight and value; without any weight, the plain mean."""
    total = sum(weight for weight, _ in pairs)
    if not total:
        return sum(value for _, value in pairs) / len(pairs)
    return sum(weight * value for weight, value in pairs) / total

"""Averages metrics over ranks, so that callbacks make the same decisions on all ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from typing_extensions import override

from keras_callbacks._model_state import samples_seen
from tfposeidon.communication import agreement
from tfposeidon.communication.wire import Wire, exchange_objects
from tfposeidon.training import session


class MetricAverage(keras.callbacks.Callback):
    """Replaces each metric in the logs of an epoch by its mean over ranks.

    Each rank computes metrics on its own data. At the end of the epoch all ranks exchange them and
    receive the same means, weighted by the samples of each rank: validation samples for metrics
    that begin with `"val_"`, training samples for others. Means are exact for metrics that are
    means over samples (losses, accuracies), and approximate for others, such as the area under a
    curve.

    Put it before callbacks that depend on metrics (`EarlyStopping`, `ReduceLROnPlateau`,
    `ModelCheckpoint`), which then act identically on every rank. Ranks without a metric, as when
    only some ranks validate, receive the mean over the other ranks. Vector metrics, such as
    `F1Score(average=None)`, are averaged elementwise; text and `None` are unchanged. On one rank it
    has no effect.

    Raises:
      RuntimeError: At the end of an epoch, on all ranks, if the shapes of a metric differ.

    Cost: one exchange of about 50 bytes per metric, once per epoch.

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
        # Keras resets the loss tracker right after this hook, and counts validation samples from 0.
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
        # Without a loss tracker samples are not counted, and ranks have equal weights.
        seen = samples_seen(self.model)
        return 1.0 if seen is None else seen


def _averages(logs: dict[str, Any], trained: float, validated: float, wire: Wire) -> dict[str, Any]:
    numbers = {name: _numbers(value) for name, value in logs.items()}
    own = {
        name: [validated if name.startswith("val_") else trained, value.tolist()]
        for name, value in numbers.items()
        if value is not None
    }
    ranks = exchange_objects(own, wire, "tp.metrics")
    # A rank without a metric, such as `val_loss` where only some ranks validate, receives the mean
    # of the others, so that callbacks act identically on all ranks.
    names = dict.fromkeys(name for metrics in ranks for name in metrics)
    return {
        name: _weighted_mean(
            name, {rank: metrics[name] for rank, metrics in enumerate(ranks) if name in metrics}
        )
        for name in names
    }


def _numbers(value: Any) -> np.ndarray | None:
    """Returns a metric as float64, or `None` if it is not numeric."""
    if value is None or isinstance(value, str | bytes):
        return None
    try:
        return np.asarray(value, np.float64)
    except (TypeError, ValueError):
        return None


def _weighted_mean(name: str, pairs: dict[int, list[Any]]) -> Any:
    """Returns the mean of pairs of weight and value; if all weights are 0, the plain mean."""
    agreement.require_equal(
        {rank: np.shape(value) for rank, (_, value) in pairs.items()},
        f"All ranks must have the same shape of metric {name!r}",
        "Remove MetricAverage, or use a metric whose shape is the same on all ranks.",
    )
    weights = np.array([weight for weight, _ in pairs.values()])
    values = np.array([value for _, value in pairs.values()], np.float64)
    mean = np.average(values, 0, weights if weights.any() else None)
    return mean if mean.shape else float(mean)

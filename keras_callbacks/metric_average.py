"""Averages metrics over ranks, so that all ranks decide alike."""

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

    Each rank computes metrics of its own data. All ranks exchange them at the end of the epoch and
    get the same means, in which a rank weighs by the samples it has seen: in training for metrics
    of training, in validation for those that begin with `"val_"`. Exact for metrics that are means
    over samples (losses, accuracies), an approximation for others, such as the area under a curve.

    Put it before callbacks that decide by metrics (`EarlyStopping`, `ReduceLROnPlateau`,
    `ModelCheckpoint`): they then do the same on every rank. Ranks that lack a metric, as where only
    some of them validate, get the mean over those that have it. Metrics that are vectors, such as
    `F1Score(average=None)`, are averaged by element; text and `None` are left alone. On one rank it
    changes nothing.

    Raises:
      RuntimeError: At the end of an epoch, on all ranks, if a metric has other shapes on them.

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


def _averages(logs: dict[str, Any], trained: float, validated: float, wire: Wire) -> dict[str, Any]:
    numbers = {name: _numbers(value) for name, value in logs.items()}
    own = {
        name: [validated if name.startswith("val_") else trained, value.tolist()]
        for name, value in numbers.items()
        if value is not None
    }
    ranks = exchange_objects(own, wire, "tp.metrics")
    # A rank may lack a metric, such as `val_loss` where only some ranks validate: it gets the mean
    # of the others, by which callbacks on all ranks decide alike.
    names = dict.fromkeys(name for metrics in ranks for name in metrics)
    return {
        name: _weighted_mean(
            name, {rank: metrics[name] for rank, metrics in enumerate(ranks) if name in metrics}
        )
        for name in names
    }


def _numbers(value: Any) -> np.ndarray | None:
    """Returns a metric as float64; `None` for what is no number."""
    if value is None or isinstance(value, str | bytes):
        return None
    try:
        return np.asarray(value, np.float64)
    except (TypeError, ValueError):
        return None


def _weighted_mean(name: str, pairs: dict[int, list[Any]]) -> Any:
    """Returns the mean of pairs of weight and value; without any weight, the plain mean."""
    agreement.require_equal(
        {rank: np.shape(value) for rank, (_, value) in pairs.items()},
        f"All ranks must have metric {name!r} of one shape",
        "Leave MetricAverage out, or give the model a metric that has it.",
    )
    weights = np.array([weight for weight, _ in pairs.values()])
    values = np.array([value for _, value in pairs.values()], np.float64)
    mean = np.average(values, 0, weights if weights.any() else None)
    return mean if mean.shape else float(mean)

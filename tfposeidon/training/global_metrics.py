"""Computes metrics over the samples of all ranks, and averages layer state, after each epoch.

Afterwards, logs and layer state are equal on all ranks, so callbacks act identically. This module
also rejects callbacks that save within an epoch, and layers that Keras would synchronize in each
step.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfposeidon.checks import require_equal
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import Wire, exchange_objects
from tfposeidon.exchange import replicas
from tfposeidon.state.placement import Placement
from tfposeidon.training import session
from tfposeidon.training.entries import variables_of

SAVING = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.OrbaxCheckpoint,
)
"""Callbacks that save weights, within an epoch if `save_freq` is a number of batches."""

_Layout = list[tuple[str, list[int]]]
"""Aggregation and shape of each variable of a metric."""
_OF_ONE_RANK = ("none", "only_first_replica")
"""Keras's names for aggregations that use the value of a single replica."""


def samples_seen(model: keras.Model) -> float | None:
    """Returns the number of samples in Keras's loss tracker; `None` without a loss tracker."""
    # A model that overrides `metrics` may have a metric of the same name that counts steps.
    if type(model).metrics is not keras.Model.metrics:
        return None
    # Keras weights each batch's loss by its number of samples, so `count` is the total number.
    tracker = next((metric for metric in model.metrics if metric.name == "loss"), None)
    count = getattr(tracker, "count", None)
    return None if count is None else float(count.numpy())


class GlobalMetrics(keras.callbacks.Callback):
    """Keras callback that replaces an epoch's logs with metrics over the samples of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self._trained: _Phase | None = None
        self._validated: _Phase | None = None
        self._last: dict[str, Any] = {}

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._trained = self._validated = None

    @override
    def on_test_begin(self, logs: Any = None) -> None:
        # Keras resets the metrics right after this hook.
        self._trained = _Phase.of(self.model)

    @override
    def on_test_end(self, logs: Any = None) -> None:
        self._validated = _Phase.of(self.model, "val_")

    @override
    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        wire = session.of(self.model).wire
        if logs is None or wire.topology.size == 1:
            return
        phases = [self._trained or _Phase.of(self.model)]
        phases += [self._validated] if self._validated else []
        self._last = _means(_with_results_of_all(logs, phases, wire), wire)
        logs.update(self._last)

    @override
    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        # Keras passes its own copy of the last epoch's logs.
        if logs is not None:
            logs.update(self._last)


@dataclasses.dataclass(frozen=True)
class _Phase:
    """Metrics of training or validation on this rank, and the values of their variables.

    The keys of `metrics` and `values` are the same on all ranks, and the keys of `results` are
    Keras's names. `samples` is the weight of this rank.
    """

    prefix: str
    metrics: dict[str, Any]
    values: dict[str, list[np.ndarray]]
    results: dict[str, np.ndarray]
    samples: float

    @classmethod
    def of(cls, model: keras.Model, prefix: str = "") -> _Phase:
        # Omit metrics without variables, which are not built or hold their state elsewhere.
        with_state = [metric for metric in model.metrics if metric.variables]
        metrics = {f"{prefix}{place}.{one.name}": one for place, one in enumerate(with_state)}
        values = {
            key: [np.array(keras.ops.convert_to_numpy(v)) for v in metric.variables]
            for key, metric in metrics.items()
        }
        seen = samples_seen(model)
        # Without a loss tracker, no samples are counted, and ranks have equal weights.
        return cls(prefix, metrics, values, _results(metrics, {}), 1.0 if seen is None else seen)


def _results(metrics: dict[str, Any], values: dict[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns the numeric results of metrics by name, computed from `values` of their variables."""
    pairs = [
        pair
        for key, metric in metrics.items()
        for pair in zip(metric.variables, values.get(key, []), strict=False)
    ]
    own = [keras.ops.convert_to_numpy(variable) for variable, _ in pairs]
    try:
        # Assign the values, because a `tf.function` of a metric reads the variables themselves.
        for variable, value in pairs:
            variable.assign(value)
        return _numbers(_flat({metric.name: metric.result() for metric in metrics.values()}))
    finally:
        for (variable, _), before in zip(pairs, own, strict=True):
            variable.assign(before)


def _flat(logs: dict[str, Any]) -> dict[str, Any]:
    """Flattens nested logs as Keras does, without the names of inner dictionaries."""
    found: dict[str, Any] = {}
    for name, value in logs.items():
        found.update(_flat(value) if isinstance(value, dict) else {name: value})
    return found


def _numbers(logs: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the numeric values as float64."""
    found = {}
    for name, value in logs.items():
        if value is not None and not isinstance(value, str | bytes):
            with contextlib.suppress(TypeError, ValueError):
                found[name] = np.asarray(value, np.float64)
    return found


def _with_results_of_all(
    logs: dict[str, Any], phases: list[_Phase], wire: Wire
) -> dict[str, tuple[float, np.ndarray]]:
    """Returns weight and value of each number in `logs`, with metrics computed over all ranks.

    A number that is not the result of a metric retains the value that it has on this rank.
    """
    totals = _totals(phases, wire)
    of_all = {}
    for phase in phases:
        known = {key: metric for key, metric in phase.metrics.items() if key in totals}
        of_all[phase.prefix] = _results(known, totals)
    found = {}
    for name, number in _numbers(logs).items():
        phase = phases[-1] if name.startswith("val_") else phases[0]
        key = name.removeprefix(phase.prefix)
        own = phase.results.get(key)
        # Compare with a tolerance, because XLA may have rounded the result in the logs differently.
        if (
            own is not None
            and own.shape == number.shape
            and np.allclose(own, number, 1e-4, 1e-6, equal_nan=True)
        ):
            number = of_all[phase.prefix].get(key, number)
        found[name] = (phase.samples, number)
    return found


def _totals(phases: list[_Phase], wire: Wire) -> dict[str, list[np.ndarray]]:
    """Returns metrics' variables, each aggregated over ranks by its `aggregation`; collective."""
    layouts = _agree_on_layouts(phases, wire)
    values = {key: value for phase in phases for key, value in phase.values.items()}
    # The vector must not be empty, even if no metric has variables.
    parts = [np.zeros(1)]
    for key, (holders, layout) in layouts.items():
        is_first = holders[0] == wire.topology.rank
        own = values.get(key, [np.zeros([])] * len(layout))
        for value, (aggregation, shape) in zip(own, layout, strict=True):
            counts = is_first or aggregation not in _OF_ONE_RANK
            part = np.broadcast_to(value if counts else 0.0, shape)
            parts.append(part.astype(np.float64).ravel())
    vector = tf.constant(np.concatenate(parts), tf.float64)
    total = wire.all_reduce(vector, wire.topology.world, "tp.metrics").numpy()
    sums = iter(np.split(total, np.cumsum([part.size for part in parts]))[1:])
    return {
        key: [
            next(sums).reshape(shape) / (len(holders) if aggregation == "mean" else 1)
            for aggregation, shape in layout
        ]
        for key, (holders, layout) in layouts.items()
    }


def _agree_on_layouts(phases: list[_Phase], wire: Wire) -> dict[str, tuple[list[int], _Layout]]:
    """Returns the ranks that have each metric, and its layout; collective.

    Metrics whose layouts differ between ranks are omitted; their results are averaged instead.
    """
    own = {
        key: [(v.aggregation, list(v.shape)) for v in metric.variables]
        for phase in phases
        for key, metric in phase.metrics.items()
    }
    ranks = exchange_objects(own, wire, "tp.metric_layouts")
    found = {}
    for key in dict.fromkeys(key for layouts in ranks for key in layouts):
        holders = [rank for rank, layouts in enumerate(ranks) if key in layouts]
        layout = ranks[holders[0]][key]
        if all(ranks[rank][key] == layout for rank in holders):
            found[key] = (holders, layout)
    return found


def _means(numbers: dict[str, tuple[float, np.ndarray]], wire: Wire) -> dict[str, Any]:
    """Returns the mean of each number over the ranks that have it; collective."""
    own = {name: [weight, value.tolist()] for name, (weight, value) in numbers.items()}
    ranks = exchange_objects(own, wire, "tp.logs")
    # A rank without a metric, such as `val_loss` if only some ranks validate, receives the mean
    # over the other ranks, so that callbacks act identically on all ranks.
    names = dict.fromkeys(name for metrics in ranks for name in metrics)
    return {
        name: _mean(
            name, {rank: metrics[name] for rank, metrics in enumerate(ranks) if name in metrics}
        )
        for name in names
    }


def _mean(name: str, pairs: dict[int, list[Any]]) -> Any:
    """Returns the weighted mean of pairs of weight and value; unweighted if all weights are 0."""
    require_equal(
        {rank: np.shape(value) for rank, (_, value) in pairs.items()},
        f"All ranks must have the same shape of metric {name!r}",
        "Use a metric whose shape is the same on all ranks.",
    )
    weights = np.array([weight for weight, _ in pairs.values()])
    values = np.array([value for _, value in pairs.values()], np.float64)
    if np.array_equal(values, np.broadcast_to(values[:1], values.shape), equal_nan=True):
        # Do not average equal numbers, because the mean may differ from them in its last bit.
        mean = values[0]
    else:
        mean = np.average(values, 0, weights if weights.any() else None)
    return mean if np.shape(mean) else float(mean)


# ------------------------------------------------------------------ layer state


class LayerAverages(keras.callbacks.Callback):
    """Keras callback that averages layer state once per epoch, before validation if there is any.

    Validation does not change averaged state. Partial state, such as counts, is summed over ranks
    at the end of the epoch.
    """

    _is_due = True

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._is_due = True

    @override
    def on_test_begin(self, logs: Any = None) -> None:
        self._average()

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._average()
        partial = variables_of(self.model, Placement.PARTIAL)
        replicas.collect(partial, session.of(self.model).wire)

    def _average(self) -> None:
        # If only some ranks validate, the others take part at the end of the epoch.
        if self._is_due:
            self._is_due = False
            average_layer_state(self.model)


def average_layer_state(model: keras.Model) -> None:
    """Averages layer state over ranks if it differs between them; collective."""
    wire = session.of(model).wire
    averaged = variables_of(model, Placement.AVERAGED)
    if averaged and wire.topology.size > 1:
        # Do not average equal values, because rounding might change them.
        own = replicas.checksum(averaged)
        if len(set(exchange_objects(own, wire, "tp.layer_state"))) > 1:
            replicas.average(averaged, wire)


def check_saves(model: keras.Model, callbacks: Sequence[Any]) -> None:
    """Raises `ValueError` for callbacks that save while layer state differs between ranks.

    Collective: if one rank has such a callback, all ranks raise the error.
    """
    own = variables_of(model, Placement.AVERAGED, Placement.PARTIAL)
    if not own or not session.of(model).is_in_step:
        # If ranks train local weights, callbacks save global weights and averaged state.
        return
    within = [one for one in callbacks if isinstance(one, SAVING) and one.save_freq != "epoch"]
    mine = [f"{type(one).__name__}(save_freq={one.save_freq})" for one in within]
    ranks = exchange_objects(mine, runtime.wire(), "tp.saves")
    if found := [one for names in ranks for one in names]:
        raise ValueError(
            "Callbacks must save at the end of an epoch if the state of layers is averaged then. "
            f"Received: {found[0]}, and {own[0].path!r}, which differs between ranks within an "
            'epoch. Use save_freq="epoch", or keras_callbacks.Checkpoint(every_n_steps=...).'
        )


def refuse_synchronized(model: Any) -> None:
    """Raises `ValueError` for a synchronized `BatchNormalization`, which ranks do not support."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized:
            raise ValueError(
                "BatchNormalization must not be synchronized: a rank normalizes its samples by "
                f"the statistics of its own batch. Received: {layer.name!r}, a "
                "BatchNormalization(synchronized=True). Leave `synchronized` out: `fit` averages "
                "the moving statistics. For few samples on each rank, use GroupNormalization."
            )

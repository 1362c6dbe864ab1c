"""Stops training on all ranks once one rank stops, and compares settings and state of ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras
from typing_extensions import override

from tfposeidon.checks import at_first_entry, require_equal
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.optimizers.wrapper import leaves
from tfposeidon.training import entries, session

log = logging.getLogger("tfposeidon")

WHERE_BEGUN = (
    "Pass keras_callbacks.BroadcastVariables() to fit, or build and load the model in the same "
    "way on all ranks."
)
WHERE_SET = (
    "Run callbacks that set or restore values on all ranks, with the same values. To find the step "
    "after which ranks differ, use keras_callbacks.ReplicaCheck."
)


class AgreedStop(keras.callbacks.Callback):
    """Keras callback that stops training on all ranks after an epoch in which any rank stops.

    In epochs of known length, a stop is deferred to the end of the epoch, because other ranks would
    wait for this rank. It is not deferred if ranks detect exhausted input when they exchange.

    `is_over` returns whether the epoch has ended on another rank. Ranks compare settings before the
    first epoch and after each epoch. They compare replicated values, such as weights, before each
    epoch, after the first step and at the end of `fit`; a model's first `fit` broadcasts them.
    """

    def __init__(self, is_over: Callable[[], bool], synchronizes_model: bool) -> None:
        super().__init__()
        self._is_over, self._synchronizes_model = is_over, synchronizes_model

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        self._wants_to_stop = self._has_stepped = False
        self._weights: int | None = None
        self._session = session.of(self.model)
        waits = self._session.is_in_step and self._session.watches_absence
        self._defers_stop = self._session.knows_lengths and not waits

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._defers_stop and self.model.stop_training:
            if not self._wants_to_stop:
                log.warning(
                    "tfposeidon: rank %d requested a stop within an epoch; training ends on all "
                    "ranks at the end of this epoch.",
                    runtime.rank(),
                )
            self._wants_to_stop, self.model.stop_training = True, False
        if not (self._has_stepped or self._session.was_skipped):
            self._has_stepped = True
            self._check_first_step()
        if self._is_over():
            raise StopIteration

    def _check_first_step(self) -> None:
        if not self._session.is_in_step:
            return
        if self._synchronizes_model and len(self.model.weights) != self._weights:
            # The step created weights, whose initial values may differ between ranks.
            entries.synchronize_start(self.model, runtime.wire())
        else:
            self._compare_values(WHERE_SET)

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        begins = self._weights is None
        if begins:
            # Compare the epoch: after a restore on one rank alone, ranks start at different epochs.
            settings = _settings(self.model, epoch)
            # Leave variables to the comparison of values, which names the first difference.
            del settings["trainable variables"]
            _check_equal(exchange_objects(settings, runtime.wire(), "tp.begin"))
            # A model that is not built is synchronized after its first step.
            is_built = entries.has_weights(self.model)
            self._weights = len(self.model.weights) if is_built else -1
        if self._session.has_begun:
            self._compare_values(WHERE_BEGUN if begins else WHERE_SET, with_layers=begins)
            return
        if self._synchronizes_model:
            entries.synchronize_start(self.model, runtime.wire())
        self._session.has_begun = True

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        wants_to_stop = bool(self.model.stop_training or self._wants_to_stop)
        own = [wants_to_stop, _settings(self.model, epoch)]
        ranks = exchange_objects(own, runtime.wire(), "tp.stop")
        _check_equal([settings for _, settings in ranks])
        self.model.stop_training = any(stop for stop, _ in ranks)

    @override
    def on_train_end(self, logs: Any = None) -> None:
        self._compare_values(WHERE_SET)

    def _compare_values(self, remedy: str, with_layers: bool = False) -> None:
        if not self._synchronizes_model:
            return
        problem = entries.difference(self.model, runtime.wire(), with_layers)
        if problem and self._session.only_reports:
            runtime.log_once("tfposeidon: %s", problem)
        elif problem:
            raise RuntimeError(f"{problem} {remedy}")


def _settings(model: keras.Model, epoch: int) -> dict[str, Any]:
    """Returns the settings that must be equal on all ranks, by name, as values for JSON."""
    settings: dict[str, Any] = {
        "epoch": epoch,
        # Compare names, not paths: layer numbers in paths (`dense_1`) may differ between ranks.
        "trainable variables": [f"{v.name} {tuple(v.shape)}" for v in model.trainable_variables],
    }
    for number, optimizer in enumerate(session.optimizers_of(model)):
        for place, leaf in enumerate(leaves(optimizer.inner_optimizer)):
            which = f" of optimizer {number}" if number else ""
            which += f", part {place}" if place else ""
            # With a loss scale, ranks with local weights skip different steps, so rates may differ.
            is_in_step = optimizer.fit_hooks(model).is_in_step
            values = {
                "learning rate": leaf.learning_rate if is_in_step else None,
                "momentum": getattr(leaf, "momentum", None),
                "weight decay": leaf.weight_decay,
            }
            for name, value in values.items():
                settings[f"{name}{which}"] = None if value is None else float(value)
    return settings


def _check_equal(received: list[dict[str, Any]]) -> None:
    require_equal(
        received,
        "All ranks must train with the same settings",
        "Run callbacks that set or restore this setting on all ranks, with the same values. "
        "Replace callbacks that restore only one rank with keras_callbacks.Checkpoint.",
        at_first_entry(lambda first, other: (_shown(first, other), _shown(other, first))),
    )


def _shown(value: Any, other: Any) -> str:
    """Formats a setting; a list as its length and the first item that `other` does not contain."""
    if not isinstance(value, list):
        return str(value)
    more = [item for item in value if item not in other]
    return f"{len(value)}" + (f" (including {more[0]!r})" if more else "")

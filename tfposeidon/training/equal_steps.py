"""Ends each epoch on all ranks after as many steps as the rank with the fewest batches has.

The callbacks run in this order: `EqualSteps` ends the epoch. `LayerAverages` and `GlobalMetrics`
synchronize layer state and logs, which the user's callbacks read next. `PlannerCallbacks` runs the
callbacks of the optimizers' planners. `AgreedStop` stops training on all ranks, and compares
settings and values across ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from typing_extensions import override

from tfposeidon.checks import at_first_entry, require_equal
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.exchange import replicas
from tfposeidon.exchange.means import join_until_all_have_ended
from tfposeidon.optimizers.wrapper import leaves
from tfposeidon.training import entries, session
from tfposeidon.training.global_metrics import GlobalMetrics, LayerAverages
from tfposeidon.training.hooks import FitHooks

log = logging.getLogger("tfposeidon")

WHERE_BEGUN = (
    "Pass keras_callbacks.BroadcastVariables() to fit, or build and load the model in the same "
    "way on all ranks."
)
WHERE_SET = (
    "Run callbacks that set or restore values on all ranks, with the same values. To find the step "
    "after which ranks differ, use keras_callbacks.ReplicaCheck."
)


def with_equal_epochs(
    callbacks: list[Any], hooks: Sequence[FitHooks], rows: int | None, synchronizes: bool
) -> list[Any]:
    """Returns the user's callbacks and the callbacks for several ranks, in the required order.

    `EqualSteps` precedes the user's callbacks, which may communicate at the end of an epoch, and
    `AgreedStop` follows them, because they may request a stop. `rows` is this rank's batch size, or
    `None` if it is unknown or varies.
    """
    steps = EqualSteps(any(map(_may_stop, callbacks)), rows, synchronizes)
    first = [callback for one in hooks for callback in one.first]
    first += [LayerAverages(), GlobalMetrics()] if synchronizes else []
    last = [callback for one in hooks for callback in one.last]
    stop = AgreedStop(steps, synchronizes)
    return [steps, *first, *callbacks, PlannerCallbacks(), *last, stop]


def _may_stop(callback: Any) -> bool:
    """Returns whether a callback may set `stop_training` within an epoch."""
    if isinstance(callback, keras.callbacks.TerminateOnNaN | keras.callbacks.LambdaCallback):
        return True
    # All other callbacks of Keras and of this project stop at the end of epochs only.
    if type(callback).__module__.split(".")[0] in ("keras", "keras_callbacks", "tfposeidon"):
        return False
    return has_batch_hooks(callback)


def has_batch_hooks(callback: Any) -> bool:
    """Returns whether a callback overrides a hook that Keras calls for each training batch."""
    hooks = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
    base = keras.callbacks.Callback
    return any(
        getattr(getattr(callback, hook), "__func__", None) is not getattr(base, hook)
        for hook in hooks
    )


class EqualSteps(keras.callbacks.Callback):
    """Keras callback that ends each epoch on all ranks once one rank has no more batches.

    If all ranks know their number of batches, and these are equal or executions have one step, they
    agree on the minimum once, at no cost per step. Otherwise, or if a callback may stop within an
    epoch, a rank that has finished joins the other ranks' next step with zeros, which ends the
    epoch on all ranks. Ranks that train local weights do not exchange in each step, so `AgreedStop`
    defers a stop to the end of the epoch.
    """

    def __init__(self, may_stop: bool, rows: int | None, synchronizes: bool) -> None:
        super().__init__()
        self._may_stop, self._rows, self._synchronizes = may_stop, rows, synchronizes
        self._is_finished, self.is_over = True, False

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        own = [self.params.get("steps"), self._may_stop, self._rows]
        ranks = exchange_objects(own, runtime.wire(), "tp.steps")
        self._agree_on_limit([steps for steps, _, _ in ranks])
        self._session = session.of(self.model)
        self._session.knows_lengths = self._limit is not None
        may_stop = any(may_stop for _, may_stop, _ in ranks) and self._session.is_in_step
        self._watches = self._limit is None or may_stop
        if self.model.run_eagerly and len(self._session.optimizers) > 1:
            # Horovod matches eager collectives by their order alone, and a rank with exhausted
            # input does not know in which order other ranks exchange gradients of the optimizers.
            if self._limit is None:
                raise ValueError(
                    "With run_eagerly=True and several optimizers, each rank must know its number "
                    "of batches. Received: data of unknown length. Leave run_eagerly out, or pass "
                    "steps_per_epoch to fit."
                )
            self._watches = False
        # Trace the step again, because earlier traces depend on the earlier settings.
        are_equal = self._rows is not None and all(rows == self._rows for _, _, rows in ranks)
        has_changed = self._session.weight_equally(are_equal)
        if self._session.watch_absence(self._watches) or has_changed:
            self.model.make_train_function(force=True)

    def _agree_on_limit(self, steps: list[Any]) -> None:
        # Keras shares this dictionary among callbacks. Learning rates that depend on the fraction
        # of an epoch are equal on all ranks only if the number of steps is equal.
        self.params["steps"] = fewest = None if None in steps else min(steps)
        equal = fewest is not None and len(set(steps)) == 1
        # An execution of several steps cannot end after some of them.
        self._limit = fewest if equal or self.model.steps_per_execution == 1 else None
        if not equal:
            runtime.log_once(
                "tfposeidon: ranks have different or unknown numbers of batches (%s); each epoch "
                "ends on all ranks after the smallest number of batches of any rank.",
                ", ".join("unknown" if n is None else str(n) for n in sorted(set(steps), key=str)),
            )

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._done = self._steps = 0
        self._has_trained = self._is_finished = False
        *self._before, _ = self._session.steps_done

    @override
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        fewest = self.params["steps"]
        if fewest is not None and batch >= fewest:
            # Keras's loop over batches catches this error, and ends the epoch.
            raise StopIteration
        self.is_over = False

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._done = batch + 1
        was_skipped = self._session.was_skipped
        self._has_trained = self._has_trained or not was_skipped
        if not self._watches or was_skipped:
            return
        *done, absent = self._session.steps_done
        (steps, complete), self._before = np.subtract(done, self._before), done
        are_absent = absent > 0
        self._steps += int(steps)
        # If fewer steps than `steps_per_execution` ran, this rank's input ended in this execution.
        self.is_over = are_absent or bool(steps < self.model.steps_per_execution)
        # Callbacks do not count an update that was dropped on all ranks as a batch.
        counts_exchanges = are_absent and self._session.is_in_step
        if self.is_over and not self._finish(bool(complete if counts_exchanges else steps)):
            raise StopIteration

    def _finish(self, has_trained: bool) -> bool:
        """Ends the epoch on all ranks; returns whether callbacks count its last execution."""
        # All ranks must agree first, because callbacks may communicate at the end of a batch.
        self._is_finished = True
        self._join_others()
        own = [has_trained, self._steps]
        ranks = exchange_objects(own, runtime.wire(), "tp.last_execution")
        # Ranks that train local weights decide independently whether callbacks count it.
        if not self._session.is_in_step:
            return has_trained
        self._undo_dropped_steps([steps for _, steps in ranks])
        return all(has_trained for has_trained, _ in ranks)

    def _join_others(self) -> None:
        """Contributes zeros to the other ranks' steps until all ranks have finished the epoch.

        If this rank's input ends within an accumulated update, all ranks discard the update.
        """
        watched = self._session.watched
        of_each = [optimizer.fit_hooks(self.model) for optimizer in watched]
        # A step may contain several exchanges, each with a hook.
        hooks = [hook for one in of_each for hook in one.join_hooks()]
        if not hooks:
            raise RuntimeError(
                "Every rank must have at least one batch to end an epoch. Received: a rank "
                "without batches. Provide data on every rank."
            )
        others_went_on = join_until_all_have_ended(hooks, self.model.run_eagerly)
        *_, absent = self._session.steps_done
        for optimizer, one in zip(watched, of_each, strict=True):
            optimizer.exchange.absence.forget()
            if (others_went_on or absent) and one.abandon_update is not None:
                one.abandon_update()

    def _undo_dropped_steps(self, steps: list[int]) -> None:
        """Restores variables that train steps of dropped updates changed, such as counters."""
        have_dropped = len(set(steps)) > 1
        if not (have_dropped and self._synchronizes and entries.has_weights(self.model)):
            return
        # A difference in variables of optimizers is an error, which `AgreedStop` raises.
        values, wire = entries.of_train_step(self.model), runtime.wire()
        sums = exchange_objects(replicas.checksum(values), wire, "tp.dropped_steps")
        if len(set(sums)) > 1:
            replicas.broadcast(values, wire, steps.index(min(steps)))

    @override
    def on_test_begin(self, logs: Any = None) -> None:
        # End the steps before validation, because callbacks may communicate there.
        self._end_steps()

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._end_steps()

    def _end_steps(self) -> None:
        # Epochs with validation call this twice.
        if self._is_finished:
            return
        self._is_finished = True
        if self._watches:
            # A resumed epoch may already be complete; then it is complete on all ranks.
            if self._has_trained or not self._done or self._limit is None:
                self._finish(False)
        elif self._limit is not None and self._done < self._limit:
            raise RuntimeError(
                f"Every rank must run the agreed {self._limit} steps per epoch. Received: only "
                f"{self._done} on rank {runtime.rank()}, which exhausted its input early. Provide "
                "more data on this rank, or leave steps_per_epoch out."
            )


class AgreedStop(keras.callbacks.Callback):
    """Keras callback that stops training on all ranks after an epoch in which any rank stops.

    In epochs of known length, a stop is deferred to the end of the epoch, because other ranks would
    wait for this rank, unless ranks exchange in each step and detect absent ranks.

    Ranks compare settings before the first epoch and after each epoch, and values before each
    epoch, after the first step and at the end of `fit`. A model's first `fit` instead starts with
    the values of one rank.
    """

    def __init__(self, steps: EqualSteps, synchronizes_model: bool) -> None:
        super().__init__()
        self._equal_steps, self._synchronizes_model = steps, synchronizes_model

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        self._wants_to_stop = self._has_stepped = False
        self._was_built: bool | None = None
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
        if self._equal_steps.is_over:
            raise StopIteration
        if self._has_stepped or self._session.was_skipped:
            return
        self._has_stepped = True
        if not self._session.is_in_step:
            return
        if self._synchronizes_model and not self._was_built:
            # Ranks have created their weights in this step.
            entries.synchronize_start(self.model, runtime.wire())
        else:
            self._compare_values(WHERE_SET)

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        begins = self._was_built is None
        if begins:
            # A callback that restores only one rank changes that rank's first epoch.
            settings = _settings(self.model, epoch)
            # Leave variables to the comparison of values, which names the first difference.
            del settings["trainable variables"]
            _check_equal(exchange_objects(settings, runtime.wire(), "tp.begin"))
            self._was_built = entries.has_weights(self.model)
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


class PlannerCallbacks(keras.callbacks.Callback):
    """Keras callback that runs the callbacks of optimizers' planners, each class once per model.

    At the start of each epoch it adds missing callbacks, because a schedule may have replaced a
    planner.
    """

    def __init__(self) -> None:
        super().__init__()
        self._callbacks: dict[type, keras.callbacks.Callback] = {}

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        for optimizer in session.optimizers_of(self.model):
            kind = optimizer.exchange.plans.planner.callback
            if kind is not None and kind not in self._callbacks:
                self._callbacks[kind] = kind()
                self._callbacks[kind].set_params(self.params)
                self._callbacks[kind].set_model(self.model)
        for callback in self._callbacks.values():
            callback.on_epoch_begin(epoch, logs)

    @override
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        for callback in self._callbacks.values():
            callback.on_train_batch_begin(batch, logs)

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        for callback in self._callbacks.values():
            callback.on_train_batch_end(batch, logs)


def _settings(model: keras.Model, epoch: int) -> dict[str, Any]:
    """Returns the settings that must be equal on all ranks, by name, as values for JSON."""
    settings: dict[str, Any] = {
        "epoch": epoch,
        # Compare no paths: Keras numbers layers in them (`dense_1`), differently on each rank.
        "trainable variables": [f"{v.name} {tuple(v.shape)}" for v in model.trainable_variables],
    }
    for number, optimizer in enumerate(session.optimizers_of(model)):
        for place, leaf in enumerate(leaves(optimizer.inner_optimizer)):
            which = f" of optimizer {number}" if number else ""
            which += f", part {place}" if place else ""
            # With a loss scale, ranks that train local weights skip different steps.
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
        "Run callbacks that set or restore it on all ranks, with the same values; instead of "
        "callbacks that restore only one rank, use keras_callbacks.Checkpoint.",
        at_first_entry(lambda first, other: (_shown(first, other), _shown(other, first))),
    )


def _shown(value: Any, other: Any) -> str:
    """Formats a setting; a list as its length and the first item that `other` does not contain."""
    if not isinstance(value, list):
        return str(value)
    more = [item for item in value if item not in other]
    return f"{len(value)}" + (f" (including {more[0]!r})" if more else "")

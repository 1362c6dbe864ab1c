"""Ends each epoch on all ranks after the same step.

The callbacks run in this order: `EqualSteps` ends the epoch. `LayerAverages` and `GlobalMetrics`
synchronize layer state and logs, which the user's callbacks read next. `PlannerCallbacks` runs the
callbacks of the optimizers' planners. `AgreedStop` stops training on all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfposeidon.communication import runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.exchange import replicas
from tfposeidon.exchange.means import join_until_all_have_ended
from tfposeidon.gradients import of_tensorflow
from tfposeidon.training import entries, session
from tfposeidon.training.agreed_stop import AgreedStop
from tfposeidon.training.global_metrics import GlobalMetrics, LayerAverages
from tfposeidon.training.hooks import FitHooks

log = logging.getLogger("tfposeidon")

KNOWN = ("keras", "keras_callbacks", "tfposeidon", "builtins")
"""Packages whose callbacks stop training only between epochs, and `builtins` for `object`."""


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
    last.append(AgreedStop(lambda: steps.is_over, synchronizes))
    steps.others = [*first, *callbacks, PlannerCallbacks(), *last]
    return [steps, *steps.others]


def _may_stop(callback: Any) -> bool:
    """Returns whether a callback may set `stop_training` within an epoch."""
    if isinstance(callback, keras.callbacks.TerminateOnNaN | keras.callbacks.LambdaCallback):
        return True
    # All other callbacks of Keras and of this project stop training only at the end of an epoch.
    return has_batch_hooks(callback)


def has_batch_hooks(callback: Any) -> bool:
    """Returns whether a user's callback has hooks that Keras calls for each training batch."""
    hooks = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
    # Hooks that a user's class inherits from callbacks of this project or of Keras do not count.
    own = [one for one in type(callback).__mro__ if one.__module__.split(".")[0] not in KNOWN]
    return any(hook in vars(one) for one in [callback, *own] for hook in hooks)


class EqualSteps(keras.callbacks.Callback):
    """Keras callback that ends each epoch on all ranks once one rank has no more batches.

    If all ranks know their number of batches, and numbers are equal or executions have one step,
    ranks agree on the minimum once, at no cost per step. If some ranks have one batch more, the
    others take part in the last step without samples. If numbers are unknown, or if a callback may
    stop within an epoch, a rank that has finished joins the other ranks' next step with zeros,
    which ends the epoch on all ranks. Ranks that train local weights do not exchange in each step,
    so `AgreedStop` defers a stop to the end of the epoch. `others` are the callbacks that follow.
    """

    def __init__(self, may_stop: bool, rows: int | None, synchronizes: bool) -> None:
        super().__init__()
        self._may_stop, self._rows, self._synchronizes = may_stop, rows, synchronizes
        self._is_finished, self.is_over = True, False
        self.others: list[Any] = []
        self._without_samples: tuple[Any, Any] = (None, None)

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        can_add = _can_step_without_samples(self.model)
        own = [self.params.get("steps"), self._may_stop, self._rows, can_add]
        ranks = exchange_objects(own, runtime.wire(), "tp.steps")
        self._session = session.of(self.model)
        may_stop = any(may_stop for _, may_stop, _, _ in ranks) and self._session.is_in_step
        can_add = not may_stop and all(can_add for *_, can_add in ranks)
        self._agree_on_limit([steps for steps, *_ in ranks], can_add)
        self._session.knows_lengths = self._limit is not None
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
        are_equal = self._rows is not None and all(rows == self._rows for _, _, rows, _ in ranks)
        are_equal = are_equal and not self._adds_step
        has_changed = self._session.weight_equally(are_equal)
        if self._session.watch_absence(self._watches) or has_changed:
            self.model.make_train_function(force=True)

    def _agree_on_limit(self, steps: list[Any], can_add: bool) -> None:
        limit, equal = None if None in steps else min(steps), len(set(steps)) == 1
        # The shards that `tp.shard` makes of arrays differ by at most one batch.
        self._adds_step = can_add and limit is not None and max(steps) == limit + 1
        # Keras shares this dictionary among callbacks. Learning rates that depend on the fraction
        # of an epoch are equal on all ranks only if the number of steps is equal.
        self.params["steps"] = limit = max(steps) if self._adds_step else limit
        # An execution of several steps cannot end after some of them.
        self._limit = limit if equal or self.model.steps_per_execution == 1 else None
        if not equal or limit is None:
            runtime.log_once(
                "tfposeidon: ranks have different or unknown numbers of batches (%s); %s.",
                ", ".join("unknown" if n is None else str(n) for n in sorted(set(steps), key=str)),
                "ranks without a last batch take part in the last step without samples"
                if self._adds_step
                else "each epoch ends on all ranks after the smallest of these numbers",
            )

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._done = self._steps = 0
        self._has_trained = self._is_finished = False
        *self._before, _ = self._session.steps_done

    @override
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        limit = self.params["steps"]
        if limit is not None and batch >= limit:
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
        # Each rank that trains local weights decides alone whether callbacks count the execution.
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
        """Restores variables, such as counters, that train steps with dropped updates changed."""
        have_dropped = len(set(steps)) > 1
        if not (have_dropped and self._synchronizes and entries.has_weights(self.model)):
            return
        # `of_train_step` omits variables of optimizers: if these differ, `AgreedStop` raises.
        values, wire = entries.of_train_step(self.model), runtime.wire()
        sums = exchange_objects(replicas.checksum(values), wire, "tp.dropped_steps")
        if len(set(sums)) > 1:
            replicas.broadcast(values, wire, steps.index(min(steps)))

    def _step_without_samples(self) -> None:
        """Takes part in the last step of other ranks, for which this rank has no batch."""
        own, others = self._session, keras.callbacks.CallbackList(self.others)
        others.on_train_batch_begin(self._done)
        own.was_skipped = own.is_skipping
        if own.was_skipped:
            own.skip(iter([None]))
        else:
            # After a new train function, trace this step again, because the plan may have changed.
            if self._without_samples[0] is not self.model.train_function:
                self._without_samples = self.model.train_function, _without_samples(self.model)
            self._without_samples[1]()
        others.on_train_batch_end(self._done, self.model.get_metrics_result())
        self._done += 1

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
        if self._adds_step and self._done == self.params["steps"] - 1:
            self._step_without_samples()
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


def _can_step_without_samples(model: Any) -> bool:
    """Returns whether a rank may replace a train step by one update without its own gradients."""
    optimizer = session.without_loss_scale(model.optimizer)
    if not (session.is_distributed(optimizer) and session.trains_all_together(model)):
        return False
    # A step with code of the user may also count steps or call collectives.
    losses = [keras.losses.get(loss) for loss in keras.tree.flatten(model.loss)]
    losses = [getattr(loss, "fn", loss) for loss in losses]
    trained = [tuple(of_tensorflow(v).ref() for v in model.trainable_weights)]
    known = [tuple(of_tensorflow(v).ref() for v in one) for one in optimizer.exchange.plans.lists]
    return (
        all(map(_is_of_keras, [model, *model._flatten_layers(), *losses]))
        # A trace on this rank alone must not need another plan.
        and known in ([], trained)
        and optimizer.exchange.batch.function is None
        and optimizer.fit_hooks(model).is_in_step
        and model.steps_per_execution == 1
        and not optimizer.gradient_accumulation_steps
        # Ranks add the gradient of a regularizer to sufficient factors themselves.
        and (optimizer.policy.reader is None or (entries.has_weights(model) and not model.losses))
    )


def _is_of_keras(one: Any) -> bool:
    """Returns whether a layer or loss is Keras's own, and changes weights only by gradients."""
    kind = one if hasattr(one, "__qualname__") else type(one)
    others = keras.layers.Lambda, keras.layers.SpectralNormalization
    return kind.__module__.split(".")[0] in ("keras", "keras_hub") and not isinstance(one, others)


def _without_samples(model: Any) -> Any:
    """Returns a function that updates the weights with the gradients of the other ranks."""
    optimizer = model.optimizer
    batch = session.without_loss_scale(optimizer).exchange.batch

    def step() -> None:
        with batch.counting_none():
            optimizer.apply([None] * len(model.trainable_weights), model.trainable_weights)

    return step if model.run_eagerly else tf.function(step, autograph=False)


class PlannerCallbacks(keras.callbacks.Callback):
    """Keras callback that runs the callbacks of optimizers' planners, each class once per model.

    At the start of each epoch, it adds missing callbacks, because a schedule may have replaced a
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

"""Changes the communication scheme during training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
from typing_extensions import override

from tfposeidon import policies
from tfposeidon.communication import runtime
from tfposeidon.training import session


class SchemeSchedule(keras.callbacks.Callback):
    """Changes the communication scheme at the beginning of given epochs.

    For example, a job may start with a sparse scheme and continue with a dense one. No residual is
    lost: when an epoch begins with a change, its first steps still use the old scheme, which sends
    all of its residuals densely. After the first of these steps with finite averaged gradients and
    a learning rate other than 0, the step is traced again with the new scheme. Velocities of
    momentum correction restart at zero.

    If the first rank that exhausts its input ends the epoch for all ranks, the last exchange of the
    previous epoch sends the residuals instead, provided that the length of the previous epoch is
    known from the data or from the epoch before it. Otherwise the change is deferred to the next
    epoch.

    Every rank needs this callback with the same schedule. Put it before `Checkpoint`, so that a
    resumed run continues with its saved scheme.

    Args:
      schedule: Schemes, as for `DistributedOptimizer`, by their first epochs, including epoch 0.
      verbose: True (default) to log a line for each epoch that changes the scheme.

    Raises:
      ValueError: If the schedule does not start at epoch 0, has an unknown scheme, or mixes schemes
        with and without momentum correction. In `fit`, if the model has no `DistributedOptimizer`,
        or if `Checkpoint` precedes this callback.

    Source: Shi et al. 2021 (CommLib), section 5.6: MSTopK at the lower resolutions, then 2D torus.

    >>> import keras_callbacks
    >>> callback = keras_callbacks.SchemeSchedule({0: "hitopk", 13: "torus2d"})
    """

    def __init__(self, schedule: Mapping[int, Any], verbose: bool = True) -> None:
        super().__init__()
        self.verbose = verbose
        self.schedule = {
            epoch: policies.parse(scheme) for epoch, scheme in sorted(schedule.items())
        }
        if min(self.schedule, default=None) != 0:
            raise ValueError(
                "`schedule` must contain a scheme for epoch 0. Received: epochs "
                f"{list(self.schedule)}. Add the first scheme with key 0."
            )
        corrects_momentum = {policy.corrects_momentum for policy in self.schedule.values()}
        if len(corrects_momentum) > 1:
            raise ValueError(
                "All schemes of a schedule must correct momentum, or none of them. Received: "
                f"schedule={self.schedule}. Omit momentum from the schemes, and set it in the "
                "optimizer."
            )
        # This is True from the request to send all residuals until the scheme changes.
        self._is_flushing = False

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        self._session = session.of(self.model)
        self._optimizers = self._session.optimizers
        if not self._optimizers:
            raise ValueError(
                "SchemeSchedule needs a DistributedOptimizer. Received: "
                f"{type(self.model.optimizer).__name__}. "
                "Compile the model with tp.DistributedOptimizer(...)."
            )
        check_precedes_checkpoint(self)
        if len(self.schedule) > 1:
            self._session.check_in_step("a SchemeSchedule")
        # Check all schemes now, because the epoch of a change may be hours away.
        for optimizer in self._optimizers:
            for policy in self.schedule.values():
                optimizer.check_change(policy)
        self._session.has_scheme_changes = True
        # Epochs of this `fit` may differ in length from epochs of the previous `fit`.
        self._batches = self.params.get("steps") or 0

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._batches_before, self._batches = epoch, self._batches, 0
        # If epochs may end early, ranks retain their exchange until the end of an epoch, even of a
        # resumed epoch.
        if self._session.watches_absence and self._session.is_skipping:
            return
        # If an earlier `fit` sent the residuals for a change that this `fit` does not make, set the
        # current scheme again, because a scheme that has sent its residuals remains dense.
        if self._goes_by(epoch) and not self._is_flushing:
            return
        self._flush()
        self._change_if_flushed()

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches = batch + 1
        if self._session.was_skipped:
            return
        # If epochs may end early, do not change the scheme within an epoch, because a rank without
        # data can join only the exchange that it has traced. Instead, the last exchange in an epoch
        # of the expected length sends the residuals.
        if not self._session.watches_absence:
            self._change_if_flushed()
        elif not (self._is_flushing or self._goes_by(self._epoch + 1)):
            left = self._batches_before - self._batches
            if 0 < left <= self._session.steps_until_exchange(self._optimizers):
                self._flush()

    def _wanted_at(self, epoch: int) -> policies.Policy:
        return self.schedule[max(start for start in self.schedule if start <= epoch)]

    def _goes_by(self, epoch: int) -> bool:
        return all(one.policy == self._wanted_at(epoch) for one in self._optimizers)

    def _flush(self) -> None:
        self._is_flushing = True
        if not self._session.has_flushed:
            self._session.flush()

    def _change_if_flushed(self) -> None:
        if self._is_flushing and self._session.has_flushed:
            self._is_flushing = False
            wanted = self._wanted_at(self._epoch)
            if self.verbose and not self._goes_by(self._epoch):
                text = "tfposeidon: epoch %d changes the scheme to %s."
                runtime.log_once(text, self._epoch, wanted)
            self._session.change_scheme(wanted)


def check_precedes_checkpoint(callback: keras.callbacks.Callback) -> None:
    """Raises an error if a callback follows a `Checkpoint` that has resumed the model.

    Args:
      callback: The callback, at the start of training.

    Raises:
      ValueError: If the model has already resumed.
    """
    if session.of(callback.model).is_resumed:
        raise ValueError(
            f"{type(callback).__name__} must come before Checkpoint in the list of callbacks. "
            "Received: Checkpoint first. Move Checkpoint to the end of the list."
        )

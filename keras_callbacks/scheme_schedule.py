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

    A job may begin with a sparse scheme, say, and go on with a dense one. No residual is lost. When
    an epoch begins with a change, its first steps still go by the old scheme, which then sends
    densely all that it has kept; after the first such step that counts (means are finite, and the
    rate is not 0) the step is traced anew with the new scheme. Where ranks end an epoch with the
    first one that is out of data, it is the last exchange of the epoch before that sends what was
    kept. For that the length of the epoch must be known, from the data or from the epoch before it;
    otherwise the change waits for the next epoch. Velocities of momentum correction start anew.

    Every rank needs this callback with the same schedule. Put it before `Checkpoint`: a resumed run
    then goes on with the scheme that it was saved with.

    Args:
      schedule: Scheme by first epoch, from epoch 0; schemes as `DistributedOptimizer` takes them.
      verbose: True to print a line where an epoch goes by another scheme.

    Raises:
      ValueError: If the schedule does not begin at epoch 0, has an unknown scheme, or mixes schemes
        with and without momentum correction. In `fit`, if the model has no `DistributedOptimizer`,
        or if `Checkpoint` comes before this callback.

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
                "`schedule` must say by which scheme epoch 0 goes. Received: epochs "
                f"{list(self.schedule)}"
            )
        corrects_momentum = {policy.corrects_momentum for policy in self.schedule.values()}
        if len(corrects_momentum) > 1:
            raise ValueError(
                "Momentum must be either the schemes' or the optimizer's, all the time. Received: "
                "a schedule in which some schemes correct momentum and others do not. Leave "
                "momentum to the optimizer."
            )
        self._next: policies.Policy | None = None
        self._optimizers: list[Any] = []
        self._is_skipping = False
        self._epoch = self._batches = self._batches_before = 0
        # Whether schemes were told to send everything before an epoch that changes them.
        self._flushes_ahead = False

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
        if self._session.is_resumed:
            raise ValueError(
                "SchemeSchedule must come before Checkpoint in the list of callbacks. Received: "
                "after it."
            )
        if len(self.schedule) > 1:
            self._session.check_in_step("a SchemeSchedule")
        # Now, and not in an epoch that comes hours later.
        for optimizer in self._optimizers:
            for policy in self.schedule.values():
                optimizer.check_change(policy)
        self._session.announce_scheme_changes()
        # Epochs of this `fit` may have another length than those of the last one.
        self._batches = self.params.get("steps") or 0

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._batches_before, self._batches = epoch, self._batches, 0
        # Ranks that end an epoch together keep their exchange to its end, resumed ones too.
        if self._session.watches_absence and self._session.is_skipping:
            return
        # A change that the last epoch could not make.
        self._change_if_flushed()
        wanted, was_flushed = self._wanted_at(epoch), self._flushes_ahead
        self._flushes_ahead = False
        if self._goes_by(wanted):
            if was_flushed:
                # Another `fit` than the one that was to follow: schemes would stay dense.
                self._session.change_scheme(wanted)
            return
        if self.verbose:
            runtime.say("tfposeidon: epoch %d goes by %s.", epoch, wanted)
        self._next = wanted
        if not self._session.has_flushed:
            self._session.flush()
        self._change_if_flushed()

    @override
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        # Asked before the batch: the last one to be skipped ends the skipping.
        self._is_skipping = self._session.is_skipping

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches = batch + 1
        if self._is_skipping:
            return
        # Ranks that end an epoch together need the exchange that they know until its end.
        if not self._session.watches_absence:
            self._change_if_flushed()
        elif self._is_time_to_flush and not self._goes_by(self._wanted_at(self._epoch + 1)):
            self._flushes_ahead = True
            self._session.flush()

    @property
    def _is_time_to_flush(self) -> bool:
        """True once a single exchange of the epoch is left, by the length that it should have."""
        if self._flushes_ahead or self._next is not None:
            return False
        left = self._batches_before - self._batches
        return 0 < left <= self._session.steps_until_exchange(self._optimizers)

    def _wanted_at(self, epoch: int) -> policies.Policy:
        return self.schedule[max(start for start in self.schedule if start <= epoch)]

    def _goes_by(self, policy: policies.Policy) -> bool:
        return all(optimizer.policy == policy for optimizer in self._optimizers)

    def _change_if_flushed(self) -> None:
        if self._next is not None and self._session.has_flushed:
            self._session.change_scheme(self._next)
            self._next = None

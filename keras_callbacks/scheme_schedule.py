"""Changes the communication scheme during training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from tfposeidon import policies
from tfposeidon.communication import runtime
from tfposeidon.training import session


class SchemeSchedule(keras.callbacks.Callback):
    """Uses one scheme from one epoch on, another from another: sparse first, say, then the 2D torus.

    No residual is lost: the first batches of an epoch that begins with a change (until one of them has
    counted; the whole epoch where ranks end it with the first that is out of data) still go by the old scheme, which
    sends densely all that it has kept. Then the step is traced anew. Velocities of momentum correction
    start anew. Put it before `Checkpoint`: a resumed run goes on with the scheme it was in.

    Args:
      schedule: Epoch -> scheme, as `DistributedOptimizer` takes it; it must begin at epoch 0.

    Raises:
      ValueError: If the schedule is empty, does not begin at 0, has an unknown scheme, or some schemes with
        momentum correction and some without; in `fit`, if the model's optimizer is no DistributedOptimizer, or
        `Checkpoint` comes before this.

    Source: Shi et al. 2021 (CommLib), section 5.6: MSTopK at the lower resolutions, then 2D torus.

    >>> import keras_callbacks
    >>> callback = keras_callbacks.SchemeSchedule({0: "hitopk", 13: "2dtar"})
    """

    def __init__(self, schedule: Mapping[int, Any]) -> None:
        super().__init__()
        self.schedule = {
            epoch: policies.parse(scheme) for epoch, scheme in sorted(schedule.items())
        }
        if min(self.schedule, default=None) != 0:
            raise ValueError(
                f"`schedule` must say by which scheme epoch 0 goes. Received: epochs {list(self.schedule)}"
            )
        corrected = {
            isinstance(p, policies.Uniform) and p.scheme.corrects_momentum
            for p in self.schedule.values()
        }
        if len(corrected) > 1:
            raise ValueError(
                "Momentum must be either the schemes' or the optimizer's, all the time. Received: a schedule in which "
                "some schemes correct momentum and others do not. Leave momentum to the optimizer."
            )
        self._next: policies.Policy | None = None
        self._optimizers: list[Any] = []
        self._skipping = False

    def on_train_begin(self, logs: Any = None) -> None:
        self._session = session.of(self.model)
        self._optimizers = self._session.optimizers
        if not self._optimizers:
            raise ValueError(
                f"SchemeSchedule needs a DistributedOptimizer. Received: {type(self.model.optimizer).__name__}. "
                "Compile the model with tp.DistributedOptimizer(...)."
            )
        if self._session.is_resumed:
            raise ValueError(
                "SchemeSchedule must come before Checkpoint in the list of callbacks. Received: after it."
            )
        self._session.announce_scheme_changes()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._change_if_flushed()
        wanted = self.schedule[max(start for start in self.schedule if start <= epoch)]
        if all(optimizer.policy == wanted for optimizer in self._optimizers):
            return
        runtime.say("tfposeidon: epoch %d goes by %s.", epoch, wanted)
        self._next = wanted
        # All of them, whatever the first has to say.
        if not any([optimizer.exchange.flush() for optimizer in self._optimizers]):  # noqa: C419
            self._change_if_flushed()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._skipping = self._session.is_skipping

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # Ranks that end an epoch together need the exchange that they know until its end.
        if not self._skipping and not any(
            optimizer.exchange.watches_absence for optimizer in self._optimizers
        ):
            self._change_if_flushed()

    def _change_if_flushed(self) -> None:
        if self._next is not None and all(
            optimizer.exchange.has_flushed for optimizer in self._optimizers
        ):
            for optimizer in self._optimizers:
                optimizer.change_scheme(self._next)
            self._session.retrace()
            self._next = None

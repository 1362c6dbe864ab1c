"""Changes the communication scheme during training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from tfposeidon import policies, runtime
from tfposeidon.optimizer import DistributedOptimizer
from tfposeidon.pass_over import is_passing_over


class SchemeSchedule(keras.callbacks.Callback):
    """Uses one scheme from one epoch on, another from another: sparse first, say, then the 2D torus.

    Nothing is lost: the first batches of an epoch that begins with a change (as many as
    `steps_per_execution`) still go by the old scheme, which sends densely all that it has kept. Then the
    step is traced anew. Put it before `Checkpoint`: a resumed run goes on with the scheme it was in.

    Args:
      schedule: Epoch -> scheme, as `DistributedOptimizer` takes it; it must begin at epoch 0.

    Raises:
      ValueError: If the schedule is empty, does not begin at 0, or has an unknown scheme; in `fit`, if the
        model's optimizer is no DistributedOptimizer.

    Source: Shi et al. 2021 (CommLib), section 5.6: MSTopK at the lower resolutions, then 2D torus.

    >>> import keras_callbacks
    >>> callback = keras_callbacks.SchemeSchedule({0: "hitopk", 13: "2dtar"})
    """

    def __init__(self, schedule: Mapping[int, Any]) -> None:
        super().__init__()
        self.schedule = {epoch: policies.parse(scheme) for epoch, scheme in sorted(schedule.items())}
        if min(self.schedule, default=None) != 0:
            raise ValueError(
                f"`schedule` must say by which scheme epoch 0 goes. Received: epochs {list(self.schedule)}"
            )
        self._next: policies.Policy | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        if not isinstance(optimizer, DistributedOptimizer):
            raise ValueError(
                f"SchemeSchedule needs a DistributedOptimizer. Received: {type(optimizer).__name__}. "
                "Compile the model with tp.DistributedOptimizer(...)."
            )
        optimizer.restores_scheme = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        wanted = self.schedule[max(start for start in self.schedule if start <= epoch)]
        if wanted == self.model.optimizer.policy:
            return
        runtime.say("tfposeidon: epoch %d goes by %s.", epoch, wanted)
        if self.model.optimizer.flush():
            self._next = wanted
        else:
            self._change(wanted)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._next is not None and not is_passing_over(self.model):
            self._change(self._next)
            self._next = None

    def _change(self, policy: policies.Policy) -> None:
        self.model.optimizer.change_scheme(policy)
        self.model.make_train_function(force=True)

"""Warm-up from the rate of one rank to the rate of all."""

from __future__ import annotations

import keras

from keras_callbacks.learning_rate_schedule import LearningRateSchedule
from tfposeidon import ranges
from tfposeidon.communication import runtime


class LearningRateWarmup(LearningRateSchedule):
    """Raises the rate, batch by batch, from `initial_learning_rate / size` to `initial_learning_rate`.

    Args:
      initial_learning_rate: The rate after warm-up: usually that of one rank times their number.
      warmup_epochs: How long it takes.
      momentum_correction: As in `LearningRateSchedule`.
      steps_per_epoch: As in `LearningRateSchedule`.
      optimizer: As in `LearningRateSchedule`.

    Source: Goyal et al. 2017, section 2.2.
    """

    def __init__(
        self,
        initial_learning_rate: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        optimizer: keras.optimizers.Optimizer | None = None,
    ) -> None:
        ranges.check_number("warmup_epochs", warmup_epochs, ranges.POSITIVE)
        self.warmup_epochs = warmup_epochs
        super().__init__(
            initial_learning_rate,
            self._fraction,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
            optimizer=optimizer,
        )

    def _fraction(self, epoch: float) -> float:
        start = 1.0 / runtime.size()
        return start + (1.0 - start) * min(epoch / self.warmup_epochs, 1.0)

    def _set(self, epoch: float) -> None:
        assert self.steps_per_epoch
        before = epoch - self.model.steps_per_execution / self.steps_per_epoch
        # The first batch after warm-up sets the full rate, unless another schedule has set its own by then.
        if epoch < self.warmup_epochs or (before < self.warmup_epochs and self._holds(before)):
            super()._set(epoch)

    def _holds(self, epoch: float) -> bool:
        """Whether the optimizer has the rate that this callback sets there."""
        rate = self.initial_learning_rate * self._fraction(epoch)
        return abs(float(self.optimizer.learning_rate) - rate) <= 1e-6 * rate

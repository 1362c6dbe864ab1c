"""Increases the learning rate during the first epochs, as large global batches require."""

from __future__ import annotations

from typing import Any

import keras
from typing_extensions import override

from keras_callbacks.learning_rate_schedule import LearningRateSchedule
from tfposeidon import checks
from tfposeidon.communication import runtime


class LearningRateWarmup(LearningRateSchedule):
    """Increases the learning rate linearly from the rate for one rank to the rate for all ranks.

    The rate starts at `initial_learning_rate / size`, where `size` is the number of ranks that
    train, reaches `initial_learning_rate` after `warmup_epochs`, and changes before each batch. At
    the full rate, training is unstable while weights change rapidly. After the warm-up, a
    `LearningRateSchedule` with `start_epoch=warmup_epochs` may set the rate instead.

    Args:
      initial_learning_rate: Rate after the warm-up: usually the rate for one rank times the number
        of ranks.
      warmup_epochs: Length of the warm-up in epochs, above 0 (default 5); fractions are allowed.
      momentum_correction: True (default) to multiply the velocity by the ratio of new to old rate;
        see `LearningRateSchedule`.
      steps_per_epoch: Number of batches per epoch on one rank, required if it is unknown in `fit`.
      optimizer: Optimizer whose rate is set; by default `model.optimizer`.
      **others: Arguments of Horovod's callback, which raise an error that names the replacement.

    Raises:
      TypeError: For unknown arguments.
      ValueError: If `warmup_epochs` is not above 0; otherwise as `LearningRateSchedule`.

    Source: Goyal et al. 2017, section 2.2.

    Example:
      >>> import keras_callbacks, tfposeidon as tp
      >>> rate = 0.1 * tp.size()
      >>> def decay(epoch):
      ...     return 0.1 ** (epoch // 30)
      >>> callbacks = [
      ...     keras_callbacks.LearningRateWarmup(rate, warmup_epochs=5),
      ...     keras_callbacks.LearningRateSchedule(rate, decay, start_epoch=5),
      ... ]
      >>> [callback.multiplier(5) for callback in callbacks]
      [1.0, 1.0]
    """

    def __init__(
        self,
        initial_learning_rate: float | None = None,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        optimizer: keras.optimizers.Optimizer | None = None,
        **others: Any,
    ) -> None:
        checks.check_number("warmup_epochs", warmup_epochs, checks.POSITIVE)
        self.warmup_epochs = warmup_epochs
        super().__init__(
            initial_learning_rate,
            self._fraction,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
            optimizer=optimizer,
            **others,
        )

    def _fraction(self, epoch: float) -> float:
        start = 1.0 / runtime.workers().size
        return start + (1.0 - start) * min(epoch / self.warmup_epochs, 1.0)

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        self._last: float | None = None

    def _before(self, epoch: float) -> float:
        """Returns the fractional epoch at which the previous execution of steps began."""
        if self._last is not None:
            return self._last
        # Compute the value in a resumed run, whose last epoch may have ended within an execution.
        steps, together = self._steps, self.model.steps_per_execution
        last = (steps - 1) // together * together if epoch == self._epoch else -together
        return epoch - (epoch == self._epoch) + last / steps

    @override
    def _set(self, epoch: float) -> None:
        before, self._last = self._before(epoch), epoch
        # The first batch after the warm-up sets the full rate, unless another schedule has already
        # set its own rate.
        if epoch < self.warmup_epochs or (before < self.warmup_epochs and self._is_set(before)):
            super()._set(epoch)

    def _is_set(self, epoch: float) -> bool:
        """Returns whether the optimizer has the rate that this callback sets at `epoch`."""
        rate = self.initial_learning_rate * self._fraction(epoch)
        # Allow for rounding errors, because optimizers store the rate in float32.
        return abs(float(self.optimizer.learning_rate) - rate) <= 1e-6 * rate

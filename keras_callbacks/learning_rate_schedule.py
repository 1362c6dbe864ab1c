"""Sets the learning rate by epoch or by batch, with momentum correction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from tfposeidon import checks
from tfposeidon.communicating import check_no_more_arguments
from tfposeidon.optimizer import DistributedOptimizer
from tfposeidon.optimizers.wrapper import innermost, leaves
from tfposeidon.state.placement import Placement
from tfposeidon.training import session
from tfposeidon.training.entries import optimizers

SAME_RATE = 1e-7
"""Relative difference up to which two learning rates are equal: optimizers store float32."""

HOROVODS = {
    "initial_lr": "use initial_learning_rate",
    "verbose": "leave it out; read the rate from optimizer.learning_rate",
}
"""Arguments of Horovod's learning rate callbacks, and their replacements."""


class LearningRateSchedule(keras.callbacks.Callback):
    """Sets the learning rate to `initial_learning_rate * multiplier(epoch)`.

    Every rank computes the rate independently, so all ranks need this callback with the same
    arguments; `fit` compares their rates after each epoch. At the end of each epoch, the logs
    receive the rate as `learning_rate`.

    Args:
      initial_learning_rate: Rate that the multiplier scales, not negative. It is an argument,
        because the current rate of a resumed optimizer may come from the middle of its schedule.
      multiplier: A number, or a function of the epoch (from 0; fractional without `staircase`).
      start_epoch: First epoch in which the callback sets the rate (default 0).
      end_epoch: First epoch in which the callback no longer sets the rate; `None` (default) to set
        the rate until the end of training.
      staircase: True (default) to change the rate once per epoch; False to change it per batch.
      momentum_correction: True (default) to multiply the velocity by `b / a` when the rate changes
        from `a` to `b` (Goyal et al. 2017, equation 10), because the velocity of Keras's SGD
        includes the rate.
      steps_per_epoch: Number of batches per epoch on one rank, required without `staircase` if
        `fit` cannot determine it.
      optimizer: Optimizer whose learning rate this callback sets (default `model.optimizer`). A
        model with several optimizers needs one callback for each.
      **others: Arguments of Horovod's callback, which raise an error that names the replacement.

    Raises:
      TypeError: For unknown arguments, or without a multiplier.
      ValueError: If `initial_learning_rate` is negative. In `fit`, if the optimizer's rate is a
        schedule, if the steps per epoch are required and unknown, or if the model has several
        optimizers and none is given.

    >>> import keras_callbacks
    >>> halved = keras_callbacks.LearningRateSchedule(0.8, lambda epoch: 0.5 ** (epoch // 30))
    >>> halved.initial_learning_rate * halved.multiplier(60)
    0.2
    """

    def __init__(
        self,
        initial_learning_rate: float | None = None,
        multiplier: float | Callable[[float], float] | None = None,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        optimizer: keras.optimizers.Optimizer | None = None,
        **others: Any,
    ) -> None:
        # Check unknown arguments before the rate: Horovod calls the rate `initial_lr`, and this
        # error names the replacement.
        check_no_more_arguments(type(self).__name__, others, HOROVODS)
        if multiplier is None:
            raise TypeError(
                "`multiplier` must be a number or a function of the epoch. Received: "
                "multiplier=None. Pass 1.0 for a constant rate."
            )
        super().__init__()
        self.initial_learning_rate = checks.check_number(
            "initial_learning_rate", initial_learning_rate, checks.NOT_NEGATIVE
        )
        self.multiplier = multiplier if callable(multiplier) else lambda _: multiplier
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.given_optimizer = optimizer
        self._epoch = self._steps = 0
        self._scaled: list[Any] = []

    @property
    def optimizer(self) -> Any:
        """Optimizer whose rate is set."""
        given = self.given_optimizer
        return session.without_loss_scale(self.model.optimizer if given is None else given)

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        self._check_optimizer()
        if self.staircase:
            return
        # Determine the number of steps for each `fit`, because the next `fit` may have other data.
        self._steps = self.steps_per_epoch or self.params.get("steps") or 0
        if not self._steps:
            raise ValueError(
                "staircase=False requires the number of steps per epoch, because the rate changes "
                f"within epochs. Received: steps_per_epoch={self.steps_per_epoch} and data of "
                "unknown length. Pass steps_per_epoch."
            )

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        if self.staircase:
            self._set(epoch)

    @override
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        # Skip the batches of a resumed epoch that were trained on before, because the restored
        # state includes their rates.
        if not self.staircase and not session.of(self.model).is_skipping:
            self._set(self._epoch + batch / self._steps)

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["learning_rate"] = float(self.optimizer.learning_rate)

    def _check_optimizer(self) -> None:
        count = len(optimizers(self.model))
        if self.given_optimizer is None and (
            count > 1 or self.optimizer not in optimizers(self.model)
        ):
            raise ValueError(
                "`optimizer` must be given if a model has several optimizers. Received: a model "
                f"with several optimizers, of which {count} communicate, and optimizer=None. Use "
                "one LearningRateSchedule or LearningRateWarmup with optimizer=... for each."
            )
        if len(leaves(self.optimizer)) > 1:
            raise ValueError(
                f"{type(self).__name__} can set the learning rate of only one optimizer. Received: "
                f"an optimizer that contains {len(leaves(self.optimizer))} others. Remove the "
                "callback, and create each inner optimizer with a schedule from "
                "keras.optimizers.schedules as learning_rate."
            )
        # Keras's public `learning_rate` would return the value of a schedule, not the schedule.
        rate = innermost(self.optimizer)._learning_rate
        if not isinstance(rate, keras.Variable):
            raise ValueError(
                f"{type(self).__name__} requires an optimizer whose learning rate is a number. "
                f"Received: learning_rate={rate!r}. Create the optimizer with a number, or remove "
                "the callback."
            )

    def _set(self, epoch: float) -> None:
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        optimizer = self.optimizer
        old = float(optimizer.learning_rate)
        new = float(self.initial_learning_rate * self.multiplier(epoch))
        if abs(new - old) <= SAME_RATE * max(abs(old), abs(new)):
            return
        optimizer.learning_rate = new
        # A velocity accumulated at rate 0 is 0, and needs no correction.
        if self.momentum_correction and old > 0:
            self._multiply(_velocities(optimizer), new / old)

    def _multiply(self, variables: list[Any], factor: float) -> None:
        if not variables:
            return
        # The variables change when an optimizer is built or changes its scheme.
        if list(map(id, variables)) != list(map(id, self._scaled)):
            self._scaled = variables

            # Use a graph, because eager execution would run two ops per variable and batch.
            @tf.function(autograph=False)
            def scale(factor: tf.Tensor) -> None:
                for variable in variables:
                    variable.assign(variable * tf.cast(factor, variable.dtype))

            self._scale = scale.get_concrete_function(tf.TensorSpec([], tf.float64))
        self._scale(tf.constant(factor, tf.float64))


def _velocities(optimizer: Any) -> list[Any]:
    """Returns the velocities of an optimizer and of its schemes, if they include the rate."""
    inner = innermost(optimizer)
    # The velocities of Muon do not include the rate.
    own = [] if isinstance(inner, keras.optimizers.Muon) else getattr(inner, "momentums", [])
    # Variables that gradients overwrite have no velocity.
    velocities = [velocity for velocity in own if velocity is not None]
    if isinstance(optimizer, DistributedOptimizer):
        # Schemes that apply momentum before selection, such as `HiTopK(momentum=0.9)`, have partial
        # velocities. State with this name and another placement is a shard of the inner optimizer's
        # state: Adam calls its second moments "velocity".
        velocities += [
            variable
            for variable, part in optimizer.rank_state
            if part.name == "velocity" and part.placement == Placement.PARTIAL
        ]
    return velocities

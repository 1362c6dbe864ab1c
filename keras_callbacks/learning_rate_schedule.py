"""Learning rates by epoch or by batch, with momentum correction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_callbacks._model_state import optimizers
from tfposeidon.optimizer import DistributedOptimizer
from tfposeidon.optimizers.wrapping import innermost
from tfposeidon.training import session


class LearningRateSchedule(keras.callbacks.Callback):
    """Sets the learning rate to `initial_learning_rate * multiplier(epoch)`.

    Args:
      initial_learning_rate: What the multiplier multiplies. It is asked for, and not read from the
        optimizer, because a resumed optimizer is in the middle of its schedule.
      multiplier: A number, or a function of the epoch: whole epochs with `staircase`, else fractions.
      start_epoch: The first epoch in which the schedule holds.
      end_epoch: The first in which it no longer does; by default it holds to the end.
      staircase: Adjust once per epoch instead of at every batch.
      momentum_correction: Keras's SGD keeps the rate inside its velocity. When the rate changes from
        a to b, the velocity is multiplied by b / a (Goyal et al. 2017, eq. 10).
      steps_per_epoch: Needed without `staircase` where `fit` does not know it.
      optimizer: Whose rate it is; by default `model.optimizer`. For models with several, give each a callback.

    Raises:
      ValueError: If the optimizer's rate is a schedule, the steps per epoch are not known, or the model has several
        optimizers and none is given.
    """

    def __init__(
        self,
        initial_learning_rate: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        optimizer: keras.optimizers.Optimizer | None = None,
    ) -> None:
        super().__init__()
        if initial_learning_rate < 0:
            raise ValueError(
                f"`initial_learning_rate` must not be negative. Received: initial_learning_rate={initial_learning_rate}"
            )
        self.initial_learning_rate = initial_learning_rate
        self.multiplier = multiplier if callable(multiplier) else lambda _: multiplier
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.given_optimizer = optimizer
        self._epoch = 0

    @property
    def optimizer(self) -> Any:
        """Whose rate is set."""
        return self.model.optimizer if self.given_optimizer is None else self.given_optimizer

    def on_train_begin(self, logs: Any = None) -> None:
        count = len(optimizers(self.model))
        if self.given_optimizer is None and (
            count > 1 or self.model.optimizer not in optimizers(self.model)
        ):
            raise ValueError(
                f"The callback has to know whose rate it sets. Received: a model with {count} DistributedOptimizer(s) "
                "beside its own `optimizer`. Pass optimizer=..., and one callback for each."
            )
        rate = innermost(self.optimizer)._learning_rate
        if not isinstance(rate, keras.Variable):
            raise ValueError(
                "A callback can only set a plain learning rate. Received: an optimizer whose learning_rate is "
                f"{rate!r}. Give the optimizer a number, or leave the callback out."
            )
        if self.staircase:
            return
        self.steps_per_epoch = self.steps_per_epoch or self.params.get("steps")
        if not self.steps_per_epoch:
            raise ValueError(
                "Without `staircase` the rate changes by fractions of an epoch. Received: data of unknown length. "
                "Pass steps_per_epoch."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        if self.staircase:
            self._set(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        # A resumed epoch's first batches were trained on before, and their rates are in the state.
        if not self.staircase and not session.of(self.model).is_skipping:
            assert self.steps_per_epoch
            self._set(self._epoch + batch / self.steps_per_epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["learning_rate"] = float(self.optimizer.learning_rate)

    def _set(self, epoch: float) -> None:
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        optimizer = self.optimizer
        old, new = (
            float(optimizer.learning_rate),
            float(self.initial_learning_rate * self.multiplier(epoch)),
        )
        if abs(new - old) <= 1e-7 * max(abs(old), abs(new)):
            return
        optimizer.learning_rate = new
        # A velocity made at rate 0 is 0, and stays right without correction.
        if self.momentum_correction and old > 0:
            _scale(_velocities(optimizer), new / old)


def _velocities(optimizer: Any) -> list[Any]:
    """Those of the optimizer, and of schemes that apply momentum before they select (`HierarchicalTopK(momentum=0.9)`).

    Schemes keep theirs so that it follows the rate as Keras's does: see `tfposeidon.exchange.effective_rate`.
    """
    velocities = list(getattr(innermost(optimizer), "momentums", []))
    if isinstance(optimizer, DistributedOptimizer):
        pairs = zip(optimizer.rank_variables, optimizer.rank_pieces, strict=True)
        velocities += [variable for variable, piece in pairs if piece.name == "velocity"]
    return velocities


def _scale(variables: list[Any], factor: float) -> None:
    for variable in variables:
        variable.assign(variable * tf.cast(factor, variable.dtype))

"""Train functions that take the place of a model's own for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras


class SkipBatches:
    """Train function that drops the first batches of an epoch instead of training on them.

    Keras has no hook between reading a batch and training on it, so the function it calls is
    replaced. After the last dropped batch the model gets its own train function back.

    Args:
      model: Model that is about to be trained; its train function must have been made.
      batches: Number of batches to drop; with `steps_per_execution` a multiple of it.

    Attributes:
      remaining: Batches still to drop.
      train: The model's own train function.
    """

    def __init__(self, model: keras.Model, batches: int) -> None:
        self.model = model
        self.remaining = batches
        self.train: Callable[[Any], Any] = model.train_function

    def __call__(self, iterator: Any) -> Any:
        """Drops the batches of one execution; trains once all are dropped.

        Args:
          iterator: Iterator over the epoch's batches, as Keras gives it to a train function.

        Returns:
          Logs of the train function, or `{}`, logs without metrics, for dropped batches.
        """
        if self.remaining <= 0:
            self.model.train_function = self.train
            return self.train(iterator)
        for _ in range(self.model.steps_per_execution):
            next(iterator)
        self.remaining -= self.model.steps_per_execution
        return {}


class OutsideOfFit:
    """Train function for batches after a `fit` with equal batches: it traces the step again.

    The next `fit` goes on with the model's own, which need not be traced again.

    Args:
      model: Model whose `fit` ends.

    Attributes:
      train: The model's own train function.
    """

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        self.train: Callable[[Any], Any] = model.train_function

    def __call__(self, iterator: Any) -> Any:
        """Trains on the batches of one execution, of any number of rows; returns their logs."""
        self.model.make_train_function(force=True)
        return self.model.train_function(iterator)

"""Batches of a resumed epoch that were trained on before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras


class SkipBatches:
    """Stands in for the train function while batches of the epoch were already trained on.

    Args:
      model: Its train function comes back after so many `batches`.
    """

    def __init__(self, model: keras.Model, batches: int) -> None:
        self.model = model
        self.remaining = batches
        self.train: Callable[[Any], Any] = model.train_function

    def __call__(self, iterator: Any) -> Any:
        """Takes batches from the iterator and drops them; when all are, trains."""
        if self.remaining <= 0:
            self.model.train_function = self.train
            return self.train(iterator)
        for _ in range(self.model.steps_per_execution):
            next(iterator)
        self.remaining -= self.model.steps_per_execution
        return {}

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
        self.left = batches
        self.train: Callable[[Any], Any] = model.train_function

    def __call__(self, iterator: Any) -> Any:
        """Takes batches from the iterator and drops them; when all are, trains."""
        if self.left <= 0:
            self.model.train_function = self.train
            return self.train(iterator)
        for _ in range(self.model.steps_per_execution):
            next(iterator)
        self.left -= self.model.steps_per_execution
        return {}


def retrace(model: keras.Model) -> None:
    """Makes the train function anew; batches that are to be passed over still are."""
    passing = model.train_function if isinstance(model.train_function, SkipBatches) else None
    model.make_train_function(force=True)
    if passing is not None:
        passing.train, model.train_function = model.train_function, passing


def is_skipping(model: keras.Model) -> bool:
    """True while batches of a resumed epoch are read without training on them."""
    return isinstance(model.train_function, SkipBatches) and model.train_function.left > 0

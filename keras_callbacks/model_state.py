"""The variables that make up a model in training."""

from __future__ import annotations

from typing import Any

import keras


def replicated_variables(model: keras.Model) -> list[Any]:
    """Weights and optimizer state: what exchanges keep equal on all ranks.

    Raises:
      RuntimeError: If the model has no weights yet.
    """
    if not model.built:
        raise RuntimeError(
            "This callback needs the model's weights when training begins. Received: a model that is not built, and "
            "data that do not tell their shapes. Call the model on one batch, or model.build(input_shape), before fit."
        )
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return [*model.trainable_variables, *model.optimizer.variables]

"""Optimizers, replicated variables and samples seen of a model in training."""

from __future__ import annotations

from typing import Any

import keras

from tfposeidon.training.session import optimizers_of


def optimizers(model: keras.Model) -> list[Any]:
    """Returns a model's `DistributedOptimizer`s, or else the optimizer it was compiled with.

    Args:
      model: A compiled model.
    """
    return optimizers_of(model) or [model.optimizer]


def replicated_variables(model: keras.Model) -> list[Any]:
    """Returns weights and optimizer state, which exchanges keep equal on all ranks.

    Args:
      model: A compiled model; an only optimizer that is not built yet is built.

    Raises:
      RuntimeError: If the model has no weights yet.
    """
    if not _has_weights(model):
        raise RuntimeError(
            "This callback needs the model's weights when training begins. Received: a model that "
            "is not built, and data that do not tell their shapes. Call the model on one batch, or "
            "model.build(input_shape), before fit."
        )
    found = optimizers(model)
    # Which of several optimizers trains which variables is known only in their first step.
    if found == [model.optimizer] and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return [
        *model.trainable_variables,
        *(variable for optimizer in found for variable in optimizer.variables),
    ]


def trained_variables(optimizer: Any) -> list[Any]:
    """Returns the variables that an optimizer was built for.

    Args:
      optimizer: A built optimizer.
    """
    # Keras has no public name for them.
    return list(optimizer._trainable_variables)


def samples_seen(model: keras.Model) -> float | None:
    """Returns the samples since Keras last reset its loss tracker; `None` without a tracker.

    Args:
      model: A compiled model, in `fit` or `evaluate`.
    """
    # Keras weighs each batch's loss by its samples, so that the sum of weights is their number.
    tracker = next((metric for metric in model.metrics if metric.name == "loss"), None)
    return None if tracker is None else float(tracker.count.numpy())


def _has_weights(model: keras.Model) -> bool:
    # Models without a call of their own, such as GANs, are never built, though their parts are.
    return model.built or (bool(model.layers) and all(layer.built for layer in model.layers))

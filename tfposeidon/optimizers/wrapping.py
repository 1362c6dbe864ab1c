"""Keras optimizers that hold another one."""

from __future__ import annotations

from typing import Any

import keras


def innermost(optimizer: Any) -> Any:
    """Returns the optimizer inside wrappers that have an `inner_optimizer`.

    Args:
      optimizer: A Keras optimizer, wrapped any number of times: in `DistributedOptimizer`, or in
        Keras's `LossScaleOptimizer`.

    >>> import keras
    >>> sgd = keras.optimizers.SGD()
    >>> innermost(keras.optimizers.LossScaleOptimizer(sgd)) is sgd
    True
    """
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def class_names(optimizer: Any) -> list[str]:
    """Returns the names of an optimizer's class, and of the class of the one inside wrappers.

    Args:
      optimizer: A Keras optimizer, wrapped or not.
    """
    return [type(optimizer).__name__, type(innermost(optimizer)).__name__]


def reset_slots(optimizer: Any) -> None:
    """Makes an optimizer begin with new slots, such as velocities; rates and counters stay.

    Args:
      optimizer: A built Keras optimizer, wrapped or not.
    """
    for variable in optimizer.variables:
        # Scalars are rates, scales and counters.
        if keras.backend.is_float_dtype(variable.dtype) and len(variable.shape):
            variable.assign(keras.ops.zeros_like(variable))

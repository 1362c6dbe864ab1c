"""Keras optimizers that hold another one."""

from __future__ import annotations

from typing import Any


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

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


def slots(optimizer: Any) -> list[Any]:
    """Returns what an optimizer has gathered over its steps, such as velocities.

    They are floating-point variables, and belong to a number of steps, by which optimizers such as
    Adam correct their bias. Learning rates and loss scales are not among them.

    Args:
      optimizer: A built Keras optimizer, wrapped or not.

    >>> import keras
    >>> adam = keras.optimizers.Adam()
    >>> adam.build([keras.Variable([1.0, 2.0], name="weight")])
    >>> [slot.name for slot in slots(adam)]
    ['weight_momentum', 'weight_velocity']
    """
    rule = innermost(optimizer)
    return [
        variable
        for variable in rule.variables
        if keras.backend.is_float_dtype(variable.dtype) and variable is not rule._learning_rate
    ]


def rates(optimizer: Any) -> list[Any]:
    """Returns the variable of the learning rate; none where a schedule or a function gives it.

    Args:
      optimizer: A Keras optimizer, wrapped or not.

    >>> import keras
    >>> [rate.name for rate in rates(keras.optimizers.SGD(0.1))]
    ['learning_rate']
    """
    rate = innermost(optimizer)._learning_rate
    return [rate] if isinstance(rate, keras.Variable) else []


def step_counter(optimizer: Any) -> Any:
    """Returns the variable that counts an optimizer's steps, those included that accumulate.

    Args:
      optimizer: A Keras optimizer, wrapped or not.
    """
    # `iterations` is no variable where an optimizer accumulates gradients.
    return innermost(optimizer)._iterations


def reset_slots(optimizer: Any) -> None:
    """Makes an optimizer begin with new slots, such as velocities; rates and counters stay.

    Args:
      optimizer: A built Keras optimizer, wrapped or not.

    >>> import keras
    >>> adagrad = keras.optimizers.Adagrad(initial_accumulator_value=0.5)
    >>> adagrad.build([keras.Variable(1.0, name="scale")])
    >>> _ = slots(adagrad)[0].assign(7.0)
    >>> reset_slots(adagrad)
    >>> float(slots(adagrad)[0])
    0.5
    """
    rule = innermost(optimizer)
    # Those of Adagrad and Ftrl, which divide by them.
    accumulators = {id(variable) for variable in getattr(rule, "_accumulators", [])}
    # Of Nadam: a product over its steps, which go on.
    product = getattr(rule, "_u_product", None)
    for variable in slots(optimizer):
        if variable is product:
            continue
        is_accumulator = id(variable) in accumulators
        begin = getattr(rule, "initial_accumulator_value", 0.0) if is_accumulator else 0.0
        variable.assign(keras.ops.full_like(variable, begin))

"""Inspects nested optimizers, and defines the base class of optimizers that wrap another one.

The base class does not communicate. Through the base class, Keras reads the inner optimizer's step
counter, reads and sets its learning rate, and saves the inner optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfposeidon.gradients import indices_of, of_tensorflow, path_of

_RATE, _COUNTER = "learning_rate", "iteration"
"""Names that Keras gives the variables of an optimizer's learning rate and of its step counter."""
_Simple = bool | int | float | str | None


def innermost(optimizer: Any) -> Any:
    """Returns the optimizer inside any number of wrappers that have an `inner_optimizer`.

    >>> import keras
    >>> sgd = keras.optimizers.SGD()
    >>> innermost(keras.optimizers.LossScaleOptimizer(sgd)) is sgd
    True
    """
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def leaves(optimizer: Any) -> list[Any]:
    """Returns the nested optimizers that contain no other optimizers, or the optimizer itself."""
    # Inner optimizers are attributes, or items of attributes that are lists or dictionaries, as in
    # Keras's `LossScaleOptimizer` and `MultiOptimizer`, and in composite optimizers of users.
    inside: list[Any] = []
    for value in vars(optimizer).values():
        items = [*value.values()] if isinstance(value, Mapping) else value
        inside += items if isinstance(items, list | tuple) else [value]
    others = [one for one in inside if isinstance(one, keras.optimizers.Optimizer)]
    found = [leaf for one in others if one is not optimizer for leaf in leaves(one)] or [optimizer]
    return list({id(leaf): leaf for leaf in found}.values())


def leave_out_replica_sum(optimizer: Any) -> None:
    """Disables Keras's sum over replicas, because `tf.distribute` is not supported."""
    # Keras's method joins all gradients, so that the first update, or gather from shard owners,
    # would wait for the last exchange. It also registers a gradient function permanently, which
    # references the graph of each traced step.
    for leaf in leaves(optimizer):
        leaf._all_reduce_sum_gradients = list


def accumulated_steps(optimizer: Any) -> int | None:
    """Returns the number of gradient accumulation steps; `None` if nested optimizers differ.

    >>> import keras
    >>> accumulated_steps(keras.optimizers.SGD(gradient_accumulation_steps=4))
    4
    """
    found = {leaf.gradient_accumulation_steps for leaf in leaves(optimizer)}
    return found.pop() if len(found) == 1 else None


def settings(optimizer: Any, prefix: str = "optimizer") -> dict[str, Any]:
    """Returns class and configuration of an optimizer, without names, as a flat dict for JSON.

    >>> import keras
    >>> found = settings(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5)))
    >>> found["optimizer"], found["optimizer.inner_optimizer.learning_rate"]
    ('LossScaleOptimizer', 0.5)
    """
    # Read values outside of the traced step, because learning rates are variables.
    with tf.init_scope():
        return dict(_flat(prefix, _class_and_config(optimizer)))


def _class_and_config(value: Any) -> dict[str, Any]:
    try:
        config = value.get_config()
    except Exception:  # noqa: BLE001, because `get_config` of users' classes may raise any error
        config = {k: v for k, v in vars(value).items() if k[0] != "_" and isinstance(v, _Simple)}
    # Keras's optimizers include inner optimizers in their configuration; users' own may not.
    saves_others = not config.keys().isdisjoint(("inner_optimizer", "optimizer_map"))
    if isinstance(value, keras.optimizers.Optimizer) and not saves_others:
        inside = [one for one in leaves(value) if one is not value]
        config |= {f"part {place}": one for place, one in enumerate(inside)}
    return {"class_name": type(value).__name__, "config": config}


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields names and values of a configuration that Keras serialized."""
    if hasattr(value, "get_config"):
        value = _class_and_config(value)
    if isinstance(value, Mapping):
        if "class_name" in value:
            yield name, value["class_name"]
            config = value.get("config")
            # The configuration of a function is its name, or its code if it has no name. Leave out
            # code, because it is not comparable between ranks.
            value = config if isinstance(config, Mapping) else {"function": config}
        for key, item in value.items():
            if key not in ("name", "code"):
                yield from _flat(f"{name}.{key}", item)
    elif isinstance(value, list | tuple) and not all(isinstance(item, _Simple) for item in value):
        for index, item in enumerate(value):
            yield from _flat(f"{name}.{index}", item)
    else:
        yield name, _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, _Simple):
        return value
    if isinstance(value, list | tuple):
        return list(value)
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    try:
        return np.asarray(value).tolist()
    except (TypeError, ValueError):
        return type(value).__name__


def slots(optimizer: Any) -> list[Any]:
    """Returns a built optimizer's state: its floating-point variables, except learning rates."""
    # Optimizers such as Adam correct the bias of this state with their step counter, so the state
    # is valid only for one value of the counter.
    found = [v for leaf in leaves(optimizer) for v in leaf.variables if v.name != _RATE]
    return [v for v in found if keras.backend.is_float_dtype(v.dtype)]


def rates(optimizer: Any) -> list[Any]:
    """Returns the variables that store learning rates; none for a schedule or a function."""
    return [v for leaf in leaves(optimizer) for v in leaf.variables if v.name == _RATE]


def step_counter(optimizer: Any) -> Any:
    """Returns the variable that counts an optimizer's steps, including those that accumulate."""
    found = leaves(optimizer)
    # Some optimizers of a `MultiOptimizer` may train nothing, and are not built.
    counting = next((leaf for leaf in found if leaf.built), found[0])
    # `iterations` is not a variable if an optimizer accumulates gradients.
    return next(variable for variable in counting.variables if variable.name == _COUNTER)


def reset_slots(optimizer: Any) -> None:
    """Resets a built optimizer's state, such as velocities, but not learning rates or counters.

    >>> import keras
    >>> adagrad = keras.optimizers.Adagrad(initial_accumulator_value=0.5)
    >>> adagrad.build([keras.Variable(1.0, name="scale")])
    >>> _ = slots(adagrad)[0].assign(7.0)
    >>> reset_slots(adagrad)
    >>> float(slots(adagrad)[0])
    0.5
    """
    for leaf in leaves(optimizer):
        # Adagrad and Ftrl divide by these accumulators, so they do not start at 0.
        accumulators = {id(variable) for variable in getattr(leaf, "_accumulators", [])}
        start = getattr(leaf, "initial_accumulator_value", 0.0)
        for variable in slots(leaf):
            # Do not reset Nadam's product over its steps, because the step counter is not reset.
            if variable is not getattr(leaf, "_u_product", None):
                value = start if id(variable) in accumulators else 0.0
                variable.assign(keras.ops.full_like(variable, value))


class OptimizerWrapper(keras.optimizers.Optimizer):
    """Keras optimizer that delegates step counter, learning rate and saving to an inner one."""

    built: bool
    _indices: dict[Any, int]
    _serialized: ClassVar[tuple[str, ...]] = ("inner_optimizer",)
    """Arguments in `get_config` that are objects serialized by Keras."""

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        gradient_accumulation_steps: int | None,
        name: str,
    ) -> None:
        super().__init__(
            # This rate is unused: the property `learning_rate` returns the inner optimizer's rate.
            learning_rate=0.0,
            gradient_accumulation_steps=gradient_accumulation_steps,
            name=name,
        )
        self.inner_optimizer = inner_optimizer

    def _adopt(self, variables: Sequence[Any]) -> None:
        """Finishes `build` after the inner optimizer is built: sets attributes that Keras reads."""
        leave_out_replica_sum(self.inner_optimizer)
        # Bypass Keras's `build`, which would create accumulators for this wrapper, too, and Keras's
        # attribute tracking, which would add the weights to this optimizer's variables.
        self.__dict__["_trainable_variables"] = list(variables)
        self.__dict__["_indices"] = indices_of(variables)
        self.built = True

    def _index_of(self, variable: Any) -> int:
        index = self._indices.get(of_tensorflow(variable).ref())
        if index is None:
            raise ValueError(
                "apply requires the variables that the optimizer was built with. Received: the "
                f"unknown variable {path_of(variable)!r}. Construct another optimizer for other "
                "variables."
            )
        return index

    @property
    @override
    def iterations(self) -> Any:
        return self.inner_optimizer.iterations

    @property
    @override
    def learning_rate(self) -> Any:
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    @property
    def _model_variables_moving_average(self) -> list[Any]:
        """Moving averages of weights, which `SwapEMAWeights` reads here under a loss scale."""
        return list(innermost(self)._model_variables_moving_average)

    @property
    def optimizers(self) -> list[keras.optimizers.Optimizer]:
        """Optimizers of an inner `MultiOptimizer`, whose rates Keras's callbacks set separately."""
        return list(innermost(self).optimizers)

    @override
    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Self:
        """Creates an optimizer from the result of `get_config`; needs no Horovod or launcher."""
        objects: dict[str, Any] = {
            key: keras.saving.deserialize_keras_object(config[key], custom_objects=custom_objects)
            for key in cls._serialized
            if key in config
        }
        return cls(**(config | objects))

    @override
    def set_weights(self, weights: Sequence[Any]) -> None:
        """Assigns arrays to the inner optimizer's `variables`, in their order."""
        if not self.built:
            raise ValueError(
                "The optimizer must be built before its weights are set. Received: an optimizer "
                "that is not built. Call fit, or optimizer.build(model.trainable_variables), first."
            )
        wanted = [tuple(variable.shape) for variable in self.variables]
        given = [tuple(array.shape) for array in weights]
        if wanted != given:
            raise ValueError(
                "`weights` must contain one array for each of the optimizer's variables, with "
                f"shapes {wanted}. Received: shapes {given}. Pass the values of `variables` of an "
                "optimizer of the same kind."
            )
        for variable, array in zip(self.variables, weights, strict=True):
            variable.assign(array)

    @override
    def save_own_variables(self, store: Any) -> None:
        """Saves nothing: Keras saves the inner optimizer as a part of this one."""

    @override
    def load_own_variables(self, store: Any) -> None:
        """Loads nothing: Keras loads the inner optimizer as a part of this one."""

    @override
    def apply_gradients(self, grads_and_vars: Iterable[Any], sample_count: Any = None) -> Any:
        """Performs one step as `apply` does, with pairs of gradients and variables.

        Args:
          grads_and_vars: Pairs of a gradient and its variable.
          sample_count: Number of samples of the gradients on this rank; see `apply`.

        Returns:
          Number of updates so far.
        """
        pairs = list(grads_and_vars)
        self.apply([gradient for gradient, _ in pairs], [v for _, v in pairs], sample_count)
        return self.iterations

    @override
    def scale_loss(self, loss: Any) -> Any:
        """Multiplies a loss by the inner optimizer's `loss_scale_factor`, if it has one."""
        return self.inner_optimizer.scale_loss(loss)

    @override
    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Finalizes variables at the end of `fit` as the inner optimizer does."""
        self.inner_optimizer.finalize_variable_values(var_list)

    @override
    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Excludes variables from the inner optimizer's weight decay; call it before `build`."""
        for leaf in leaves(self.inner_optimizer):
            leaf.exclude_from_weight_decay(var_list, var_names)

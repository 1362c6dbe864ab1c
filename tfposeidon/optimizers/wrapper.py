"""Base class of optimizers that contain another one, as Keras sees them.

Think of it as the half of a wrapper that exchanges nothing: Keras reads and sets the counter and
the learning rate of the optimizer inside, and saves that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Self

import keras
from typing_extensions import override

from tfposeidon.gradients.description import indices_of, of_tensorflow, path_of
from tfposeidon.optimizers.wrapping import innermost, leave_out_replica_sum, leaves


class OptimizerWrapper(keras.optimizers.Optimizer):
    """Keras optimizer whose counter, learning rate and saving are those of an inner optimizer."""

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
            # Unused: the property `learning_rate` is that of the inner optimizer.
            learning_rate=0.0,
            gradient_accumulation_steps=gradient_accumulation_steps,
            name=name,
        )
        self.inner_optimizer = inner_optimizer

    def _adopt(self, variables: Sequence[Any]) -> None:
        """Finishes `build` after the inner optimizer is built, with Keras's bookkeeping."""
        leave_out_replica_sum(self.inner_optimizer)
        # Bypass Keras's `build`, which would create accumulators for this wrapper too, and its
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
        """Averages of weights, which `SwapEMAWeights` reads here under a loss scale."""
        averages: list[Any] = innermost(self)._model_variables_moving_average
        return averages

    @property
    def optimizers(self) -> list[keras.optimizers.Optimizer]:
        """Optimizers of a `MultiOptimizer` inside, whose rates Keras's callbacks set separately."""
        found: list[keras.optimizers.Optimizer] = innermost(self).optimizers
        return found

    @override
    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Self:
        """Returns an optimizer from the result of `get_config`, without Horovod or a launcher."""
        objects: dict[str, Any] = {
            key: keras.saving.deserialize_keras_object(config[key], custom_objects=custom_objects)
            for key in cls._serialized
            if key in config
        }
        return cls(**{**config, **objects})

    @override
    def set_weights(self, weights: Sequence[Any]) -> None:
        """Assigns arrays to `variables`, those of the inner optimizer, in their order."""
        if not self.built:
            raise ValueError(
                "The optimizer must be built before its weights are set. Received: an optimizer "
                "that is not built. Call fit, or optimizer.build(model.trainable_variables), "
                "first."
            )
        wanted, given = (
            [tuple(array.shape) for array in arrays] for arrays in (self.variables, weights)
        )
        if wanted != given:
            raise ValueError(
                "`weights` must hold one array for each of the optimizer's variables, with "
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
        grads, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        self.apply(grads, variables, sample_count)
        return self.iterations

    @override
    def scale_loss(self, loss: Any) -> Any:
        """Multiplies a loss by the inner optimizer's `loss_scale_factor`, if it has one."""
        return self.inner_optimizer.scale_loss(loss)

    @override
    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Ends `fit` as the inner optimizer does."""
        self.inner_optimizer.finalize_variable_values(var_list)

    @override
    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Excludes variables from the inner weight decay; must be called before `build`."""
        for leaf in leaves(self.inner_optimizer):
            leaf.exclude_from_weight_decay(var_list, var_names)

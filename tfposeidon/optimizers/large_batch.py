"""LARS and LAMB: SGD and Adam with a learning rate per layer, for large batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from tfposeidon.checks import BELOW_1, NOT_NEGATIVE, POSITIVE, check_flag, check_number
from tfposeidon.optimizers.layer_wise import Exclude, LayerWiseOptimizer


@keras.saving.register_keras_serializable(package="tfposeidon")
class LARS(LayerWiseOptimizer):
    """LARS: SGD with momentum and layer-wise adaptive rates, for large batches.

    For each variable with weights `w` and gradient `g`, and learning rate `lr`::

        ratio    = trust_coefficient |w| / (|g| + weight_decay |w| + epsilon)    "sum_of_norms"
        ratio    = trust_coefficient |w| / (|g + weight_decay w| + epsilon)      "norm_of_sum"
        step     = lr ratio (g + weight_decay w)
        velocity = momentum velocity - step
        w        = w + velocity, or with `nesterov` w + momentum velocity - step

    The ratio is 1, without the coefficient, if `|w|` or `|g|` is 0; with "norm_of_sum", if `|w|` or
    `|g + weight_decay w|` is 0. The learning rate is inside the velocity: a change of the rate
    applies to new steps, not to the accumulated velocity.

    Args:
      learning_rate: A number, a Keras schedule, or a function without arguments. As the ratio
        includes `trust_coefficient`, rates are much higher than for SGD: 1 to 30 in the papers.
      momentum: Decay of the velocity, in [0, 1) (default 0.9); 0 disables it.
      nesterov: True for Nesterov momentum (default False); requires momentum.
      trust_coefficient: Maximum change of a layer in a step at rate 1, as a fraction of the layer's
        norm, above 0 (default 0.001).
      weight_decay: Weight decay inside both ratio and step, 0 or more (default 0). Keras's
        decoupled decay is disabled.
      exclude: Variables with ratio 1 and without decay, which are updated as by SGD at the learning
        rate. `None` (default) excludes biases and parameters of normalization layers, that is,
        variables with at most one axis, or whose path ends in the word "bias", "gamma" or "beta". A
        list contains regular expressions to search in the path ("dense/kernel"); `[]` excludes
        nothing.
      ratio: "sum_of_norms" (default, as in the papers) or "norm_of_sum" (as in optax.lars), see
        above.
      epsilon: Term added to the denominator of the ratio, 0 or more (default 0).
      parallel: Whether, inside `DistributedOptimizer`, each rank computes the norms of only some
        layers and receives the others. False computes all norms on every rank; "auto" (default)
        uses the faster of both methods, measured once at the first step.
        `DistributedOptimizer.plan` shows the choice.
      **options: Options of `keras.optimizers.Optimizer`: name, clipping, EMA, accumulation, loss
        scale.

    Raises:
      ValueError: If an argument is not in its range.

    State: the velocity, named "momentum" as in Keras's SGD, so that
    `keras_callbacks.LearningRateSchedule` can correct it; float32 for 16-bit variables. Norms are
    computed over whole variables, even if ranks hold shards of variables
    (`tfposeidon.ShardedOptimizer`).

    Memory: in addition to the state, the steps of all variables at once, because all norms are
    computed in one call.

    Source: You, Gitman and Ginsburg 2017, algorithm 1; CommLib (Shi et al. 2021), equation 11.
    Differs: exclusion, as in Paddle and MLPerf; `nesterov`; `epsilon`; and the sign of the
    velocity, as in Keras's SGD.

    >>> import keras
    >>> optimizer = LARS(2.0, weight_decay=1e-4)
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> model.compile(optimizer=optimizer, loss="mse")
    """

    _options = ("momentum", "nesterov", "trust_coefficient", "ratio", "epsilon")

    def __init__(
        self,
        learning_rate: Any,
        momentum: float = 0.9,
        nesterov: bool = False,
        *,
        trust_coefficient: float = 0.001,
        weight_decay: float = 0.0,
        exclude: Exclude = None,
        ratio: str = "sum_of_norms",
        epsilon: float = 0.0,
        parallel: bool | str = "auto",
        **options: Any,
    ) -> None:
        super().__init__(
            learning_rate, weight_decay=weight_decay, exclude=exclude, parallel=parallel, **options
        )
        self.momentum = check_number("momentum", momentum, BELOW_1, "Use 0.9, or 0.0 for none.")
        self.nesterov = check_flag("nesterov", nesterov, "Leave it out for False.")
        if nesterov and not self.momentum:
            raise ValueError(
                "`nesterov` requires momentum. Received: nesterov=True, "
                f"momentum={self.momentum}. Use momentum=0.9, or leave nesterov out."
            )
        remedy = "Use 0.001, or exclude variables from the ratio."
        self.trust_coefficient = check_number(
            "trust_coefficient", trust_coefficient, POSITIVE, remedy
        )
        if ratio not in ("sum_of_norms", "norm_of_sum"):
            raise ValueError(
                f'`ratio` must be "sum_of_norms" or "norm_of_sum". Received: ratio={ratio!r}. '
                'Leave it out for "sum_of_norms", the form in the papers.'
            )
        self.ratio = ratio
        self.epsilon = check_number("epsilon", epsilon, NOT_NEGATIVE, "Use 0.0 for none.")

    @override
    def _build_state(self, variables: Sequence[Any]) -> None:
        # The attribute must have the same name as in SGD, because callbacks that change the rate
        # find the velocities by this name, and rescale them.
        self.momentums = self._new_state(variables, "momentum")[0] if self.momentum else []

    @override
    def _direction(
        self, gradient: tf.Tensor, value: tf.Tensor, variable: Any
    ) -> tuple[tf.Tensor, tf.Tensor]:
        decay = self._decay_of(variable)
        step = gradient + decay * value if decay else gradient
        return step, step if self.ratio == "norm_of_sum" else gradient

    @override
    def _denominators(self, weights: tf.Tensor, others: tf.Tensor, decays: tf.Tensor) -> tf.Tensor:
        denominators = others if self.ratio == "norm_of_sum" else others + decays * weights
        return denominators + self.epsilon

    @override
    def _move(self, variable: Any, step: tf.Tensor) -> None:
        if not self.momentum:
            super()._move(variable, step)
            return
        kept = self.momentums[self._index_of(variable)]
        velocity = tf.convert_to_tensor(kept) * self.momentum - step
        self.assign(kept, velocity)
        self.assign_add(variable, velocity * self.momentum - step if self.nesterov else velocity)


@keras.saving.register_keras_serializable(package="tfposeidon")
class LAMB(LayerWiseOptimizer):
    """LAMB: layer-wise adaptive moments, for large batches.

    For each variable with weights `w` and gradient `g`, learning rate `lr` and step t = 1, 2, ...::

        m     = beta_1 m + (1 - beta_1) g
        v     = beta_2 v + (1 - beta_2) g^2
        r     = (m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + epsilon) + weight_decay w
        ratio = |w| / |r|, or 1 if |w| or |r| is 0
        w     = w - lr ratio r

    `keras.optimizers.Lamb` has no exclusion, and decays weights before the step, outside the ratio.

    Args:
      learning_rate: A number, a Keras schedule, or a function without arguments (default 0.001).
      beta_1: Decay of the first moment, in [0, 1) (default 0.9).
      beta_2: Decay of the second moment, in [0, 1) (default 0.999).
      epsilon: Term added to the root of the second moment, above 0 (default 1e-6).
      weight_decay: Weight decay inside the step, and therefore inside the ratio, 0 or more (default
        0). Keras's decoupled decay is disabled.
      exclude: Variables with ratio 1 and without decay, which are updated as by Adam. As in `LARS`:
        `None` (default) for biases and parameters of normalization layers, or regular expressions
        to search in the path.
      parallel: Whether, inside `DistributedOptimizer`, each rank computes the norms of only some
        layers and receives the others; "auto" (default) uses the faster method, as in `LARS`.
      **options: Options of `keras.optimizers.Optimizer`: name, clipping, EMA, accumulation, loss
        scale.

    Raises:
      ValueError: If an argument is not in its range.

    State: both moments ("momentum", "velocity"), in the order of Keras's Lamb; float32 for 16-bit
    variables. Norms are computed over whole variables, even if ranks hold shards of variables
    (`tfposeidon.ShardedOptimizer`).

    Memory: in addition to the state, the steps of all variables at once, because all norms are
    computed in one call.

    Source: You et al. 2020 (Large batch optimization for deep learning), algorithm 2, with the
    identity for phi. Differs: exclusion, as in the authors' code.

    >>> import keras
    >>> optimizer = LAMB(0.002, weight_decay=0.01, exclude=["bias", "gamma", "beta", "embedding"])
    >>> optimizer.weight_decay
    0.01
    """

    _options = ("beta_1", "beta_2", "epsilon")

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        *,
        weight_decay: float = 0.0,
        exclude: Exclude = None,
        parallel: bool | str = "auto",
        **options: Any,
    ) -> None:
        super().__init__(
            learning_rate, weight_decay=weight_decay, exclude=exclude, parallel=parallel, **options
        )
        self.beta_1 = check_number("beta_1", beta_1, BELOW_1, "Use 0.9.")
        self.beta_2 = check_number("beta_2", beta_2, BELOW_1, "Use 0.999.")
        self.epsilon = check_number("epsilon", epsilon, POSITIVE, "Use 1e-6.")

    @override
    def _build_state(self, variables: Sequence[Any]) -> None:
        self._momentums, self._velocities = self._new_state(variables, "momentum", "velocity")

    @override
    def _direction(
        self, gradient: tf.Tensor, value: tf.Tensor, variable: Any
    ) -> tuple[tf.Tensor, tf.Tensor]:
        index = self._index_of(variable)
        first = self._unbiased_average(self._momentums[index], gradient, self.beta_1)
        second = self._unbiased_average(self._velocities[index], tf.square(gradient), self.beta_2)
        step = first / (tf.sqrt(second) + self.epsilon)
        if decay := self._decay_of(variable):
            step += decay * value
        return step, step

    def _unbiased_average(self, kept: Any, sample: tf.Tensor, beta: float) -> tf.Tensor:
        """Updates a moment with a sample, and returns it without its bias towards 0."""
        average = tf.convert_to_tensor(kept) * beta + sample * (1.0 - beta)
        self.assign(kept, average)
        # Compute 1 - beta^t as `-expm1(t log(beta))`. In float32, the direct difference would lose
        # four digits in the first steps at beta = 0.999, where it is about 0.001. For beta = 0 the
        # logarithm is not defined, and its limit -inf gives 1, that is, no bias.
        exponent = math.log(beta) if beta else -math.inf
        return average / -tf.math.expm1(tf.cast(self.iterations + 1, sample.dtype) * exponent)

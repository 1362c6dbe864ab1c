"""Updates the global weights, and the local weights of each rank, in a synchronization.

Think of an outer optimizer as an optimizer of the global weights. Its gradient is the
pseudo-gradient: the global weights minus the mean of the ranks' local weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from tfposeidon import checks
from tfposeidon.communication import runtime
from tfposeidon.optimizers.wrapper import leave_out_replica_sum, leaves


class Rule(ABC):
    """Base class of outer optimizers, which update the global weights in each synchronization.

    Between synchronizations, each rank trains local weights. A synchronization averages the
    differences between local and global weights over the ranks. The outer optimizer updates the
    global weights with the average, and determines the weights from which each rank continues. Like
    a Keras optimizer, a built outer optimizer belongs to one `LocalUpdates`.
    """

    weighs_samples: bool = True
    """True to weight ranks by samples since the last synchronization, False for equal weights."""

    @property
    def variables(self) -> list[Any]:
        """Variables that persist between synchronizations, equal on all ranks."""
        return []

    def build(self, global_weights: Sequence[Any]) -> None:  # noqa: B027
        """Creates the outer optimizer's variables.

        Args:
          global_weights: Keras variables that hold the global weights.
        """

    @abstractmethod
    def move(self, global_weights: Sequence[Any], means: Sequence[tf.Tensor]) -> None:
        """Updates the global weights.

        Args:
          global_weights: Keras variables that hold the global weights, and that `move` assigns.
          means: Mean over the ranks of local minus global weights: one tensor per variable, with
            the variable's shape and dtype.
        """

    def pull(self, replicas: int) -> float:
        """Returns the share of (local - global weights) that a rank subtracts from local weights.

        Args:
          replicas: Number of replicas: ranks, or nodes with `hierarchical=True`.

        Returns:
          Share in (0, 1] of the difference from the global weights before `move`. With 1, ranks
          continue from the global weights after `move`; below 1, replicas keep different weights.
        """
        return 1.0

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, for saving with the model."""
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Rule:
        """Creates an outer optimizer from a result of `get_config`."""
        deserialize = keras.saving.deserialize_keras_object
        return cls(**{name: deserialize(value) for name, value in config.items()})

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.get_config().items())
        return f"{type(self).__name__}({options})"


@keras.saving.register_keras_serializable("tfposeidon")
class Average(Rule):
    """Averages the weights of all ranks, which continue from the mean (local SGD).

    With `sync_every=1` and SGD without momentum, this is synchronous training. With
    `LocalUpdates(warmup_steps=...)` it is post-local SGD.

    Source: Stich 2019 (local SGD); Lin et al. 2018, arXiv 1808.07217 (post-local SGD).

    >>> import keras, tfposeidon as tp
    >>> optimizer = tp.LocalUpdates(keras.optimizers.SGD(0.1), outer_optimizer=tp.local.Average())
    """

    @override
    def move(self, global_weights: Sequence[Any], means: Sequence[tf.Tensor]) -> None:
        for variable, mean in zip(global_weights, means, strict=True):
            variable.assign_add(mean)


@keras.saving.register_keras_serializable("tfposeidon")
class Elastic(Rule):
    """Moves local and global weights toward each other (EASGD; EAMSGD with Nesterov momentum).

    In a synchronization, each replica (a rank, or a node with `hierarchical=True`) multiplies its
    difference from the global weights by `alpha = beta / replicas`. The product is subtracted from
    the replica's weights and added to the global weights. Replicas keep different weights. For
    EAMSGD, the inner optimizer uses Nesterov momentum.

    Args:
      beta: Share of the replicas' averaged difference that is added to the global weights, in
        (0, 1] (default 0.9). Larger values mean `replicas x alpha > 1`, for which synchronous
        elastic averaging diverges.

    Raises:
      ValueError: If `beta` is out of its range.

    Source: Zhang, Choromanska and LeCun 2015, arXiv 1412.6651, algorithm 1 with synchronous
    workers. Differs: there is no server; every rank holds the global weights.

    >>> import keras, tfposeidon as tp
    >>> inner = keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True)
    >>> optimizer = tp.LocalUpdates(inner, 16, outer_optimizer=tp.local.Elastic(beta=0.9))
    """

    weighs_samples = False

    def __init__(self, beta: float = 0.9) -> None:
        remedy = (
            "Use 1.0 or less: synchronous elastic averaging diverges if alpha = beta / replicas "
            "exceeds 1 / replicas."
        )
        checks.check_number("beta", beta, checks.FRACTION, remedy)
        self.beta = beta

    @override
    def move(self, global_weights: Sequence[Any], means: Sequence[tf.Tensor]) -> None:
        for variable, mean in zip(global_weights, means, strict=True):
            variable.assign_add(tf.cast(self.beta, mean.dtype) * mean)

    @override
    def pull(self, replicas: int) -> float:
        return self.beta / replicas

    @override
    def get_config(self) -> dict[str, Any]:
        return {"beta": self.beta}


@keras.saving.register_keras_serializable("tfposeidon")
class Outer(Rule):
    """Updates the global weights with a Keras optimizer and the pseudo-gradient (DiLoCo).

    All ranks continue from the global weights. The method requires many synchronizations. With few
    steps per synchronization, inner and outer momentum add up: use an inner optimizer with little
    momentum.

    Args:
      optimizer: A Keras optimizer for the global weights. Its gradient is the pseudo-gradient: the
        global weights minus the mean of the local weights. Default `SGD(0.7, momentum=0.9,
        nesterov=True)`, as in the source.

    Raises:
      ValueError: If `optimizer` is not a Keras optimizer, or is wrapped in another.

    Memory: the optimizer's state; one copy of the weights for momentum.

    Source: Douillard et al. 2023, arXiv 2311.08105, algorithm 1. Differs: the pseudo-gradient
    weights each rank by its number of samples.

    >>> import keras, tfposeidon as tp
    >>> inner = keras.optimizers.AdamW(4e-4)
    >>> optimizer = tp.LocalUpdates(inner, sync_every=500, outer_optimizer=tp.local.Outer())
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer | None = None) -> None:
        if optimizer is None:
            optimizer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
        is_plain = isinstance(optimizer, keras.optimizers.Optimizer)
        if not is_plain or isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise ValueError(
                "`optimizer` must be a Keras optimizer that is not wrapped in another. Received: "
                f"{optimizer!r} of type {type(optimizer).__name__}. Leave it out for SGD(0.7, "
                "momentum=0.9, nesterov=True)."
            )
        self.optimizer = optimizer

    @property
    @override
    def variables(self) -> list[Any]:
        return list(self.optimizer.variables)

    @override
    def build(self, global_weights: Sequence[Any]) -> None:
        leave_out_replica_sum(self.optimizer)
        self.optimizer.build(global_weights)

    @override
    def move(self, global_weights: Sequence[Any], means: Sequence[tf.Tensor]) -> None:
        self.optimizer.apply([-mean for mean in means], global_weights)

    @override
    def get_config(self) -> dict[str, Any]:
        return {"optimizer": keras.saving.serialize_keras_object(self.optimizer)}

    @override
    def __repr__(self) -> str:
        return f"Outer({type(self.optimizer).__name__})"


@keras.saving.register_keras_serializable("tfposeidon")
class SlowMomentum(Outer):
    """Updates the global weights with momentum (SlowMo).

    Args:
      momentum: Momentum of the global weights, in [0, 1) (default 0.7).
      rate: Learning rate of the global weights, above 0 (default 1, as in the source).

    Raises:
      ValueError: If an argument is out of its range.

    Memory: one copy of the weights for the velocity.

    Source: Wang et al. 2020, ICLR (SlowMo), algorithm 1. Differs: the velocity is in units of
    weights, not of gradients, so that it is equal on all ranks for any learning rates; with a
    constant learning rate, this does not change the result. The inner optimizer's state is
    unchanged.

    >>> import keras, tfposeidon as tp
    >>> optimizer = tp.LocalUpdates(keras.optimizers.SGD(0.1), sync_every=12,
    ...                             outer_optimizer=tp.local.SlowMomentum(0.7))
    """

    def __init__(self, momentum: float = 0.7, rate: float = 1.0) -> None:
        checks.check_number("momentum", momentum, checks.BELOW_1)
        checks.check_number("rate", rate, checks.POSITIVE)
        self.rate = rate
        super().__init__(keras.optimizers.SGD(rate, momentum=momentum))

    @override
    def get_config(self) -> dict[str, Any]:
        return {"momentum": self.optimizer.momentum, "rate": self.rate}

    __repr__ = Rule.__repr__


FEWEST_WITH_MOMENTUM = 8
"""Steps per synchronization below which inner and outer momentum together are harmful."""

NAMES = {"average": Average, "elastic": Elastic, "outer": Outer, "slow_momentum": SlowMomentum}
"""Outer optimizers by the names that `LocalUpdates` accepts."""


def check_nothing_counts_twice(outer: Rule, policy: Any, has_state: bool) -> None:
    """Refuses error feedback if replicas keep differences that the next exchange sends again."""
    if has_state and outer.pull(2) < 1.0:
        raise ValueError(
            "A scheme with error feedback requires an outer optimizer that assigns the global "
            "weights to all ranks, because the residual would otherwise count twice. Received: "
            f"outer_optimizer={outer}, scheme={policy}. Use a scheme without a residual "
            '("torus2d", "allreduce", tp.schemes.AllToAll(wire_dtype="float16")), or '
            'outer_optimizer="average".'
        )


def warn_of_momentum(outer: Rule, inner: Any, every: int) -> None:
    inside, outside = momentum_of(inner), momentum_of(outer)
    if inside and outside and every < FEWEST_WITH_MOMENTUM:
        runtime.log_once(
            "tfposeidon: LocalUpdates(sync_every=%d): with inner momentum (%g) and outer "
            "momentum (%g), fewer than %d steps between synchronizations are known to be "
            "harmful. Use a larger `sync_every`, or an inner optimizer without momentum.",
            *(every, inside, outside, FEWEST_WITH_MOMENTUM),
        )


def parse(outer: Any) -> Rule:
    if isinstance(outer, Rule):
        return outer
    if isinstance(outer, keras.optimizers.Optimizer):
        return Outer(outer)
    if isinstance(outer, str) and outer in NAMES:
        return NAMES[outer]()
    raise ValueError(
        f"`outer_optimizer` must be one of {', '.join(NAMES)}, an outer optimizer of "
        f"tfposeidon.local, or a Keras optimizer. Received: outer_optimizer={outer!r}. Leave it "
        'out for "average".'
    )


def momentum_of(optimizer: Any) -> float:
    """Returns the momentum (or `beta_1`) of an optimizer, wrapped or not; 0 for none."""
    return max(
        float(getattr(leaf, "momentum", 0.0) or getattr(leaf, "beta_1", 0.0) or 0.0)
        for leaf in leaves(optimizer)
    )

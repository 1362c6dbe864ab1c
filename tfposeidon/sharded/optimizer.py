"""Provides `ShardedOptimizer`: each rank holds the optimizer state of its part of the variables.

Think of `DistributedOptimizer` with the all-reduce split in two: a reduce-scatter of gradients
before the inner optimizer's update, and an all-gather of variables after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import keras
from typing_extensions import override

from tfposeidon import communicating, policies, sample_counts
from tfposeidon.exchange.means import Means
from tfposeidon.gradients import describe
from tfposeidon.optimizer import DistributedOptimizer
from tfposeidon.optimizers.layer_wise import LayerWiseOptimizer
from tfposeidon.optimizers.wrapper import innermost
from tfposeidon.sharded.scheme import Sharded
from tfposeidon.sharded.shards import Shards
from tfposeidon.state.placement import StateDescription
from tfposeidon.training.hooks import FitHooks

# These optimizers update each element independently. Keras's Lamb, Adafactor and Muon do not,
# because they use norms, rows or products of whole variables.
_ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.RMSprop,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.Adam,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
)


@keras.saving.register_keras_serializable("tfposeidon")
class ShardedOptimizer(DistributedOptimizer):
    """Optimizer that averages gradients as `DistributedOptimizer` does, and shards its state.

    Each of P ranks holds the state for its own part of the variables, updates this part with the
    inner optimizer, and gathers the new values of the other parts. A step sends as many bytes as an
    all-reduce, and needs 1/P of the memory for state and 1/P of the work for updates. Results equal
    those of `DistributedOptimizer`, up to rounding.

    `keras_callbacks.Checkpoint` saves the state in parts. Before saving a `.keras` file, all ranks
    pass `keras_callbacks.GatherState` to `fit`, or call `gather_state`.

    Args:
      inner_optimizer: A Keras optimizer that is neither distributed nor built, and updates each
        element independently (not Lamb, Adafactor, Muon), or `tfposeidon.optimizers.LARS` or
        `LAMB`. A custom optimizer declares elementwise updates with an attribute
        `updates_elementwise = True`.
      scheme: `"ps"` (default), for all variables, or rules `[(pattern, scheme), ...]`. Every rank
        updates the variables whose scheme is not `"ps"`.
      bucket_bytes: Maximum size of a bucket of small gradients; see `DistributedOptimizer`.
      gradient_accumulation_steps: Number of calls of `apply` per update; see
        `DistributedOptimizer`.
      sample_count: Function that returns a rank's weight; see `DistributedOptimizer`.
      synchronize_model: Whether `fit` synchronizes the model; see `DistributedOptimizer`.
      xla_segments: Number of functions that XLA compiles; see `DistributedOptimizer`.
      name: Name of the optimizer (default `"sharded_optimizer"`).
      **others: Any other arguments, which are all refused.

    Raises:
      TypeError: For unknown arguments, or if `sample_count` is not a function.
      ValueError: If an argument is out of its range, if the inner optimizer needs whole variables,
        or if the scheme shards no variable or is unknown before the first step.

    Cost: each step sends 2 (P - 1) / P of the gradients' bytes, as `ParameterServer` does, and one
    small all-reduce if norms of gradients or layers are needed.

    Source: Zhang et al. 2017 (Poseidon), section 4.1, whose parameter server applies updates;
    Rajbhandari et al. 2020 (ZeRO), stage 1.

    Example:
      >>> import keras, tfposeidon as tp
      >>> optimizer = tp.ShardedOptimizer(keras.optimizers.Adam(1e-3))
      >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
      >>> model.compile(optimizer=optimizer, loss="mse")
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        scheme: Any = "ps",
        *,
        bucket_bytes: int | None = None,
        gradient_accumulation_steps: int | None = None,
        sample_count: sample_counts.SampleCount | None = None,
        synchronize_model: bool = True,
        xla_segments: int | None = None,
        name: str | None = None,
        **others: Any,
    ) -> None:
        communicating.check_no_more_arguments("ShardedOptimizer", others)
        policy = policies.parse(scheme)
        _check_policy(policy)
        super().__init__(
            inner_optimizer,
            policy if isinstance(policy, Sharded) else Sharded(policy),
            bucket_bytes=bucket_bytes,
            gradient_accumulation_steps=gradient_accumulation_steps,
            sample_count=sample_count,
            synchronize_model=synchronize_model,
            xla_segments=xla_segments,
            name=name or "sharded_optimizer",
        )
        _check_elementwise(inner_optimizer)
        # `build` assigns a `Shards`.
        self._shards: Any = None

    # ------------------------------------------------------------------ state

    @override
    def _build_inner(self, variables: Sequence[Any]) -> None:
        inner = self.inner_optimizer
        # A built optimizer already has the state of whole variables.
        if inner.built:
            raise ValueError(
                "ShardedOptimizer must create the optimizer state, in shards. Received: "
                f"{type(innermost(inner)).__name__}, which is already built. Pass a new optimizer."
            )
        if self.gradient_accumulation_steps and innermost(inner).ema_overwrite_frequency:
            raise ValueError(
                "With gradient accumulation, ShardedOptimizer assigns averages of weights only "
                "at the end of fit. Received: ema_overwrite_frequency="
                f"{innermost(inner).ema_overwrite_frequency}. Use None, or DistributedOptimizer."
            )
        self._shards = Shards(self._exchange.exchanger(variables), variables)
        if not self._shards.parts:
            raise ValueError(
                '`scheme` must send some variables by "ps", which shards them. Received: '
                f"scheme={self.policy}, which selects another scheme for all variables, such as "
                f"{describe(variables[0]).path!r}. Use DistributedOptimizer."
            )
        self._shards.build(inner)
        self._exchange.plans.choose_norms = self._shards.choose_norms

    @property
    @override
    def variables(self) -> list[Any]:
        """Variables of the inner optimizer that are equal on all ranks, without state of shards."""
        own = {id(state.variable) for state in self._shards.states} if self._shards else ()
        return [variable for variable in super().variables if id(variable) not in own]

    @property
    @override
    def rank_state(self) -> list[tuple[Any, StateDescription]]:
        return [*super().rank_state, *(self._shards.rank_state if self._shards else ())]

    def gather_state(self, rank: int = 0) -> None:
        """Gathers the whole optimizer state on one rank, which can save it until the next step.

        All ranks must call this method together. The whole state must fit into the host memory of
        that rank.

        Args:
          rank: Rank that receives the state (default 0).
        """
        if self._shards is not None:
            self._shards.gather_state(rank)

    def scatter_state(self, rank: int = 0) -> None:
        """Distributes the state to its owners, after one rank alone has loaded a model.

        All ranks must call this method together before the next step, as
        `keras_callbacks.BroadcastVariables` does.

        Args:
          rank: Rank that has loaded the model (default 0).
        """
        if self._shards is not None:
            self._shards.scatter_state(rank)

    # ------------------------------------------------------------------ steps

    @override
    def _step(self, grads: list[Any], variables: list[Any], count: Any) -> None:
        known, name = self._trainable_variables, "ShardedOptimizer"
        communicating.check_all_variables(name, variables, known, ", or DistributedOptimizer")
        self._afterwards = self._shards.use(self.updater)
        super()._step(grads, variables, count)

    @override
    def _received(self, means: Means) -> Means:
        return replace(means, values=self._shards.received(means.values))

    @override
    def _update(self, means: Means, variables: list[Any]) -> None:
        self._shards.apply(means)

    @override
    def _apply_to_all(self, variables: list[Any], value: Any) -> None:
        self._shards.refresh()
        super()._apply_to_all(self._shards.targets, value)

    @override
    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Ends `fit` like the inner optimizer: `use_ema` replaces variables by their averages."""
        if self._shards is not None and innermost(self).use_ema:
            self._shards.finalize()
        else:
            super().finalize_variable_values(var_list)

    @override
    def check_change(self, policy: policies.Policy) -> None:
        raise ValueError(
            "ShardedOptimizer does not support a change of the scheme, because the scheme "
            f"determines which rank holds which optimizer state. Received: scheme={policy}. Leave "
            "the change out, or use DistributedOptimizer."
        )

    @override
    def fit_hooks(self, model: Any) -> FitHooks:
        return replace(super().fit_hooks(model), check=_check_callbacks)


def _check_policy(policy: policies.Policy) -> None:
    if policy.reader is not None or not policy.is_fixed:
        depends = "the graph of the first step" if policy.is_fixed else "the predicted step"
        raise ValueError(
            "ShardedOptimizer requires a scheme that is known before the first step, to shard "
            f'the variables. Received: scheme={policy}, which depends on {depends}. Use "ps", or '
            'rules with "ps" and fixed schemes, such as "allreduce".'
        )


def _check_elementwise(inner: keras.optimizers.Optimizer) -> None:
    optimizer = innermost(inner)
    # Compare the class that defines `update_step`, because a subclass that overrides it may need
    # whole variables. AdamW inherits the method from Adam.
    rule = next(cls for cls in type(optimizer).__mro__ if "update_step" in vars(cls))
    declared = getattr(optimizer, "updates_elementwise", False)
    # Accept layer-wise optimizers, for which `sharded_norms` sums squared norms over ranks.
    if not (rule in _ELEMENTWISE or declared or isinstance(optimizer, LayerWiseOptimizer)):
        names = ", ".join([*(cls.__name__ for cls in _ELEMENTWISE), "LARS", "LAMB"])
        raise ValueError(
            f"ShardedOptimizer requires an optimizer that can update parts of variables: {names}. "
            f"Received: {type(optimizer).__name__}, whose update requires whole variables or is "
            "unknown. Use DistributedOptimizer, or, if the optimizer updates each element "
            "independently, set updates_elementwise = True on it."
        )


def _check_callbacks(callbacks: Sequence[Any]) -> None:
    communicating.check_saves_weights_only("ShardedOptimizer", callbacks)
    if any(isinstance(one, keras.callbacks.SwapEMAWeights) for one in callbacks):
        raise ValueError(
            "ShardedOptimizer does not support SwapEMAWeights, because averages of weights are "
            "sharded over all ranks. Received: SwapEMAWeights. Leave it out (at the end of fit "
            "the weights become their averages), or use DistributedOptimizer."
        )

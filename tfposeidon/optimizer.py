"""`DistributedOptimizer`: any Keras optimizer, fed with the mean gradients of all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
from typing_extensions import override

from tfposeidon import arguments, policies, sample_counts
from tfposeidon.communication import runtime
from tfposeidon.exchange import layer_norms
from tfposeidon.gradients.accumulation import Accumulation
from tfposeidon.gradients.description import describe
from tfposeidon.optimizers.wrapping import innermost
from tfposeidon.planning import rules
from tfposeidon.planning.plan import DEFAULT_BUCKET_BYTES
from tfposeidon.server.shards import ServerShards
from tfposeidon.state.rank_state import StateDescription
from tfposeidon.wrapper import OptimizerWrapper

_Update = Callable[[list[Any], Any], None]


@keras.saving.register_keras_serializable("tfposeidon")
class DistributedOptimizer(OptimizerWrapper):
    """Averages gradients over all ranks, then lets the optimizer inside apply them.

    It works in `fit`, `train_on_batch` and hand-written loops. Under `mixed_float16`, `fit` puts
    Keras's `LossScaleOptimizer` *inside*: gradients must be averaged before anybody asks whether
    they are finite.

    Args:
      inner_optimizer: A Keras optimizer that is not distributed yet. If it has
        `gradient_accumulation_steps`, accumulation moves to the wrapper: one exchange per update.
      scheme: Scheme by which gradients are exchanged (default `"auto"`): a name (`"auto"`,
        `"allreduce"`, `"asa"`, `"asa16"`, `"2dtar"`, `"ps"`, `"sfb"`, `"adam"`, `"hybcomm"`,
        `"onebit"`, `"hitopk"`, `"topk"`), an object of `tfposeidon.schemes` or
        `tfposeidon.policies`, or rules `[(pattern, scheme), ...]`, of which the first whose pattern
        is found in a variable's path decides. The same on all ranks.
      bucket_bytes: Bytes up to which small gradients are fused into a bucket (default 4 MiB);
        gradients of a quarter of it or more go by themselves. Smaller buckets start earlier, larger
        ones cost fewer messages, which `"asa"` and `"2dtar"` feel more than `"allreduce"`; 0 sends
        each variable by itself.
      gradient_accumulation_steps: Calls of `apply` whose gradients are averaged for one exchange
        and one update, as in Keras's optimizers (default `None`: one call). That of the inner
        optimizer, if it has one, takes precedence.
      sample_count: Function by which `fit` and `train_on_batch` weigh this rank: from what the
        train step is given, such as `(x, y, sample_weight)`, to a number. `None` (default) counts
        samples, which is exact for losses that are means over samples. `tfposeidon.sample_counts`
        has some for other losses; register your own with Keras if the model is to be saved.
      name: Name of the optimizer (default `"distributed_optimizer"`).
      **others: Any other arguments, which are all refused: those of Horovod's optimizer with what
        to write in their place.

    Raises:
      TypeError: For unknown arguments, or if `sample_count` is no function.
      ValueError: If an argument is out of its range, if the inner optimizer does not suit the
        scheme, under `tf.distribute`, or with another Keras backend than TensorFlow.

    Example:
      >>> import keras, tfposeidon as tp
      >>> optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), scheme="asa")
      >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
      >>> model.compile(optimizer=optimizer, loss="mse")

      Another scheme for some variables:

      >>> rules = [("embedding", "asa16"), (".*", tp.schemes.HierarchicalTopK(density=0.001))]
      >>> optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.1), scheme=rules)
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        scheme: Any = "auto",
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        gradient_accumulation_steps: int | None = None,
        sample_count: sample_counts.SampleCount | None = None,
        name: str | None = None,
        **others: Any,
    ) -> None:
        arguments.check_no_more_arguments("DistributedOptimizer", others)
        policy = policies.parse(scheme)
        rule = innermost(inner_optimizer)
        steps = getattr(rule, "gradient_accumulation_steps", None) or gradient_accumulation_steps
        super().__init__(
            inner_optimizer,
            policy,
            bucket_bytes,
            sample_count,
            gradient_accumulation_steps=steps,
            name=name or "distributed_optimizer",
        )
        rules.check_server_update(policy, inner_optimizer)
        # Accumulation happens here, before the exchange; the inner optimizer must not do it again.
        rule.gradient_accumulation_steps = None
        self._accumulation: Accumulation | None = None
        self._shards: ServerShards | None = None

    # ------------------------------------------------------------------ state

    @override
    def build(self, variables: Sequence[Any]) -> None:
        """Makes the inner optimizer's state, and the accumulators if there are any.

        Args:
          variables: The trainable variables.

        Raises:
          ValueError: If a variable is not floating point, or, where servers update, if the inner
            optimizer is built already.
        """
        if self.built:
            return
        for variable in variables:
            # Refuses what cannot be trained before any state is made.
            describe(variable)
        self._shards = self._server_shards(variables)
        if self._shards is not None:
            self._shards.build(self.inner_optimizer)
        elif not self.inner_optimizer.built:
            self.inner_optimizer.build(variables)
        if self.gradient_accumulation_steps:
            self._accumulation = Accumulation(self, variables, self.gradient_accumulation_steps)
        self._adopt(variables)

    @property
    @override
    def variables(self) -> list[Any]:
        """Variables of the inner optimizer that are equal on all ranks: all but servers' state."""
        variables = self.inner_optimizer.variables
        return variables if self._shards is None else self._shards.without_slots(variables)

    @override
    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, for saving with the model."""
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "scheme": keras.saving.serialize_keras_object(self.policy),
            "bucket_bytes": self._exchange.plans.planner.bucket_bytes,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "sample_count": keras.saving.serialize_keras_object(self._exchange.batch.function),
        }

    # ------------------------------------------------------------------ steps

    @override
    def _step(self, grads: list[Any], variables: list[Any], count: Any) -> None:
        rules.check_all_variables(variables, self._trainable_variables, self._shards is not None)
        with self._exchange.call(grads, variables, count) as sent:
            self._accumulate(sent, variables, count, functools.partial(self._update, variables))

    def _accumulate(
        self, grads: list[Any], variables: list[Any], count: Any, update: _Update
    ) -> None:
        """Calls `update` with these gradients, or, if several calls make one update, with sums."""
        if self._accumulation is None:
            update(grads, count)
        else:
            self._accumulation.add(
                [self._get_variable_index(v) for v in variables], grads, count, update
            )

    def _update(self, variables: list[Any], grads: list[Any], count: Any) -> None:
        means = self._exchange.means(grads, variables, count, self._shards)
        with layer_norms.override_norms(
            self.inner_optimizer, self._exchange.plans.norms(variables)
        ):
            if self._shards is None:
                means.update(lambda found: self.inner_optimizer.apply(found, variables))
            else:
                self._shards.apply(means)
        # Last, as a step that is skipped must leave it as it was: the means tell whether one is.
        means.keep_state()

    @override
    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Ends `fit` as the inner optimizer does: `use_ema` turns variables into their averages.

        Args:
          var_list: The trainable variables.
        """
        if self._shards is None or not innermost(self).use_ema:
            self.inner_optimizer.finalize_variable_values(var_list)
            return
        self._shards.finalize()

    @override
    def gather_state(self, rank: int = 0) -> None:
        """Brings the optimizer's whole state to one rank.

        That rank can then save the model, until the next step. All ranks call it together. Only
        `ShardedServer(update="server")` needs it; with other schemes it does nothing. It takes the
        memory of the whole state on that rank's host.

        Args:
          rank: Rank that gets the state (default 0).
        """
        if self._shards is not None:
            self._shards.gather_state(rank)

    @override
    def scatter_state(self, rank: int = 0) -> None:
        """Gives every server its part of the state, after a model was loaded on one rank alone.

        All ranks call it together, before the next step; `keras_callbacks.BroadcastVariables` does.

        Args:
          rank: The rank that has loaded the model (default 0).
        """
        if self._shards is not None:
            self._shards.scatter_state(rank)

    @override
    def drop_accumulated(self) -> None:
        """Drops gradients that were accumulated for an update that no longer comes."""
        if self._accumulation is not None:
            self._accumulation.reset()

    @override
    def _rank_state(self) -> list[tuple[Any, StateDescription]]:
        # Schemes make their state with the plan. A checkpoint that is loaded before the first step
        # has to find it.
        if self.built and not self._exchange.exchangers:
            self._exchange.exchanger(self._trainable_variables)
        accumulated = (
            self._accumulation.rank_state(runtime.rank(), runtime.size())
            if self._accumulation
            else []
        )
        served = self._shards.rank_state if self._shards else ()
        return [*accumulated, *self._exchange.plans.rank_state(), *served]

    def _server_shards(self, variables: Sequence[Any]) -> ServerShards | None:
        if not self.policy.updates_at_servers:
            return None
        # Unbuilt, so that it builds its state for this rank's part and never for whole variables.
        rules.check_not_built(self.inner_optimizer)
        return ServerShards(self._exchange.exchanger(variables), variables)

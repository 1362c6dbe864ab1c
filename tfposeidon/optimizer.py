"""`DistributedOptimizer`: any Keras optimizer, fed with the mean gradients of all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from tfposeidon import arguments, policies, ranges, sample_counts
from tfposeidon.communication import runtime, surroundings
from tfposeidon.exchange import layer_norms
from tfposeidon.exchange.step import Step
from tfposeidon.gradients.accumulation import Accumulation
from tfposeidon.gradients.description import describe
from tfposeidon.optimizers.wrapping import innermost
from tfposeidon.planning import rules
from tfposeidon.planning.plan import DEFAULT_BUCKET_BYTES, Plan
from tfposeidon.server.shards import ServerShards
from tfposeidon.state.rank_state import StateDescription
from tfposeidon.training import keras_patches

_Update = Callable[[list[Any], Any], None]


@keras.saving.register_keras_serializable("tfposeidon")
class DistributedOptimizer(keras.optimizers.LossScaleOptimizer):
    """Averages gradients over all ranks, then lets the optimizer inside apply them.

    It works in `fit`, `train_on_batch` and hand-written loops. It is a `LossScaleOptimizer` by type
    only, so that `compile` does not put one around it: gradients must be averaged before anybody
    asks whether they are finite. Under `mixed_float16`, `fit` puts Keras's real one *inside*.

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

    built: bool

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
        arguments.check_no_more_arguments(others)
        surroundings.check_surroundings()
        arguments.check_inner(inner_optimizer, DistributedOptimizer)
        bucket_bytes = ranges.check_integer("bucket_bytes", bucket_bytes, 0)
        arguments.check_sample_count(sample_count)
        policy = policies.parse(scheme)
        rules.check_server_update(policy, inner_optimizer)
        rule = innermost(inner_optimizer)
        steps = rule.gradient_accumulation_steps or gradient_accumulation_steps
        # Not LossScaleOptimizer's own: that would make state for a loss scale of this wrapper.
        keras.optimizers.Optimizer.__init__(
            self,
            # Nobody reads it: `learning_rate` is the inner one's, as in LossScaleOptimizer.
            learning_rate=0.0,
            gradient_accumulation_steps=steps,
            name=name or "distributed_optimizer",
        )
        # Accumulation happens here, before the exchange; the inner optimizer must not do it again.
        rule.gradient_accumulation_steps = None
        self.inner_optimizer = inner_optimizer
        self._exchange = Step(self, policy, bucket_bytes, sample_count)
        self._accumulation: Accumulation | None = None
        self._shards: ServerShards | None = None
        # Here and not at import, which must change nothing for those who only load a module.
        keras_patches.patch_keras(DistributedOptimizer)

    def __bool__(self) -> bool:
        """Returns True, and notes whether Keras's `compile` asks.

        Under `mixed_float16` it does, unless `auto_scale_loss=False`; nothing else tells whether
        losses are to be scaled.
        """
        keras_patches.note_question_of_compile(self)
        return True

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
        # It serves replicas of tf.distribute, which is refused. It joins all gradients for them, so
        # that the first update, or pull from servers, waits for the last exchange, and registers a
        # gradient function, for ever, that holds the graph of each traced step.
        innermost(self)._all_reduce_sum_gradients = list
        # After the inner optimizer's own `build`, which makes the averages.
        self._show_averages()
        # Keras's bookkeeping; its own `build` would make a loss scale's state for this wrapper.
        self._trainable_variables = list(variables)
        self._trainable_variables_indices = {self._var_key(v): i for i, v in enumerate(variables)}
        if self.gradient_accumulation_steps:
            self._accumulation = Accumulation(self, variables, self.gradient_accumulation_steps)
        self._exchange.build()
        self.built = True

    def _show_averages(self) -> None:
        """Shows averages of weights on a loss scale, where `SwapEMAWeights` looks for them."""
        inner, rule = self.inner_optimizer, innermost(self)
        if inner is not rule and rule.use_ema:
            # Past Keras, which would take them for the loss scale's own.
            vars(inner)["_model_variables_moving_average"] = rule._model_variables_moving_average

    @property
    @override
    def variables(self) -> list[Any]:
        """Variables of the inner optimizer that are equal on all ranks: all but servers' state."""
        variables = self.inner_optimizer.variables
        return variables if self._shards is None else self._shards.without_slots(variables)

    @property
    def rank_variables(self) -> list[Any]:
        """Variables whose values differ from rank to rank.

        They hold accumulated gradients, what schemes keep, and this rank's part of servers' state.
        `keras_callbacks.Checkpoint` saves it per rank; `.keras` files do not hold it.
        """
        return [variable for variable, _ in self._rank_state()]

    @property
    def rank_descriptions(self) -> list[StateDescription]:
        """Describes each of `rank_variables`, so that state can be moved onto other ranks."""
        return [piece for _, piece in self._rank_state()]

    @property
    @override
    def iterations(self) -> Any:
        return self.inner_optimizer.iterations

    @property
    def plan(self) -> Plan:
        """Plan of the exchange: which variable goes by which scheme, with bytes and reason.

        `print(optimizer.plan)` shows it as a table. Once steps have run, it is the plan that the
        last of them followed.

        Raises:
          RuntimeError: If the optimizer is not built, and so does not know its variables.
        """
        if not self.built:
            raise RuntimeError(
                "There is a plan once the optimizer knows its variables. Received: an optimizer "
                "that is not built. Call fit, or optimizer.build(model.trainable_variables), first."
            )
        return self._exchange.plans.plan(self._trainable_variables, self.inner_optimizer)

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

    @override
    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> DistributedOptimizer:
        """Makes an optimizer of what `get_config` returned; needs neither Horovod nor a launcher.

        Args:
          config: Result of `get_config`; not changed.
          custom_objects: Classes and functions by the names in `config`, as in Keras.
        """
        objects: dict[str, Any] = {
            key: keras.saving.deserialize_keras_object(config[key], custom_objects=custom_objects)
            for key in ("inner_optimizer", "scheme", "sample_count")
            if key in config
        }
        return cls(**{**config, **objects})

    @override
    def set_weights(self, weights: Sequence[Any]) -> None:
        """Assigns values to `variables`, which are those of the inner optimizer.

        Args:
          weights: Arrays with the shapes of `variables`, in their order.

        Raises:
          ValueError: If the optimizer is not built, or arrays have another number or shape.
        """
        if not self.built:
            raise ValueError(
                "The optimizer must be built before its weights are set. Received: one that is "
                "not. Call fit, or optimizer.build(model.trainable_variables), first."
            )
        wanted, given = (
            [tuple(array.shape) for array in arrays] for arrays in (self.variables, weights)
        )
        if wanted != given:
            raise ValueError(
                "There must be an array for each of the optimizer's variables, in their shapes "
                f"{wanted}. Received: shapes {given}. Give what another optimizer of the same kind "
                "holds in `variables`."
            )
        for variable, array in zip(self.variables, weights, strict=True):
            variable.assign(array)

    @override
    def save_own_variables(self, store: Any) -> None:
        """Saves nothing: Keras saves the inner optimizer as a part of this one."""

    @override
    def load_own_variables(self, store: Any) -> None:
        """Loads nothing: Keras loads the inner optimizer as a part of this one."""

    # ------------------------------------------------------------------ steps

    # AutoGraph would convert all that a hand-written step calls; nothing in here needs it.
    @override
    @tf.autograph.experimental.do_not_convert
    def apply(
        self, grads: Iterable[Any], trainable_variables: Any = None, sample_count: Any = None
    ) -> None:
        """Averages gradients over all ranks and applies them.

        Args:
          grads: Gradients, one per variable: tensors, `IndexedSlices` or `None`. With an empty list
            the call does nothing.
          trainable_variables: Trainable variables; those of `build` if left out.
          sample_count: Number of samples behind these gradients on this rank. With it ranks weigh
            by their samples, and the result is exact for unequal batches; `None` (default) takes
            what `fit` counts, and outside of `fit` weighs all ranks the same. All ranks must do
            alike.

        Raises:
          ValueError: When a step is traced, inside XLA or `tf.distribute`, if numbers of gradients
            and variables differ, or for variables that it cannot train.
          RuntimeError: At the first step, if ranks differ in their variables or settings.
        """
        grads = list(grads)
        if not grads:
            return
        variables = list(
            self._trainable_variables if trainable_variables is None else trainable_variables
        )
        self._check(grads, variables)
        count = self._exchange.batch.current if sample_count is None else sample_count
        with self._exchange.call(grads, variables, count) as grads:
            self._accumulate(grads, variables, count, functools.partial(self._update, variables))

    def _check(self, grads: list[Any], variables: list[Any]) -> None:
        if not self.built:
            self.build(variables)
        self._check_variables_are_known(variables)
        if len(grads) != len(variables):
            raise ValueError(
                f"There must be a gradient per variable. Received: {len(grads)} gradients and "
                f"{len(variables)} variables. Give None for variables without one."
            )
        rules.check_all_variables(variables, self._trainable_variables, self._shards is not None)

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
    def apply_gradients(self, grads_and_vars: Iterable[Any], sample_count: Any = None) -> Any:
        """Averages and applies gradients given as pairs, as `apply` does.

        Args:
          grads_and_vars: Pairs of a gradient and its variable.
          sample_count: Number of samples behind the gradients on this rank; see `apply`.

        Returns:
          The number of updates so far.
        """
        pairs = list(grads_and_vars)
        self.apply(
            [gradient for gradient, _ in pairs], [variable for _, variable in pairs], sample_count
        )
        return self.iterations

    @override
    def scale_loss(self, loss: Any) -> Any:
        """Multiplies a loss by the inner optimizer's loss scale, if it has one.

        Args:
          loss: Loss, a scalar tensor.
        """
        return self.inner_optimizer.scale_loss(loss)

    @property
    def loss_scale_factor(self) -> float:
        """Always 1: scaling is for the inner optimizer."""
        return 1.0

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: Any) -> None:
        # The one thing that Keras's LossScaleOptimizer does to an optimizer that it is put around.
        # Keras's constructor of this wrapper does it, too, before there is an exchange.
        if hasattr(self, "_exchange"):
            raise ValueError(
                "DistributedOptimizer must be the outermost optimizer. Received: a loss scale, or "
                "a LossScaleOptimizer, around it. "
                "Write DistributedOptimizer(LossScaleOptimizer(optimizer))."
            )

    @override
    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Excludes variables from the weight decay of the inner optimizer; call it before `build`.

        Args:
          var_list: Variables to exclude.
          var_names: Parts of names: variables whose names contain one of them are excluded.
        """
        innermost(self).exclude_from_weight_decay(var_list, var_names)

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

    def scatter_state(self, rank: int = 0) -> None:
        """Gives every server its part of the state, after a model was loaded on one rank alone.

        All ranks call it together, before the next step; `keras_callbacks.BroadcastVariables` does.

        Args:
          rank: The rank that has loaded the model (default 0).
        """
        if self._shards is not None:
            self._shards.scatter_state(rank)

    @property
    def policy(self) -> policies.Policy:
        """Policy that decides which variable goes by which scheme."""
        return self._exchange.plans.planner.policy

    def change_scheme(self, scheme: Any) -> None:
        """Exchanges by another scheme from the next traced step on.

        What was kept for the old scheme is dropped. `keras_callbacks.SchemeSchedule` does it during
        `fit`: it sends what was kept before, and has the step traced anew.

        Args:
          scheme: Any value that the constructor takes; the same on all ranks, at the same step.

        Raises:
          ValueError: If `scheme` is unknown, or servers update with the old or the new scheme.
        """
        policy = policies.parse(scheme)
        rules.check_change(self.policy, policy)
        self._exchange.plans.change_policy(policy)

    @property
    def exposed_s(self) -> float:
        """Communication that computation did not hide, in seconds over all steps so far.

        It is the time between a step's last gradient and its last mean; on GPUs, where ops are
        queued, only a hint.
        """
        return self._exchange.exposed_s

    @property
    def exchange(self) -> Step:
        """Object that exchanges the gradients, for training loops and callbacks."""
        return self._exchange

    def drop_accumulated(self) -> None:
        """Drops gradients that were accumulated for an update that no longer comes."""
        if self._accumulation is not None:
            self._accumulation.reset()

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

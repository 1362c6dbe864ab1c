"""`DistributedOptimizer`: any Keras optimizer, fed with the mean gradients of all ranks."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfposeidon import arguments, policies, sample_counts
from tfposeidon.communication import runtime, surroundings
from tfposeidon.exchange import factor_agreement, layer_norms
from tfposeidon.exchange.agreed_plan import AgreedPlans
from tfposeidon.exchange.exchanger import Exchanger
from tfposeidon.gradients.accumulation import Accumulation
from tfposeidon.gradients.description import describe, merge_rows
from tfposeidon.gradients.factors import Factors
from tfposeidon.optimizers.wrapping import innermost
from tfposeidon.planning import rules
from tfposeidon.planning.plan import DEFAULT_BUCKET_BYTES, Plan
from tfposeidon.server.shards import ServerShards
from tfposeidon.state.rank_state import Piece
from tfposeidon.training import keras_patches


@keras.saving.register_keras_serializable("tfposeidon")
class DistributedOptimizer(keras.optimizers.LossScaleOptimizer):
    """Averages gradients over all ranks, then lets the optimizer it has apply them.

    It works in `fit`, `train_on_batch` and hand-written loops. It is a `LossScaleOptimizer` by type
    only, so that `compile` does not put one around it: gradients must be reduced before anybody asks
    whether they are finite. Under `mixed_float16`, `fit` puts Keras's real one *inside*.

    Args:
      inner_optimizer: A Keras optimizer. If it has `gradient_accumulation_steps`, accumulation moves
        to the wrapper: one exchange per update.
      scheme: A name ("auto", "allreduce", "asa", "asa16", "2dtar", "ps", "sfb", "adam", "hybcomm", "hitopk",
        "topk"), an object of `tfposeidon.schemes` or `tfposeidon.policies`, or rules `[(pattern, scheme), ...]`.
      bucket_bytes: Small gradients are fused into buckets of up to this many bytes; larger than a
        quarter of it, they go by themselves. Smaller buckets start earlier, larger ones cost fewer
        messages, which "asa" and "2dtar" feel more than "allreduce"; 0 sends each variable by itself.
      gradient_accumulation_steps: As in Keras's optimizers.
      sample_count: How `fit` and `train_on_batch` weigh this rank: a function from what the train step is given, as
        `(x, y, sample_weight)`, to a number. Left out, it is the number of samples, which is exact for losses that are
        means over samples. `tfposeidon.sample_counts` has some for other losses; register your own with Keras if the
        model is to be saved.
      name: Of this object.

    Raises:
      TypeError: For arguments that there are not; for those of Horovod's optimizer it names ours. If `sample_count` is
        no function.
      ValueError: If an argument makes no sense, under `tf.distribute`, or with another Keras backend
        than TensorFlow.

    Example:
    >>> import keras, tfposeidon as tp
    >>> optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), scheme="asa")
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> model.compile(optimizer=optimizer, loss="mse")
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
        arguments.check_bucket_bytes(bucket_bytes)
        arguments.check_sample_count(sample_count)
        policy = policies.parse(scheme)
        rules.check_server_update(policy, inner_optimizer)
        rule = innermost(inner_optimizer)
        steps = rule.gradient_accumulation_steps or gradient_accumulation_steps
        # Not LossScaleOptimizer's own: that would make state for a loss scale of this wrapper.
        keras.optimizers.Optimizer.__init__(
            self, learning_rate=0.0, gradient_accumulation_steps=steps, name=name or "distributed_optimizer"
        )
        rule.gradient_accumulation_steps = None
        self.inner_optimizer = inner_optimizer
        self._plans = AgreedPlans(policy, bucket_bytes)
        self._accumulation: Accumulation | None = None
        self._shards: ServerShards | None = None
        self._count_samples = sample_count
        self._sample_count: Any = None
        self.ends_with_first_rank = False
        self.restores_scheme = False
        self.may_scale = False
        keras_patches.patch_keras(DistributedOptimizer)

    def __bool__(self) -> bool:
        """True. Under `mixed_float16` only `compile(auto_scale_loss=False)` does not ask: nothing else tells."""
        self.may_scale = self.may_scale or keras_patches.is_asked_by_compile()
        return True

    # ------------------------------------------------------------------ state

    def build(self, variables: Sequence[Any]) -> None:
        """Makes the inner optimizer's state for `variables`, and the accumulators if there are any."""
        if self.built:
            return
        for variable in variables:
            describe(variable)
        self._shards = self._server_shards(variables)
        if self._shards is not None:
            self._shards.build(self.inner_optimizer)
        elif not self.inner_optimizer.built:
            self.inner_optimizer.build(variables)
        self._show_averages()
        self._trainable_variables = list(variables)
        self._trainable_variables_indices = {self._var_key(v): i for i, v in enumerate(variables)}
        if self.gradient_accumulation_steps:
            self._accumulation = Accumulation(self, variables, self.gradient_accumulation_steps)
        with tf.init_scope():
            self._absent = tf.Variable(0.0, trainable=False, name="absent")
            self._exposed_s = tf.Variable(tf.zeros([], tf.float64), trainable=False, name="exposed_s")
        self.built = True

    def _show_averages(self) -> None:
        """Lends the averages of weights to a loss scale around them: `SwapEMAWeights` looks one optimizer deep."""
        inner, rule = self.inner_optimizer, innermost(self)
        if inner is not rule and rule.use_ema:
            # Past Keras, which would take them for the loss scale's own.
            vars(inner)["_model_variables_moving_average"] = rule._model_variables_moving_average

    @property
    def variables(self) -> list[Any]:
        """The inner optimizer's that are equal on all ranks: all but state that servers keep."""
        variables = self.inner_optimizer.variables
        return variables if self._shards is None else self._shards.without_slots(variables)

    @property
    def rank_variables(self) -> list[Any]:
        """State that differs from rank to rank: accumulated gradients, the schemes' own, and the servers' part.

        `keras_callbacks.Checkpoint` saves it per rank; `.keras` files do not hold it.
        """
        return [variable for variable, _ in self._rank_state()]

    @property
    def rank_pieces(self) -> list[Piece]:
        """What each of `rank_variables` is: with it, state can be moved onto other ranks."""
        return [piece for _, piece in self._rank_state()]

    @property
    def iterations(self) -> Any:
        return self.inner_optimizer.iterations

    @property
    def plan(self) -> Plan:
        """Which variable goes by which scheme, with bytes and reason.

        Raises:
          RuntimeError: Before the optimizer knows its variables.
        """
        if not self.built:
            raise RuntimeError(
                "There is a plan once the optimizer knows its variables. Received: an optimizer that is not built. "
                "Call fit, or optimizer.build(model.trainable_variables), first."
            )
        return self._plans.plan(self._trainable_variables, self.inner_optimizer)

    def get_config(self) -> dict[str, Any]:
        """Everything that the constructor takes, for saving with the model."""
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "scheme": keras.saving.serialize_keras_object(self.policy),
            "bucket_bytes": self._plans.bucket_bytes,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "sample_count": keras.saving.serialize_keras_object(self._count_samples),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> DistributedOptimizer:
        """The inverse of `get_config`; needs neither Horovod nor a launcher."""
        objects: dict[str, Any] = {
            key: keras.saving.deserialize_keras_object(config[key], custom_objects=custom_objects)
            for key in ("inner_optimizer", "scheme", "sample_count")
            if key in config
        }
        return cls(**{**config, **objects})

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Assigns values to `variables`, which are the inner optimizer's.

        Args:
          weights: Arrays with the shapes of `variables`, in their order.

        Raises:
          ValueError: If the optimizer is not built, or for arrays of another number or shape.
        """
        if not self.built:
            raise ValueError(
                "The optimizer must be built before its weights are set. Received: one that is not. "
                "Call fit, or optimizer.build(model.trainable_variables), first."
            )
        wanted, given = ([tuple(array.shape) for array in arrays] for arrays in (self.variables, weights))
        if wanted != given:
            raise ValueError(
                f"There must be an array for each of the optimizer's variables, in their shapes {wanted}. "
                f"Received: shapes {given}. Give what another optimizer of the same kind holds in `variables`."
            )
        for variable, array in zip(self.variables, weights, strict=True):
            variable.assign(array)

    def save_own_variables(self, store: Any) -> None:
        """Nothing: Keras saves the inner optimizer as a part of this one."""

    def load_own_variables(self, store: Any) -> None:
        """Nothing: Keras loads the inner optimizer as a part of this one."""

    # ------------------------------------------------------------------ steps

    # Nothing in here is for AutoGraph, which would convert all that a hand-written step calls.
    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Iterable[Any], trainable_variables: Any = None, sample_count: Any = None) -> None:
        """Averages gradients over all ranks and applies them.

        Args:
          grads: One per variable: tensors, `IndexedSlices` or `None`.
          trainable_variables: The variables; those of `build` if left out.
          sample_count: Samples behind these gradients on this rank. If given (`fit` gives it), ranks
            weigh by their samples, and the result is exact for unequal batches; else every rank
            weighs the same. All ranks must do alike.

        Raises:
          ValueError: At trace time, inside XLA or `tf.distribute`, or for variables it cannot train.
          RuntimeError: At the first step, if ranks differ in their variables or settings.
        """
        grads = list(grads)
        if not grads:
            return
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if not self.built:
            self.build(variables)
        self._check_variables_are_known(variables)
        if len(grads) != len(variables):
            raise ValueError(f"There must be a gradient per variable. Received: {len(grads)} and {len(variables)}.")
        count = self._sample_count if sample_count is None else sample_count
        rules.check_all_variables(variables, self._trainable_variables, self._shards is not None)
        if not self._exchanges(variables):
            self._accumulated_update(grads, variables, count)
            return
        grads = self._agreed_on(grads, variables, count)
        with self._exchanger(variables).call():
            self._accumulated_update(grads, variables, count)

    def _accumulated_update(self, grads: list[Any], variables: list[Any], count: Any) -> None:
        if self._accumulation is None:
            self._update(grads, variables, count)
            return
        places = [self._get_variable_index(v) for v in variables]
        update = functools.partial(self._update, variables=variables)
        self._accumulation.add(places, grads, count, lambda means, total: update(means, count=total))

    def apply_gradients(self, grads_and_vars: Iterable[Any], sample_count: Any = None) -> Any:
        """As `apply`, for pairs. Returns the number of updates so far."""
        grads, variables = zip(*grads_and_vars, strict=True)
        self.apply(grads, variables, sample_count)
        return self.iterations

    def scale_loss(self, loss: Any) -> Any:
        """As the inner optimizer does: times the loss scale, where there is one."""
        return self.inner_optimizer.scale_loss(loss)

    @property
    def loss_scale_factor(self) -> float:
        """1: scaling is for the inner optimizer."""
        return 1.0

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: Any) -> None:
        # The one thing that Keras's LossScaleOptimizer does to an optimizer that it is put around.
        if hasattr(self, "_plans"):
            raise ValueError(
                "DistributedOptimizer must be the outermost optimizer. Received: a loss scale, or a "
                "LossScaleOptimizer, around it. Write DistributedOptimizer(LossScaleOptimizer(optimizer))."
            )

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """As for the inner optimizer, which does the decay."""
        innermost(self).exclude_from_weight_decay(var_list, var_names)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """As the inner optimizer does at the end of `fit`: with `use_ema`, variables become their averages."""
        if self._shards is None or not innermost(self).use_ema:
            self.inner_optimizer.finalize_variable_values(var_list)
            return
        self._shards.finalize()

    def gather_state(self, rank: int = 0) -> None:
        """Brings the optimizer's whole state to `rank`, which can save the model until the next step.

        All ranks call it together. Only `ShardedServer(update="server")` needs it; with others it does nothing.
        Memory: of the whole state, on `rank`'s host.
        """
        if self._shards is not None:
            self._shards.gather_state(rank)

    def scatter_state(self, rank: int = 0) -> None:
        """The inverse, after a model was loaded on `rank` alone: gives every server its part of the state.

        All ranks call it together; `keras_callbacks.BroadcastVariables` does.
        """
        if self._shards is not None:
            self._shards.scatter_state(rank)

    @contextlib.contextmanager
    def counting(self, data: Any) -> Iterator[None]:
        """Within it, `apply` weighs this rank by what `data` counts: how `fit` supplies it.

        Args:
          data: What the train step is given.
        """
        count = sample_counts.counted(self._count_samples or sample_counts.batch_size, data)
        self._sample_count, previous = count, self._sample_count
        try:
            yield
        finally:
            self._sample_count = previous

    def prepare(self, variables: Sequence[Any]) -> None:
        """Plans for `variables` before a step is traced, and makes the variables that the exchange needs.

        `fit` does it. Without it the first trace makes them, and TensorFlow then traces the step once more.

        Args:
          variables: The trainable variables that the step will give to `apply`, all of them in this order.
        """
        if runtime.size() > 1:
            self._exchanger(list(variables))

    def scale_losses(self) -> None:
        """Puts Keras's `LossScaleOptimizer` inside, unless something scales already.

        `fit` and `train_on_batch` do it under `mixed_float16`. An inner optimizer with a
        `loss_scale_factor` of its own (1.0 for none at all) stays as it is.
        """
        inner = self.inner_optimizer
        if isinstance(inner, keras.optimizers.LossScaleOptimizer) or inner.loss_scale_factor is not None:
            return
        scaled = keras.optimizers.LossScaleOptimizer(self.inner_optimizer)
        if self.built:
            raise ValueError(
                "Under mixed_float16 the optimizer needs a loss scale. Received: an optimizer that was built without "
                "one. Compile with a new DistributedOptimizer, or give its inner optimizer loss_scale_factor=1.0."
            )
        self.inner_optimizer = scaled

    @property
    def suits_xla(self) -> bool:
        """Whether XLA can compile its steps: on one rank, if schemes keep nothing from step to step."""
        return runtime.size() == 1 and not self.policy.keeps_state

    @property
    def policy(self) -> policies.Policy:
        """What decides which variable goes by which scheme."""
        return self._plans.policy

    def flush(self) -> bool:
        """Makes all steps from now on send everything, what schemes have kept included: before they change.

        Returns:
          Whether there are schemes that keep anything.
        """
        for exchanger in self._plans.exchangers:
            exchanger.flush()
        return any(any(exchanger.states) for exchanger in self._plans.exchangers)

    @property
    def has_flushed(self) -> bool:
        """Whether a step that counted has sent everything since `flush`; the same on all ranks."""
        return all(exchanger.has_flushed for exchanger in self._plans.exchangers)

    def change_scheme(self, scheme: Any) -> None:
        """Exchanges by another scheme from the next traced step on; what was kept for the old one is dropped.

        `keras_callbacks.SchemeSchedule` does it during `fit`, with a `flush` before and the step traced anew.

        Args:
          scheme: As in the constructor; the same on all ranks, at the same step.
        """
        policy = policies.parse(scheme)
        rules.check_change(self._plans.policy, policy)
        self._plans.change_policy(policy)

    @property
    def exposed_s(self) -> float:
        """Communication that computation did not hide, in seconds over all steps so far.

        It is the time between a step's last gradient and its last mean; on GPUs, where ops are queued,
        only a hint.
        """
        return float(self._exposed_s.numpy()) if self.built else 0.0

    @property
    def absent_ranks(self) -> int:
        """Ranks that had no batch left at the last step; counted while `ends_with_first_rank`."""
        return int(self._absent.numpy()) if self.built else 0

    @property
    def exchangers(self) -> list[Exchanger]:
        """What exchanges the gradients in the steps so far, for each list of variables."""
        return self._plans.agreed

    def begin_epoch(self) -> None:
        """Forgets who was absent, and drops gradients accumulated for an update that no longer comes."""
        if not self.built:
            return
        self._absent.assign(0.0)
        if self._accumulation is not None:
            self._accumulation.reset()

    def _agreed_on(self, grads: list[Any], variables: list[Any], count: Any) -> list[Any]:
        """Makes sure that all ranks are about to do the same; gradients, with factors where these are sent."""
        surroundings.check_graph()
        self._plans.agree(grads, variables, self.inner_optimizer, self._settings(count))
        plan = self._exchanger(variables).plan
        return factor_agreement.taken(grads, plan, [*variables, *self.inner_optimizer.variables])

    def _update(self, grads: list[Any], variables: list[Any], count: Any) -> None:
        if not self._exchanges(variables):
            rows = [merge_rows(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
            if self._shards is not None:
                rows = self._shards.completed(self._shards.own_parts(rows))
            self._apply_inner(rows, variables, lambda update: update(rows))
            return
        exchanger = self._exchanger(variables)
        presence = exchanger.presence(grads, count)
        sent = factor_agreement.as_planned(grads, exchanger.plan)
        ready = _time_after(sent)
        effective_rate = self._plans.effective_rate(variables)
        rate = effective_rate.now(self.inner_optimizer) if any(exchanger.states) else None
        rescale = None if rate is None else effective_rate.rescale(rate)
        means, states = exchanger.exchange(sent, presence.weight, rescale)
        if self._shards is not None:
            means = self._shards.completed(means)
        self._exposed_s.assign_add(_time_after(means) - ready)
        pairs = list(zip(itertools.chain(*exchanger.states), itertools.chain(*states), strict=True))
        if rate is not None:
            pairs += [(effective_rate.variable, rate), (exchanger.seen, exchanger.now_seen(presence))]
        # Read by nobody in most steps; a collective whose result is not used would be left out.
        self._absent.assign(presence.absent)
        # At a rate of 0 the update does nothing, and what was sent would be lost.
        counts = True if rate is None else rate > 0.0
        missing = exchanger.groups([place for place, gradient in enumerate(grads) if gradient is None])
        update = functools.partial(_update_expected, means, missing, exchanger.expected(presence))
        if self.ends_with_first_rank:
            # Some ranks are out of data: the others' gradients are dropped, so that all end alike.
            everybody = presence.absent == 0.0
            self._apply_inner(means, variables, lambda apply: tf.cond(everybody, lambda: update(apply), lambda: None))
            counts = tf.logical_and(everybody, counts)
        else:
            self._apply_inner(means, variables, update)
        _assign_if(counts, means, pairs)

    def _apply_inner(self, means: list[Any], variables: list[Any], run: Callable[[_Apply], None]) -> None:
        with layer_norms.used(self.inner_optimizer, self._plans.norms(variables)):
            if self._shards is not None:
                self._shards.apply(means, run)
            else:
                run(lambda found: self.inner_optimizer.apply(found, variables))

    def _settings(self, count: Any) -> dict[str, Any]:
        """What has to be the same on all ranks, besides the variables and what the planner knows."""
        return {
            "counted": count is not None,
            "sample_count": self._count_samples and sample_counts.name(self._count_samples),
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "optimizer": [type(self.inner_optimizer).__name__, type(innermost(self)).__name__],
            **layer_norms.settings(self.inner_optimizer),
        }

    def _exchanger(self, variables: list[Any]) -> Exchanger:
        return self._plans.exchanger(variables, self.inner_optimizer)

    def _rank_state(self) -> list[tuple[Any, Piece]]:
        if self.built and not self._plans.agreed:
            self._exchanger(self._trainable_variables)
        accumulated = self._accumulation.rank_state(runtime.rank(), runtime.size()) if self._accumulation else []
        served = self._shards.rank_state if self._shards else ()
        return [*accumulated, *self._plans.rank_state(), *served]

    def _server_shards(self, variables: Sequence[Any]) -> ServerShards | None:
        if not self.policy.updates_at_servers:
            return None
        rules.check_not_built(self.inner_optimizer)
        return ServerShards(self._exchanger(list(variables)), variables)

    def _exchanges(self, variables: list[Any]) -> bool:
        """On one rank nothing is sent, but schemes may keep something, such as velocity."""
        return runtime.size() > 1 or any(self._exchanger(variables).states)


_Apply = Callable[[list[Any]], None]


def _update_expected(means: list[Any], missing: list[list[int]], expected: tf.Tensor, apply: _Apply) -> None:
    """Applies means; where no rank has a gradient, there is none.

    Args:
      means: Of all variables; `None` for those that are left out already.
      missing: Groups of places of those for which this rank has no gradient in the step that is traced. Others may
        have, for all of a group or for none.
      expected: Bool, one for each variable: whether there is a mean of it.
      apply: Takes means, with `None` where there is none.
    """
    if not any(mean is not None for mean in means):
        tf.debugging.Assert(False, ["There must be a gradient on some rank. Received: none for any variable."])
        return
    if not missing:
        apply(means)
        return
    group, *others = missing
    found = tf.gather(expected, group)
    without = [None if place in group else mean for place, mean in enumerate(means)]

    def with_group() -> None:
        rule = (
            "Of the variables without a gradient on this rank, all or none must have one on others. Received: some "
            "have. Give zeros as the gradients of all of them."
        )
        tf.debugging.Assert(tf.reduce_all(found), [rule, found])
        _update_expected(means, others, expected, apply)

    tf.cond(tf.reduce_any(found), with_group, lambda: _update_expected(without, others, expected, apply))


def _time_after(gradients: list[Any]) -> tf.Tensor:
    with tf.control_dependencies([tensor for g in gradients if g is not None for tensor in _made_of(g)]):
        return tf.timestamp()


def _made_of(gradient: Any) -> list[tf.Tensor]:
    if isinstance(gradient, Factors):
        return [gradient.left, gradient.right]
    return [gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient]


def _assign_if(wanted: Any, means: list[Any], pairs: list[Any]) -> None:
    """Keeps new scheme state only if the step counts: everybody took part, the rate is not 0, and all is finite."""
    if not pairs:
        return
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(m)) for m in means if m is not None])

    def assign() -> None:
        for variable, value in pairs:
            variable.assign(value)

    tf.cond(tf.logical_and(wanted, finite), assign, lambda: None)

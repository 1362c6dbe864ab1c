"""Wrapper around a Keras optimizer: what optimizers that communicate have in common."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Self

import keras
import tensorflow as tf
from typing_extensions import override

from tfposeidon import arguments, policies, ranges, sample_counts
from tfposeidon.communication import surroundings
from tfposeidon.exchange.joining import JoinHook, join_hooks
from tfposeidon.exchange.step import Step
from tfposeidon.gradients.description import describe
from tfposeidon.optimizers.wrapping import innermost, leaves
from tfposeidon.planning.plan import Plan
from tfposeidon.state.rank_state import StateDescription
from tfposeidon.training import keras_patches, one_writer, session
from tfposeidon.training.hooks import FitHooks


class OptimizerWrapper(keras.optimizers.Optimizer):
    """Base of optimizers that communicate, and let a Keras optimizer inside apply updates.

    Under `mixed_float16`, `compile` puts Keras's `LossScaleOptimizer` around it, as around any
    optimizer; see `apply_under`.

    Args:
      inner_optimizer: A Keras optimizer that is not wrapped yet.
      policy: Choice of the scheme by which a variable is exchanged.
      bucket_bytes: Bytes up to which small tensors are fused, at least 0.
      sample_count: Function from a batch to the number that ranks weigh by; `None` counts samples.
      gradient_accumulation_steps: Calls of `apply` for one update, where the wrapper adds them up.
      name: Name of the optimizer.

    Raises:
      TypeError: If `sample_count` is no function.
      ValueError: If an argument is out of its range, under `tf.distribute`, or with another Keras
        backend than TensorFlow.
    """

    built: bool
    _serialized: ClassVar[tuple[str, ...]] = ("inner_optimizer", "scheme", "sample_count")
    """Arguments in `get_config` that are objects, serialized by Keras."""
    has_own_inner: ClassVar[bool] = False
    """True if each rank has its own state of the inner optimizer, and of a loss scale."""

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        policy: policies.Policy,
        bucket_bytes: int,
        sample_count: sample_counts.SampleCount | None,
        gradient_accumulation_steps: int | None,
        name: str,
    ) -> None:
        surroundings.check_surroundings()
        arguments.check_inner(type(self).__name__, inner_optimizer, OptimizerWrapper)
        bucket_bytes = ranges.check_integer("bucket_bytes", bucket_bytes, 0)
        arguments.check_sample_count(sample_count)
        super().__init__(
            # Not read: `learning_rate` is that of the inner optimizer.
            learning_rate=0.0,
            gradient_accumulation_steps=gradient_accumulation_steps,
            name=name,
        )
        self.inner_optimizer = inner_optimizer
        self._around: Callable[[], keras.optimizers.LossScaleOptimizer | None] = lambda: None
        self._exchange = Step(self, policy, bucket_bytes, sample_count)
        # Here and not at import, which must change nothing for those who only load a module.
        keras_patches.patch_keras(OptimizerWrapper)
        session.note_made(self)

    # ------------------------------------------------------------------ state

    def _adopt(self, variables: Sequence[Any]) -> None:
        """Finishes `build`, once the inner optimizer is built: Keras's bookkeeping.

        Keras's own `build` would make accumulators for this wrapper, too.
        """
        # It serves replicas of tf.distribute, which is refused. It joins all gradients for them, so
        # that the first update, or pull from servers, waits for the last exchange, and registers a
        # gradient function, for ever, that holds the graph of each traced step.
        for leaf in leaves(self.inner_optimizer):
            leaf._all_reduce_sum_gradients = list
        # Past Keras, which would take the weights for variables of this optimizer's own.
        self.__dict__["_trainable_variables"] = list(variables)
        self._trainable_variables_indices = {self._var_key(v): i for i, v in enumerate(variables)}
        self._exchange.build()
        self.built = True

    @property
    def rank_variables(self) -> list[Any]:
        """Variables of `rank_state`."""
        return [variable for variable, _ in self.rank_state]

    @property
    def rank_state(self) -> list[tuple[Any, StateDescription]]:
        """State that differs from rank to rank: variables, each with its description.

        It holds accumulated gradients, the state of schemes, and this rank's shards of the inner
        optimizer. `keras_callbacks.Checkpoint` saves it per rank; `.keras` files do not hold it.
        """
        raise NotImplementedError

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
        """Averages of weights: under a loss scale, `SwapEMAWeights` looks for them here."""
        averages: list[Any] = innermost(self)._model_variables_moving_average
        return averages

    @property
    def optimizers(self) -> list[keras.optimizers.Optimizer]:
        """Optimizers of a `MultiOptimizer` inside, whose rates Keras's callbacks set one by one.

        Raises:
          AttributeError: If there is none inside.
        """
        found: list[keras.optimizers.Optimizer] = innermost(self).optimizers
        return found

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
        return self._made_plan()

    def _made_plan(self) -> Plan:
        return self._exchange.plans.plan(self._trainable_variables, self.inner_optimizer)

    @property
    def bytes_per_step(self) -> float:
        """Payload that this rank sends in a step, as the plan predicts: the mean over steps.

        Raises:
          RuntimeError: If the optimizer is not built.
        """
        return self.plan.cost.bytes / (self.gradient_accumulation_steps or 1)

    @override
    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Self:
        """Makes an optimizer of what `get_config` returned; needs neither Horovod nor a launcher.

        Args:
          config: Result of `get_config`; not changed.
          custom_objects: Classes and functions by the names in `config`, as in Keras.
        """
        objects: dict[str, Any] = {
            key: keras.saving.deserialize_keras_object(config[key], custom_objects=custom_objects)
            for key in cls._serialized
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
        if self._exchange.exchangers:
            one_writer.warn_if_all_save()

    @override
    def load_own_variables(self, store: Any) -> None:
        """Loads nothing: Keras loads the inner optimizer as a part of this one."""

    # ------------------------------------------------------------------ steps

    def prepare(self, variables: Sequence[Any]) -> None:
        """Makes the variables that an exchange needs, before a step is traced.

        Args:
          variables: Trainable variables that the step gives to `apply`, all of them in this order.
        """
        self._exchange.exchanger(variables)

    # AutoGraph would convert all that a hand-written step calls; nothing in here needs it.
    @override
    @tf.autograph.experimental.do_not_convert
    def apply(
        self, grads: Iterable[Any], trainable_variables: Any = None, sample_count: Any = None
    ) -> None:
        """Takes a step by the gradients of this rank's batch.

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
        if self._around() is not None:
            # Means, which the loss scale has found finite, and has unscaled.
            self.inner_optimizer.apply(grads, trainable_variables)
        else:
            self._take_step(grads, trainable_variables, sample_count)

    @tf.autograph.experimental.do_not_convert
    def apply_under(
        self,
        loss_scale: keras.optimizers.LossScaleOptimizer,
        grads: Iterable[Any],
        trainable_variables: Any = None,
        sample_count: Any = None,
    ) -> None:
        """Takes a step as `apply` does, for Keras's loss scale around this optimizer.

        Gradients are averaged first, so that all ranks see the same infinity. The loss scale then
        is the `updater`: it asks whether the means are finite, and gives them to `apply`.

        Args:
          loss_scale: The loss scale, by which the gradients are scaled.
          grads: Gradients, as `apply` takes them.
          trainable_variables: Trainable variables, as `apply` takes them.
          sample_count: Number of samples, as `apply` takes it.

        Raises:
          ValueError: As `apply` does.
          RuntimeError: As `apply` does.
        """
        # As Keras does to what it puts a loss scale around: gradients are unscaled once.
        self.inner_optimizer.loss_scale_factor = None
        # A reference: neither Keras nor `leaves` must take it for an optimizer inside.
        before, self._around = self._around, weakref.ref(loss_scale)
        try:
            self._take_step(grads, trainable_variables, sample_count)
        finally:
            self._around = before

    @property
    def updater(self) -> keras.optimizers.Optimizer:
        """Optimizer that applies the means: the loss scale in a step of it, or the inner one."""
        return self._around() or self.inner_optimizer

    def _take_step(self, grads: Iterable[Any], variables: Any, sample_count: Any) -> None:
        grads = list(grads)
        if not grads:
            return
        variables = list(self._trainable_variables if variables is None else variables)
        session.note_applied(self._around() or self, variables)
        self._check(grads, variables)
        count = self._exchange.batch.current if sample_count is None else sample_count
        self._step(grads, variables, count)

    def _step(self, grads: list[Any], variables: list[Any], count: Any) -> None:
        """Carries out one call of `apply`.

        Args:
          grads: Gradients, one per variable.
          variables: Variables of the gradients, in the same order.
          count: Number of samples behind the gradients, a scalar; `None` for equal weights.
        """
        raise NotImplementedError

    def _check(self, grads: list[Any], variables: list[Any]) -> None:
        if not self.built:
            with surroundings.made_before_the_trace():
                self.build(variables)
        scale = self._around()
        if scale is not None and not scale.built:
            # In the trace: the step is traced again, as `scale_loss` did not know its variables.
            with tf.init_scope():
                scale.build(variables)
        self._check_variables_are_known(variables)
        if len(grads) != len(variables):
            raise ValueError(
                f"There must be a gradient per variable. Received: {len(grads)} gradients and "
                f"{len(variables)} variables. Give None for variables without one."
            )

    @override
    def apply_gradients(self, grads_and_vars: Iterable[Any], sample_count: Any = None) -> Any:
        """Takes a step by gradients given as pairs, as `apply` does.

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
        """Multiplies a loss by the inner optimizer's `loss_scale_factor`, if it has one.

        Args:
          loss: Loss, a scalar tensor.
        """
        return self.inner_optimizer.scale_loss(loss)

    @override
    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Ends `fit` as the inner optimizer does.

        Args:
          var_list: The trainable variables.
        """
        self.inner_optimizer.finalize_variable_values(var_list)

    @override
    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Excludes variables from the weight decay of the inner optimizer; call it before `build`.

        Args:
          var_list: Variables to exclude.
          var_names: Parts of names: variables whose names contain one of them are excluded.
        """
        for leaf in leaves(self.inner_optimizer):
            leaf.exclude_from_weight_decay(var_list, var_names)

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
          ValueError: If `scheme` is unknown, or the optimizer cannot change its scheme.
        """
        policy = policies.parse(scheme)
        self.check_change(policy)
        self._exchange.plans.change_policy(policy)

    def check_change(self, policy: policies.Policy) -> None:
        """Refuses a change to a scheme that cannot follow the one in use.

        Args:
          policy: What `change_scheme` would exchange by.

        Raises:
          ValueError: As `change_scheme` does.
        """

    @property
    def exposed_s(self) -> float:
        """Communication that computation did not hide, in seconds over all steps that were timed.

        It is the time between a step's last gradient and its last mean; on GPUs, where ops are
        queued, only a hint. Steps are timed in a `fit` with `keras_callbacks.Throughput`, in the
        first steps of a `fit` by `auto`, and after `optimizer.exchange.is_timed = True`.

        Raises:
          RuntimeError: If no steps are or were timed.
        """
        return self._exchange.exposed_s

    @property
    def exchange(self) -> Step:
        """Object that exchanges the gradients, for training loops and callbacks."""
        return self._exchange

    @property
    def agreed_settings(self) -> dict[str, Any]:
        """Settings of its own that have to be the same on all ranks, for JSON."""
        return {}

    def join_hooks(self) -> list[JoinHook]:
        """Returns the exchanges that this rank joins once it has no data; none before a step."""
        return join_hooks(self._exchange)

    # ------------------------------------------------------------------ weights of each rank

    def fit_hooks(self, model: Any) -> FitHooks:
        """Returns what `fit` of a model does for this optimizer: callbacks, and hooks of steps.

        Args:
          model: Model that is about to be trained.
        """
        return FitHooks()

    def global_weights(self, assign: bool = False) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the variables hold weights that are equal on all ranks.

        Args:
          assign: True where weights that are assigned within it are the new global ones.
        """
        return contextlib.nullcontext()


def build_inner(optimizer: Any, variables: Sequence[Any]) -> None:
    """Builds an inner optimizer, where weights themselves are exchanged: all floating point."""
    for variable in variables:
        describe(variable)
    if not optimizer.built:
        optimizer.build(variables)


def unwrap(optimizer: keras.optimizers.Optimizer) -> OptimizerWrapper:
    """Returns the optimizer that communicates, without Keras's loss scale around it.

    Under `mixed_float16`, `compile` puts a `LossScaleOptimizer` around the optimizer that it is
    given: then `model.optimizer` is the loss scale.

    Args:
      optimizer: A `DistributedOptimizer`, `LocalUpdates` or `ElasticAveraging`, or a
        `LossScaleOptimizer` around one.

    Returns:
      The optimizer itself, or the one inside.

    Raises:
      TypeError: For any other value.

    Example:
      >>> import keras, tfposeidon as tp
      >>> optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.1))
      >>> tp.unwrap(keras.optimizers.LossScaleOptimizer(optimizer)) is optimizer
      True
    """
    found = session.without_loss_scale(optimizer)
    if not isinstance(found, OptimizerWrapper):
        raise TypeError(
            "`optimizer` must be a DistributedOptimizer, LocalUpdates or ElasticAveraging, or a "
            f"LossScaleOptimizer around one. Received: {optimizer!r} of type "
            f"{type(optimizer).__name__}. Pass `model.optimizer` of a model compiled with one."
        )
    return found

"""Defines the base class of optimizers that communicate.

Think of such an optimizer as a Keras optimizer that contains another one: `apply` validates its
arguments and calls `_step` of a subclass, which communicates and lets the inner optimizer update
the variables.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import keras
import tensorflow as tf
from typing_extensions import override

from tfposeidon import checks, policies, sample_counts
from tfposeidon.communication import runtime
from tfposeidon.exchange.plan import Plan
from tfposeidon.exchange.step import Step
from tfposeidon.gradients import describe
from tfposeidon.optimizers.wrapper import OptimizerWrapper, innermost, leaves
from tfposeidon.schemes import names
from tfposeidon.state.placement import StateDescription
from tfposeidon.training import fit_arguments, keras_patches, session
from tfposeidon.training.hooks import FitHooks

HOROVODS = {
    "compression": "the scheme defines the compression: "
    'scheme=tp.schemes.AllToAll(wire_dtype="float16") halves the bytes, "hitopk" sends only '
    "the largest elements",
    "backward_passes_per_step": "use gradient_accumulation_steps for 2 or more, and leave it out "
    "for 1; gradients of n calls are averaged: for sums, multiply the learning rate by n",
    "average_aggregated_gradients": "leave it out: accumulated gradients are averaged; for sums, "
    "multiply the learning rate by gradient_accumulation_steps",
    "op": "leave it out: gradients are averaged over ranks",
    "gradient_predivide_factor": "leave it out: gradients are averaged over ranks, and 16-bit "
    "schemes scale gradients before the cast",
    "sparse_as_dense": "leave it out: embedding gradients are summed by row and sent as a dense "
    'tensor, or as rows with scheme="hybcomm"',
    "num_groups": "use bucket_bytes, the size up to which gradients are fused",
    "groups": "use bucket_bytes, the size up to which gradients are fused",
    "process_set": "leave it out: all ranks of the job take part",
    "device_dense": "leave it out: gradients are exchanged on the device that holds them",
    "device_sparse": "leave it out: gradients are exchanged on the device that holds them",
    "scale_local_gradients": "leave it out: all gradients are averaged over ranks",
}
"""Maps each argument of Horovod's `DistributedOptimizer` for Keras to its replacement."""


class CommunicatingOptimizer(OptimizerWrapper):
    """Base class of optimizers that communicate, and let an inner Keras optimizer apply updates.

    Under `mixed_float16`, `compile` wraps this optimizer in Keras's `LossScaleOptimizer`; see
    `apply_under`. Subclasses document the arguments of the constructor, and end `build` with
    `_exchange.build()` and `_adopt(variables)`.
    """

    _serialized: ClassVar[tuple[str, ...]] = (
        *OptimizerWrapper._serialized,
        "scheme",
        "sample_count",
    )
    has_own_inner: ClassVar[bool] = False
    """True if each rank has its own state of the inner optimizer and of a loss scale."""

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        policy: policies.Policy,
        bucket_bytes: int | None,
        sample_count: sample_counts.SampleCount | None,
        gradient_accumulation_steps: int | None,
        name: str,
    ) -> None:
        runtime.check_environment()
        _check_inner(type(self).__name__, inner_optimizer)
        if bucket_bytes is not None:
            bucket_bytes = checks.check_integer("bucket_bytes", bucket_bytes, 0)
        if sample_count is not None and not callable(sample_count):
            raise TypeError(
                "`sample_count` must be a function that maps a batch to a number. Received: "
                f"sample_count={sample_count!r}. In a custom training loop, pass `sample_count` "
                "to `apply` instead."
            )
        super().__init__(inner_optimizer, gradient_accumulation_steps, name)
        # Number of functions in which XLA compiles the gradients; 0 without XLA.
        self.xla_functions = 0
        self._around: Callable[[], keras.optimizers.LossScaleOptimizer | None] = lambda: None
        self._exchange = Step(self, policy, bucket_bytes, sample_count)
        # Patch Keras here, because importing this module must not change Keras.
        keras_patches.patch_keras()
        session.alive.add(self)

    # ------------------------------------------------------------------ state

    @property
    def rank_state(self) -> list[tuple[Any, StateDescription]]:
        """Variables whose values differ between ranks, each with its description.

        They contain accumulated gradients, the state of schemes, and this rank's shards of the
        inner optimizer's state. `keras_callbacks.Checkpoint` saves them per rank; `.keras` files do
        not contain them.
        """
        raise NotImplementedError

    @property
    def plan(self) -> Plan:
        """Plan of the exchange: scheme of each variable, its cost, and the reason for its choice.

        `print(optimizer.plan)` shows the plan as a table. After the first step, it is the plan of
        the last step.

        Raises:
          RuntimeError: If the optimizer is not built.
        """
        check_built(self)
        return self._exchange.plans.plan(self._trainable_variables, self.inner_optimizer)

    @property
    def bytes_per_step(self) -> float:
        """Predicted number of payload bytes that this rank sends per step, averaged over steps."""
        return self.plan.cost.bytes / (self.gradient_accumulation_steps or 1)

    @override
    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Self:
        names.register_all()
        return super().from_config(config, custom_objects)

    @override
    def save_own_variables(self, store: Any) -> None:
        """Saves no variables, because Keras saves the inner optimizer as a part of this one."""
        if self._exchange.exchangers:
            fit_arguments.warn_if_all_save()

    # ------------------------------------------------------------------ steps

    # Exclude this code from AutoGraph, which would needlessly convert it in custom train steps.
    @override
    @tf.autograph.experimental.do_not_convert
    def apply(
        self, grads: Iterable[Any], trainable_variables: Any = None, sample_count: Any = None
    ) -> None:
        """Performs one step with the gradients of this rank's batch.

        Args:
          grads: Gradients, one per variable: tensors, `IndexedSlices` or `None`. A call with an
            empty list has no effect.
          trainable_variables: Trainable variables; by default, those of `build`.
          sample_count: Number of samples from which this rank computed the gradients. Ranks are
            weighted by these numbers, so that averaged gradients are exact for unequal batches.
            `None` (default) uses the count of `fit`, and outside of `fit` weights all ranks
            equally. If one rank passes a number, all ranks must pass one.

        Raises:
          ValueError: When a step is traced, if it is inside XLA or `tf.distribute`, if the numbers
            of gradients and variables differ, or if the optimizer was built with other variables.
          RuntimeError: At the first step, if variables or settings differ between ranks.
        """
        if self._around() is not None:
            # The loss scale has checked that these averaged gradients are finite, and has unscaled
            # them.
            self.inner_optimizer.apply(grads, trainable_variables)
        elif call := self._checked(grads, trainable_variables, sample_count):
            self._step(*call)

    @tf.autograph.experimental.do_not_convert
    def apply_under(
        self,
        loss_scale: keras.optimizers.LossScaleOptimizer,
        grads: Iterable[Any],
        trainable_variables: Any = None,
        sample_count: Any = None,
    ) -> None:
        """Performs a step as `apply` does, for a Keras loss scale around this optimizer."""
        # Prevent the inner optimizer from unscaling gradients a second time. Keras does the same
        # for the inner optimizer of a loss scale.
        self.inner_optimizer.loss_scale_factor = None
        # Use a weak reference, so that neither Keras nor `leaves` mistakes the loss scale for an
        # inner optimizer.
        before, self._around = self._around, weakref.ref(loss_scale)
        # Average gradients first, so that all ranks detect the same infinities. The loss scale is
        # then the `updater`: it checks that averaged gradients are finite, and passes them to
        # `apply`.
        try:
            if call := self._checked(grads, trainable_variables, sample_count):
                self._step(*call)
        finally:
            self._around = before

    @property
    def updater(self) -> keras.optimizers.Optimizer:
        """Optimizer for averaged gradients: a loss scale in its step, else the inner optimizer."""
        return self._around() or self.inner_optimizer

    def _checked(
        self, grads: Iterable[Any], variables: Any, sample_count: Any
    ) -> tuple[list[Any], list[Any], Any] | None:
        """Validates the arguments of `apply`, and builds this optimizer and a loss scale if needed.

        Returns the arguments of `_step`, or `None` if there are no gradients.
        """
        grads = list(grads)
        if not grads:
            return None
        variables = list(self._trainable_variables if variables is None else variables)
        scale = self._around()
        session.check_is_known(self, variables)
        if not self.built:
            with runtime.variables_outside_trace():
                self.build(variables)
        if scale is not None and not scale.built:
            # Create these variables within the trace, so that TensorFlow traces the step again:
            # `scale_loss` ran before the variables existed.
            with tf.init_scope():
                scale.build(variables)
        for variable in variables:
            self._index_of(variable)
        if len(grads) != len(variables):
            raise ValueError(
                f"apply requires one gradient per variable. Received: {len(grads)} gradients and "
                f"{len(variables)} variables. Pass None for variables without a gradient."
            )
        count = self._exchange.batch.current if sample_count is None else sample_count
        return grads, variables, count

    def _step(self, grads: list[Any], variables: list[Any], count: Any) -> None:
        """Executes one call of `apply`; `count` weights this rank, `None` weights ranks equally."""
        raise NotImplementedError

    @property
    def policy(self) -> policies.Policy:
        """Policy that chooses the scheme of each variable."""
        return self._exchange.plans.policy

    def change_scheme(self, scheme: Any) -> None:
        """Changes the scheme, from the next traced step on.

        The state of the old scheme is discarded. To change schemes during `fit`, use
        `keras_callbacks.SchemeSchedule`, which first sends the old scheme's residuals and then
        retraces the step.

        Args:
          scheme: Any value that the constructor accepts. All ranks must pass the same value at the
            same step.

        Raises:
          ValueError: If `scheme` is unknown, or the optimizer cannot change its scheme.
        """
        policy = policies.parse(scheme)
        self.check_change(policy)
        self._exchange.plans.change_policy(policy)

    def check_change(self, policy: policies.Policy) -> None:
        """Raises `ValueError` if the optimizer cannot change to the schemes of `policy`."""

    @property
    def exposed_s(self) -> float:
        """Seconds of communication that computation did not hide, over all timed steps.

        This is the time from a step's last gradient to its last averaged gradient. On GPUs, where
        ops are queued, it is only an estimate. Steps are timed in a `fit` with
        `keras_callbacks.Throughput`, in the first steps of a `fit` with `scheme="auto"`, and after
        `optimizer.exchange.is_timed = True`.

        Raises:
          RuntimeError: If steps have not been timed.
        """
        return self._exchange.exposed_s

    @property
    def exchange(self) -> Step:
        """Object that exchanges the gradients, for training loops and callbacks."""
        return self._exchange

    # ------------------------------------------------------------------ weights of each rank

    def fit_hooks(self, model: Any) -> FitHooks:
        """Returns the callbacks and step hooks that `fit` of a model needs for this optimizer."""
        exchange = self._exchange
        return FitHooks(prepare=exchange.exchanger, join_hooks=exchange.join_hooks)

    def global_weights(self, assign: bool = False) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the variables hold the global weights, equal on all ranks.

        With `assign`, values that are assigned to variables in the context become global weights.
        """
        return contextlib.nullcontext()


def check_built(optimizer: Any) -> None:
    """Raises `RuntimeError` if the optimizer is not built and therefore has no plan."""
    if not optimizer.built:
        raise RuntimeError(
            "The optimizer must be built before its plan is read. Received: an optimizer that is "
            "not built. Call fit, or optimizer.build(model.trainable_variables), first."
        )


def build_inner(optimizer: Any, variables: Sequence[Any]) -> None:
    """Builds an inner optimizer for variables, all of which must be floating point."""
    for variable in variables:
        describe(variable)
    if not optimizer.built:
        optimizer.build(variables)


def unwrap(optimizer: keras.optimizers.Optimizer) -> CommunicatingOptimizer:
    """Returns the optimizer that communicates, without Keras's loss scale around it.

    Under `mixed_float16`, `compile` wraps the optimizer in a `LossScaleOptimizer`, which is then
    `model.optimizer`.

    Args:
      optimizer: A `DistributedOptimizer`, `LocalUpdates` or `ElasticAveraging`, or a
        `LossScaleOptimizer` around one.

    Returns:
      `optimizer` itself, or the inner optimizer of the loss scale.

    Raises:
      TypeError: If `optimizer` is of another type.

    Example:
      >>> import keras, tfposeidon as tp
      >>> optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.1))
      >>> tp.unwrap(keras.optimizers.LossScaleOptimizer(optimizer)) is optimizer
      True
    """
    found = session.without_loss_scale(optimizer)
    if not isinstance(found, CommunicatingOptimizer):
        raise TypeError(
            "`optimizer` must be a DistributedOptimizer, LocalUpdates or ElasticAveraging, or a "
            f"LossScaleOptimizer that wraps one. Received: {optimizer!r} of type "
            f"{type(optimizer).__name__}. Pass `model.optimizer` of a model compiled with one."
        )
    return found


# ------------------------------------------------------------------ arguments


def check_no_more_arguments(
    owner: str, others: Mapping[str, Any], horovods: Mapping[str, str] = HOROVODS
) -> None:
    """Raises one `TypeError` for all unknown arguments; names the replacements for Horovod's."""
    if not others:
        return
    lines = [
        f"{name}={value!r}: {horovods.get(name, f'{owner} has no argument `{name}`, leave it out')}"
        for name, value in others.items()
    ]
    than = "" if horovods.keys().isdisjoint(others) else " (its arguments differ from Horovod's)"
    raise TypeError(
        f"{owner} does not support these arguments{than}. Received: {'; '.join(lines)}."
    )


def _check_inner(owner: str, inner: Any) -> None:
    """Raises `ValueError` if `inner` communicates, is a loss scale, or is not a Keras optimizer."""
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise ValueError(
            f"`inner_optimizer` must be a Keras 3 optimizer. Received: {inner!r} of type "
            f"{type(inner).__name__}. Pass, for example, keras.optimizers.SGD(0.1)."
        )
    if any(isinstance(one, CommunicatingOptimizer) for one in (inner, innermost(inner))):
        raise ValueError(
            "An optimizer must be wrapped only once, in DistributedOptimizer, LocalUpdates or "
            "ElasticAveraging. Received: an optimizer that is already wrapped. Use it unchanged, "
            "or wrap its inner_optimizer."
        )
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "LossScaleOptimizer must wrap the communicating optimizer: it must check the "
            f"averaged gradients for infinities and NaN. Received: {type(inner).__name__} as the "
            f"inner optimizer. Write LossScaleOptimizer({owner}(optimizer)), or compile the model "
            "under mixed_float16, which adds the loss scale."
        )


def check_no_averages(optimizer: str, inner: Any) -> None:
    """Raises `ValueError` for `use_ema`, which would average weights that differ between ranks."""
    if any(leaf.use_ema for leaf in leaves(inner)):
        raise ValueError(
            f"{optimizer} does not support use_ema, because weights differ between ranks. "
            "Received: an inner optimizer with use_ema=True. Remove use_ema from the inner "
            "optimizer."
        )


def check_all_variables(
    optimizer: str, given: Sequence[Any], known: Sequence[Any], alternative: str = ""
) -> None:
    """Raises `ValueError` unless a call updates all variables of an optimizer, in their order."""
    if [id(variable) for variable in given] != [id(variable) for variable in known]:
        raise ValueError(
            f"{optimizer} must update all its variables in each call, in their order. Received: "
            f"gradients for {len(given)} of {len(known)} variables, or in another order. Use a "
            f"separate optimizer for each list of variables{alternative}."
        )


def check_saves_weights_only(name: str, callbacks: Sequence[Any]) -> None:
    """Raises `ValueError` if an `OrbaxCheckpoint` saves optimizer state, which differs by rank."""
    for one in callbacks:
        if isinstance(one, keras.callbacks.OrbaxCheckpoint) and not one.save_weights_only:
            raise ValueError(
                f"With {name}, OrbaxCheckpoint must save weights only, because ranks hold "
                "different state of the optimizer. Received: OrbaxCheckpoint with "
                "save_weights_only=False. Set it to True, or use keras_callbacks.Checkpoint."
            )

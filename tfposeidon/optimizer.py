"""`DistributedOptimizer`: any Keras optimizer, applied to gradients averaged over all ranks.

A step has up to three parts: accumulation of gradients over calls, their exchange by schemes, and
the update by the inner optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from tfposeidon import checks, communicating, policies, sample_counts
from tfposeidon.communicating import CommunicatingOptimizer
from tfposeidon.communication import runtime
from tfposeidon.exchange import parallel_operator
from tfposeidon.exchange.exchanger import Afterwards, Exchanger
from tfposeidon.exchange.means import Means
from tfposeidon.gradients import Accumulation
from tfposeidon.optimizers.wrapper import accumulated_steps, leaves, step_counter
from tfposeidon.state.placement import StateDescription
from tfposeidon.training.hooks import FitHooks


@keras.saving.register_keras_serializable("tfposeidon")
class DistributedOptimizer(CommunicatingOptimizer):
    """Averages gradients over all ranks, then lets the inner optimizer apply them.

    It works in `fit`, `train_on_batch` and custom training loops. Gradients are averaged before the
    inner optimizer clips them. Under `mixed_float16`, `compile` wraps it in Keras's
    `LossScaleOptimizer`: gradients are averaged before the loss scale tests whether they are
    finite, and `tp.unwrap(model.optimizer)` returns this optimizer.

    Args:
      inner_optimizer: A Keras optimizer that is not distributed yet. If it has
        `gradient_accumulation_steps`, there is one exchange per update.
      scheme: Scheme of the gradient exchange (default `"auto"`), the same on all ranks: a
        name, such as `"auto"`, `"allreduce"`, `"torus2d"`, `"ps"` or `"hitopk"` (`docs/schemes.md`
        lists all); an object of `tfposeidon.schemes` such as `AllToAll(wire_dtype="float16")`, of
        `tfposeidon.policies` or of a custom scheme; or rules `[(pattern, scheme), ...]`. The first
        rule whose pattern is found in a variable's path decides.
      bucket_bytes: Maximum size in bytes of a bucket of fused gradients (default `None`: 4 MiB, or
        the size that `"auto"` predicts to be fastest). Gradients of at least a quarter of this size
        are not fused. Exchanges of smaller buckets start earlier. Larger buckets need fewer
        messages, which matters more for `"alltoall"` and `"torus2d"` than for `"allreduce"`. With
        0, no gradients are fused.
      gradient_accumulation_steps: Number of calls of `apply` whose gradients are averaged for one
        exchange and one update (default `None`: the inner optimizer's setting, which takes
        precedence). The number is set in the inner optimizer, which must not be built.
      sample_count: Function that returns the weight of this rank in `fit` and `train_on_batch`,
        from the argument of the train step, such as `(x, y, sample_weight)`. `None` (default)
        counts samples, which is exact for losses that are means over samples.
        `tfposeidon.sample_counts` has functions for other losses; to save the model, register a
        custom function with Keras.
      synchronize_model: True (default) if `fit` starts all ranks with the weights and state of rank
        0, computes metrics over the samples of all ranks, averages the moving statistics of layers
        before validation and at the end of each epoch, and compares replicas after the first step,
        before each epoch and at the end. False if the script does this itself.
      xla_segments: Number of functions, at least 1, in which XLA compiles the gradients of Keras's
        own train step; exchange and update run outside. `None` (default) is 1 with
        `compile(jit_compile=True)` on CPUs, else XLA is off if there are several ranks or schemes
        with state. Functions compute about equally many gradients each, which are exchanged when
        their function ends, so 1 hides no communication.
      name: Name of the optimizer (default `"distributed_optimizer"`).
      **others: Unknown arguments, which raise a `TypeError`. For arguments of Horovod's optimizer,
        the error names the replacement.

    Raises:
      TypeError: For unknown arguments, or if `sample_count` is not a function.
      ValueError: If an argument is out of its range, if the inner optimizer is incompatible with
        the scheme, under `tf.distribute`, or with a Keras backend other than TensorFlow.

    Example:
      >>> import keras, tfposeidon as tp
      >>> optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.1), scheme="alltoall")
      >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
      >>> model.compile(optimizer=optimizer, loss="mse")

      Another scheme for some variables:

      >>> half = tp.schemes.AllToAll(wire_dtype="float16")
      >>> rules = [("embedding", half), (".*", tp.schemes.HiTopK(density=0.001))]
      >>> optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.1), scheme=rules)
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        scheme: Any = "auto",
        *,
        bucket_bytes: int | None = None,
        gradient_accumulation_steps: int | None = None,
        sample_count: sample_counts.SampleCount | None = None,
        synchronize_model: bool = True,
        xla_segments: int | None = None,
        name: str | None = None,
        **others: Any,
    ) -> None:
        communicating.check_no_more_arguments("DistributedOptimizer", others)
        super().__init__(
            inner_optimizer,
            policies.parse(scheme),
            bucket_bytes,
            sample_count,
            gradient_accumulation_steps=gradient_accumulation_steps,
            name=name or "distributed_optimizer",
        )
        if gradient_accumulation_steps and not accumulated_steps(inner_optimizer):
            _accumulate_inside(inner_optimizer, gradient_accumulation_steps)
        self.gradient_accumulation_steps = accumulated_steps(inner_optimizer)
        if xla_segments is not None:
            xla_segments = checks.check_integer("xla_segments", xla_segments, 1)
        self.synchronize_model, self.xla_segments = synchronize_model, xla_segments
        self._accumulation: Accumulation | None = None
        self._afterwards: Afterwards | None = None

    # ------------------------------------------------------------------ state

    @override
    def build(self, variables: Sequence[Any]) -> None:
        """Creates the inner optimizer's state, and accumulators if gradients are accumulated.

        Args:
          variables: The trainable variables.

        Raises:
          ValueError: If a variable is not floating point, or if inner optimizers accumulate
            gradients over different numbers of calls.
        """
        # Keras passes no variables when it loads an .h5 file.
        if self.built or not variables:
            return
        self._build_inner(variables)
        if steps := self.gradient_accumulation_steps:
            # A `MultiOptimizer` creates optimizers in `build`, after the setting was applied.
            if accumulated_steps(self.inner_optimizer) != steps:
                raise ValueError(
                    "All inner optimizers must accumulate gradients over the same number of calls. "
                    f"Received: gradient_accumulation_steps={steps}, and an inner optimizer that "
                    "was created later without it. Pass gradient_accumulation_steps to its "
                    "constructor."
                )
            self._accumulation = Accumulation(self, variables)
        self._exchange.build()
        self._adopt(variables)

    def _build_inner(self, variables: Sequence[Any]) -> None:
        communicating.build_inner(self.inner_optimizer, variables)

    @property
    @override
    def variables(self) -> list[Any]:
        """Variables of the inner optimizer, which are equal on all ranks."""
        return list(self.inner_optimizer.variables)

    @override
    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, for saving with the model."""
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "scheme": keras.saving.serialize_keras_object(self.policy),
            "bucket_bytes": self._exchange.plans.bucket_bytes,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "sample_count": keras.saving.serialize_keras_object(self._exchange.batch.function),
            "synchronize_model": self.synchronize_model,
            "xla_segments": self.xla_segments,
        }

    # ------------------------------------------------------------------ steps

    @override
    def _step(self, grads: list[Any], variables: list[Any], count: Any) -> None:
        with self._exchange.call(grads, variables, count):
            if self._accumulation is None:
                exchange, averaged = self._exchange.prepare(grads, variables, count)
                self._apply(averaged(*exchange()), variables)
            else:
                self._accumulate(self._accumulation, grads, variables, count)

    def _accumulate(
        self, accumulation: Accumulation, grads: list[Any], variables: list[Any], count: Any
    ) -> None:
        """Calls the inner optimizer with accumulated gradients, or zeros if no update is due."""
        # The inner optimizer accumulates as well. It receives zeros, and in the call that makes an
        # update, the averaged gradients times the number of calls.
        inner, updater, batch = self.inner_optimizer, self.updater, self._exchange.batch
        # As in Keras, calls have equal weights unless the user provides weights.
        own = None if batch.is_of_rows(count) else count
        rows = None if batch.is_known(count) or own is not None else count
        share, finite, everybody = self._exchange.join_call(
            grads, variables, rows, skips=updater is not inner
        )

        def wait() -> None:
            # If the gradients of one rank are not finite, all ranks skip the call.
            value = 0.0 if finite is None else tf.where(finite, 0.0, float("nan"))
            apply = functools.partial(self._apply_to_all, variables, value)
            if everybody is None:
                apply()
            else:
                tf.cond(everybody, apply, lambda: None)

        def update(grads: list[Any], weight: Any, calls: Any) -> None:
            # Scale by all calls of the update if the user provides weights, because the weights of
            # calls before the optimizer was wrapped are unknown.
            factor = calls if own is None else self.gradient_accumulation_steps
            exchange, averaged = self._exchange.prepare(grads, variables, weight)
            self._apply(averaged(*exchange()), variables, factor)

        accumulation.add(
            [self._index_of(variable) for variable in variables],
            grads,
            update,
            wait,
            weight=share if own is None else own,
            is_due=self._is_due(),
            scale=updater.scale_loss(1.0),
            # A loss scale may skip a call, depending on the averaged gradients. Once a rank has
            # exhausted its input, calls without an update are skipped, too.
            counter=None if finite is None and everybody is None else step_counter(inner),
        )

    def _apply_to_all(self, variables: list[Any], value: Any) -> None:
        grads = [tf.fill(tuple(v.shape), tf.cast(value, v.dtype)) for v in variables]
        self.updater.apply(grads, variables)

    def _apply(self, means: Means, variables: list[Any], factor: Any = None) -> None:
        """Updates the variables with averaged gradients, times a factor; `None` means 1."""
        means = self._received(means)
        if factor is not None:
            means = means.times(factor, variables)
        norms = self._exchange.exchanger(variables).norm_method.norms
        with parallel_operator.override_norms(self.inner_optimizer, norms):
            self._update(means, variables)
        # Assign the state of schemes last, because a skipped step must not change it, and the
        # averaged gradients determine whether a step is skipped.
        means.keep_state()

    def _received(self, means: Means) -> Means:
        """Returns the averaged gradients in the form that the inner optimizer applies."""
        return means

    def _update(self, means: Means, variables: list[Any]) -> None:
        # The inner optimizer clips averaged gradients, by norms of the global batch's gradients, as
        # in one process.
        means.update(lambda found: self.updater.apply(found, variables))

    def _join_exchange(self, exchanger: Exchanger, call: int, eagerly: bool) -> bool:
        return exchanger.join(call, eagerly, self._afterwards)

    def _join_call(self, exchanger: Exchanger, call: int, eagerly: bool) -> bool:
        """Joins a call of the other ranks, which may accumulate gradients without an update."""
        contribute = exchanger.contribute_to_call
        absent = (contribute.python_function if eagerly else contribute)(call)
        have_all_ended = int(absent) == exchanger.wire.topology.size
        # `_is_due` has the same value here as on the other ranks before their call.
        if not have_all_ended and self._is_due().numpy():
            self._join_exchange(exchanger, call, eagerly)
        return have_all_ended

    def _is_due(self) -> tf.Tensor:
        """Returns whether the next call makes an update."""
        calls = tf.convert_to_tensor(step_counter(self.inner_optimizer)) + 1
        return calls % self.gradient_accumulation_steps == 0

    @override
    def fit_hooks(self, model: Any) -> FitHooks:
        join = self._join_exchange if self._accumulation is None else self._join_call
        return replace(
            super().fit_hooks(model),
            join_hooks=functools.partial(self._exchange.join_hooks, join),
            abandon_update=self._abandon_update if self._accumulation else None,
            synchronizes_model=self.synchronize_model,
        )

    def _abandon_update(self) -> None:
        """Discards gradients that were accumulated for an update that will not happen."""
        counter = step_counter(self.inner_optimizer)
        calls = int(counter.numpy()) % (self.gradient_accumulation_steps or 1)
        if self._accumulation is None or not calls:
            return
        self._accumulation.reset()
        for leaf in leaves(self.inner_optimizer):
            if leaf.built:
                step_counter(leaf).assign_sub(calls)
        runtime.log_once(
            "tfposeidon: a rank exhausted its input in the middle of an update; all ranks "
            "discard the accumulated gradients of %d call(s).",
            calls,
        )

    @property
    @override
    def rank_state(self) -> list[tuple[Any, StateDescription]]:
        # Create the plan, and with it the state of schemes, because a checkpoint may be loaded
        # before the first step.
        if self.built and not self._exchange.plans.exchangers:
            self._exchange.exchanger(self._trainable_variables)
        accumulated = self._accumulation.rank_state(runtime.size()) if self._accumulation else []
        of_schemes = self._exchange.plans.rank_state(self._trainable_variables)
        return [*accumulated, *of_schemes]


def _accumulate_inside(optimizer: Any, steps: int) -> None:
    """Configures an optimizer to accumulate gradients over `steps` calls, as in its constructor."""
    for leaf in leaves(optimizer):
        own = leaf.gradient_accumulation_steps
        if leaf.built or own not in (None, steps):
            raise ValueError(
                "`gradient_accumulation_steps` must be set before the inner optimizer is built, "
                f"and only once. Received: gradient_accumulation_steps={steps} around a "
                f"{type(leaf).__name__} {'that is built' if leaf.built else f'with {own}'}. Pass "
                "gradient_accumulation_steps to the constructor of the inner optimizer."
            )
        leaf.gradient_accumulation_steps = steps

"""`DistributedOptimizer`: any Keras optimizer, fed with the mean gradients of all ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from tfposeidon import arguments, policies, sample_counts
from tfposeidon.communication import runtime
from tfposeidon.exchange import layer_norms
from tfposeidon.exchange.exchanger import Afterwards, Exchanger
from tfposeidon.exchange.joining import JoinHook, join_hooks, join_with_zeros
from tfposeidon.exchange.means import Means
from tfposeidon.gradients.accumulation import Accumulation, Call
from tfposeidon.gradients.description import describe
from tfposeidon.optimizers.wrapping import (
    accumulated_steps,
    leaves,
    step_counter,
)
from tfposeidon.planning.plan import DEFAULT_BUCKET_BYTES
from tfposeidon.state.rank_state import StateDescription
from tfposeidon.training.hooks import FitHooks
from tfposeidon.wrapper import OptimizerWrapper


@keras.saving.register_keras_serializable("tfposeidon")
class DistributedOptimizer(OptimizerWrapper):
    """Averages gradients over all ranks, then lets the optimizer inside apply them.

    It works in `fit`, `train_on_batch` and hand-written loops. Under `mixed_float16`, `compile`
    puts Keras's `LossScaleOptimizer` around it: gradients are averaged before that asks whether
    they are finite, and `tp.unwrap(model.optimizer)` returns this optimizer.

    Args:
      inner_optimizer: A Keras optimizer that is not distributed yet. If it has
        `gradient_accumulation_steps`, there is one exchange per update.
      scheme: Scheme by which gradients are exchanged (default `"auto"`): a name (`"auto"`,
        `"allreduce"`, `"alltoall"`, `"torus2d"`, `"ps"`, `"factors"`, `"hybcomm"`, `"hitopk"`,
        `"topk"`), an object of `tfposeidon.schemes` such as `AllToAll(wire_dtype="float16")`, of
        `tfposeidon.policies` or of a scheme of your own, or rules `[(pattern, scheme), ...]`, of
        which the first whose pattern is found in a variable's path decides. The same on all ranks.
      bucket_bytes: Bytes up to which small gradients are fused into a bucket (default 4 MiB);
        gradients of a quarter of it or more go by themselves. Smaller buckets start earlier, larger
        ones cost fewer messages, which `"alltoall"` and `"torus2d"` feel more than `"allreduce"`; 0
        sends each variable by itself.
      gradient_accumulation_steps: Calls of `apply` whose gradients are averaged for one exchange
        and one update (default `None`: that of the inner optimizer, which takes precedence). It is
        given to the inner optimizer, which must not be built.
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
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        gradient_accumulation_steps: int | None = None,
        sample_count: sample_counts.SampleCount | None = None,
        name: str | None = None,
        **others: Any,
    ) -> None:
        arguments.check_no_more_arguments("DistributedOptimizer", others)
        policy = policies.parse(scheme)
        super().__init__(
            inner_optimizer,
            policy,
            bucket_bytes,
            sample_count,
            gradient_accumulation_steps=gradient_accumulation_steps,
            name=name or "distributed_optimizer",
        )
        if gradient_accumulation_steps and not accumulated_steps(inner_optimizer):
            _accumulate_inside(inner_optimizer, gradient_accumulation_steps)
        self.gradient_accumulation_steps = accumulated_steps(inner_optimizer)
        self._accumulation: Accumulation | None = None
        self._afterwards: Afterwards | None = None

    # ------------------------------------------------------------------ state

    @override
    def build(self, variables: Sequence[Any]) -> None:
        """Makes the inner optimizer's state, and the accumulators if there are any.

        Args:
          variables: The trainable variables.

        Raises:
          ValueError: If a variable is not floating point.
        """
        # Keras gives none when it loads an .h5 file.
        if self.built or not variables:
            return
        for variable in variables:
            # Refuses what cannot be trained before any state is made.
            describe(variable)
        self._build_inner(variables)
        if self.gradient_accumulation_steps:
            self._check_accumulates_inside()
            self._accumulation = Accumulation(self, variables, self.gradient_accumulation_steps)
        self._adopt(variables)

    def _build_inner(self, variables: Sequence[Any]) -> None:
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(variables)

    def _check_accumulates_inside(self) -> None:
        steps, inner = self.gradient_accumulation_steps, self.inner_optimizer
        # Those that a MultiOptimizer makes when it is built were not there to be told.
        if accumulated_steps(inner) != steps:
            raise ValueError(
                "All optimizers inside must accumulate over as many calls. Received: "
                f"gradient_accumulation_steps={steps}, and an optimizer inside that was made later "
                "without. Give gradient_accumulation_steps to its constructor."
            )

    @property
    @override
    def variables(self) -> list[Any]:
        """Variables of the inner optimizer, which are equal on all ranks."""
        variables: list[Any] = self.inner_optimizer.variables
        return variables

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
        with self._exchange.call(grads, variables, count) as sent:
            if self._accumulation is None:
                self._update(variables, sent, count)
            else:
                self._accumulate(self._accumulation, sent, variables, count)

    def _accumulate(
        self, accumulation: Accumulation, grads: list[Any], variables: list[Any], count: Any
    ) -> None:
        """Keeps gradients until an update is due; the inner optimizer sees each call.

        It accumulates, too: zeros, and so many times the mean in the call that makes the update.
        """
        inner, updater = self.inner_optimizer, self.updater
        # As in Keras, calls weigh alike unless somebody has said how.
        batch = self._exchange.batch
        own = None if batch.is_of_rows(count) else count
        rows = None if batch.are_equal or own is not None else count
        share, finite, everybody = self._exchange.join_call(
            grads, variables, rows, skips=updater is not inner
        )
        call = Call(
            weight=share if own is None else own,
            is_due=self._is_due(),
            scale=updater.scale_loss(1.0),
            # A loss scale skips a call by the means, and a rank that is out of data all of them.
            counter=None if finite is None and everybody is None else step_counter(inner),
        )

        def wait() -> None:
            # Not finite on one rank: all skip the call.
            value = 0.0 if finite is None else tf.where(finite, 0.0, float("nan"))
            apply = functools.partial(self._apply_to_all, variables, value)
            if everybody is None:
                apply()
            else:
                tf.cond(everybody, apply, lambda: None)

        def update(grads: list[Any], weight: Any, calls: Any) -> None:
            # Where samples weigh, nothing is known of calls before the optimizer was wrapped.
            factor = calls if own is None else self.gradient_accumulation_steps
            self._update(variables, grads, weight, factor)

        indices = [self._get_variable_index(v) for v in variables]
        accumulation.add(indices, grads, call, update, wait)

    def _apply_to_all(self, variables: list[Any], value: Any) -> None:
        grads = [tf.fill(tuple(v.shape), tf.cast(value, v.dtype)) for v in variables]
        self.updater.apply(grads, variables)

    def _update(
        self, variables: list[Any], grads: list[Any], count: Any, factor: Any = None
    ) -> None:
        means = self._means(grads, variables, count)
        if factor is not None:
            means = means.times(factor, variables)
        with layer_norms.override_norms(
            self.inner_optimizer, self._exchange.plans.norms(variables)
        ):
            self._apply(means, variables)
        # Last, as a step that is skipped must leave it as it was: the means tell whether one is.
        means.keep_state()

    def _means(self, grads: list[Any], variables: list[Any], count: Any) -> Means:
        """Exchanges gradients; the values are what the inner optimizer takes."""
        return self._exchange.means(grads, variables, count)

    def _apply(self, means: Means, variables: list[Any]) -> None:
        """Updates the variables by the means of all ranks."""
        means.update(lambda found: self.updater.apply(found, variables))

    @override
    def join_hooks(self) -> list[JoinHook]:
        join = self._join_exchange if self._accumulation is None else self._join_call
        return join_hooks(self._exchange, join)

    def _join_exchange(self, exchanger: Exchanger, call: int, eagerly: bool) -> bool:
        return join_with_zeros(exchanger, call, eagerly, self._afterwards)

    def _join_call(self, exchanger: Exchanger, call: int, eagerly: bool) -> bool:
        """Joins a call whose gradients may wait for an update."""
        tell = exchanger.contribute_to_call_eagerly if eagerly else exchanger.contribute_to_call
        have_all_ended = int(tell(call)) == exchanger.wire.topology.size
        # As the others have found before their call, which does not count.
        if not have_all_ended and self._is_due().numpy():
            self._join_exchange(exchanger, call, eagerly)
        return have_all_ended

    def _is_due(self) -> tf.Tensor:
        """Returns whether the next call makes an update."""
        calls = tf.convert_to_tensor(step_counter(self.inner_optimizer)) + 1
        return calls % self.gradient_accumulation_steps == 0

    @override
    def fit_hooks(self, model: Any) -> FitHooks:
        return FitHooks(abandon_update=self._abandon_update if self._accumulation else None)

    def _abandon_update(self) -> None:
        """Drops gradients that were accumulated for an update that no longer comes."""
        assert self._accumulation is not None
        assert self.gradient_accumulation_steps is not None
        steps = int(step_counter(self.inner_optimizer).numpy())
        calls = steps % self.gradient_accumulation_steps
        if not calls:
            return
        self._accumulation.reset()
        for leaf in leaves(self.inner_optimizer):
            if leaf.built:
                leaf._iterations.assign_sub(calls)
        runtime.say(
            "tfposeidon: a rank was out of data in the middle of an update: the gradients of %d "
            "call(s) are dropped on all ranks.",
            calls,
        )

    @property
    @override
    def rank_state(self) -> list[tuple[Any, StateDescription]]:
        # Schemes make their state with the plan. A checkpoint that is loaded before the first step
        # has to find it.
        if self.built and not self._exchange.exchangers:
            self._exchange.exchanger(self._trainable_variables)
        accumulated = (
            self._accumulation.rank_state(runtime.rank(), runtime.size())
            if self._accumulation
            else []
        )
        return [*accumulated, *self._exchange.plans.rank_state()]


def _accumulate_inside(optimizer: Any, steps: int) -> None:
    """Makes an optimizer accumulate, as if it had been constructed so."""
    for leaf in leaves(optimizer):
        own = leaf.gradient_accumulation_steps
        if leaf.built or own not in (None, steps):
            raise ValueError(
                "An optimizer must know over how many calls it accumulates before it is built. "
                f"Received: gradient_accumulation_steps={steps} around a {type(leaf).__name__} "
                f"{'that is built' if leaf.built else f'with {own}'}. Give "
                "gradient_accumulation_steps to its constructor."
            )
        leaf.gradient_accumulation_steps = steps

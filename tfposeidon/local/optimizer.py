"""Trains local weights on each rank, and synchronizes them every `sync_every` steps.

Think of `LocalUpdates` as a Keras optimizer around an inner optimizer: each step updates this
rank's weights, and each synchronization passes averaged pseudo-gradients to an outer optimizer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf
from typing_extensions import override

from tfposeidon import checks, communicating, policies, sample_counts
from tfposeidon.communicating import CommunicatingOptimizer, build_inner
from tfposeidon.communication import runtime
from tfposeidon.exchange.means import JoinHook
from tfposeidon.exchange.plan import Plan
from tfposeidon.exchange.step import Step
from tfposeidon.gradients import with_merged_rows
from tfposeidon.local import exchanges, outer_optimizers
from tfposeidon.local.global_weights import GlobalWeights, check_equal
from tfposeidon.local.schedule import Schedule, notes_of_plan
from tfposeidon.local.showing import Showing
from tfposeidon.local.synchronization import Synchronization
from tfposeidon.optimizers.wrapper import settings
from tfposeidon.state.placement import StateDescription, by_dtype
from tfposeidon.training import entries
from tfposeidon.training.hooks import FitHooks


@keras.saving.register_keras_serializable("tfposeidon")
class LocalUpdates(CommunicatingOptimizer):
    """Optimizer that trains local weights on each rank and synchronizes them periodically.

    Ranks exchange pseudo-gradients, which are the differences between their local weights and the
    global weights. An outer optimizer then updates the global weights, which are equal on all
    ranks. Communication decreases by the factor `sync_every`, at some cost in accuracy, because the
    local weights of replicas differ. `evaluate`, `predict`, `save` and callbacks at the end of an
    epoch use the global weights; training continues from each rank's local weights. On one rank,
    `LocalUpdates` behaves like the inner optimizer.

    Args:
      inner_optimizer: A Keras optimizer that is not wrapped. It updates this rank's weights at
        every step, and its state is local to the rank.
      sync_every: Number of steps between synchronizations, at least 1 (default 32).
      outer_optimizer: Optimizer of the global weights: `"average"` (default), `"elastic"`,
        `"outer"`, `"slow_momentum"`, an outer optimizer of `tfposeidon.local`, or a Keras
        optimizer, from which `LocalUpdates` creates `tfposeidon.local.Outer(optimizer)`.
      scheme: Scheme that exchanges the pseudo-gradients (default `"torus2d"`), as for
        `DistributedOptimizer`, except for `"auto"` and for schemes that need sufficient factors or
        momentum correction.
      hierarchical: True to average gradients over the ranks of each node at every step, so that
        nodes are the replicas (default False: each rank is a replica).
      overlap_steps: Number of steps between the start of an exchange and the use of its result,
        below `sync_every`. The exchange runs in the background, and all ranks apply its result
        after the same step (default 0: the step waits for the result).
      warmup_steps: Number of initial steps that are each followed by a synchronization (default 0),
        for post-local SGD.
      bucket_bytes: Maximum size of a bucket of pseudo-gradients; see `DistributedOptimizer`.
      sample_count: Function for the share of a rank in averages; see `DistributedOptimizer`.
      name: Name of the optimizer (default `"local_updates"`).
      **others: Other arguments, all of which are refused.

    Raises:
      TypeError: For unknown arguments, or if `sample_count` is not a function.
      ValueError: If an argument is out of its range, if the scheme does not support
        pseudo-gradients, if the inner optimizer averages weights (`use_ema`), under
        `tf.distribute`, or with another Keras backend than TensorFlow.

    Memory: a copy of the weights for the global weights, the outer optimizer's state, and with
    `overlap_steps` two more copies for the exchange.

    Source: see the outer optimizers; Ma, Mao and Taylor 2016, section 4 (elastic averaging).

    Example:
      >>> import keras, tfposeidon as tp
      >>> optimizer = tp.LocalUpdates(keras.optimizers.SGD(0.1, momentum=0.9), sync_every=16)
      >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
      >>> model.compile(optimizer=optimizer, loss="mse")
    """

    _serialized: ClassVar[tuple[str, ...]] = (
        *CommunicatingOptimizer._serialized,
        "outer_optimizer",
    )
    has_own_inner: ClassVar[bool] = True

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        sync_every: int = 32,
        outer_optimizer: Any = "average",
        scheme: Any = "torus2d",
        *,
        hierarchical: bool = False,
        overlap_steps: int = 0,
        warmup_steps: int = 0,
        bucket_bytes: int | None = None,
        sample_count: sample_counts.SampleCount | None = None,
        name: str | None = None,
        **others: Any,
    ) -> None:
        communicating.check_no_more_arguments("LocalUpdates", others)
        schedule = Schedule(sync_every, overlap_steps, warmup_steps)
        checks.check_flag("hierarchical", hierarchical, "Leave it out for separate ranks.")
        policy = policies.parse(scheme)
        exchanges.check_policy(policy)
        super().__init__(
            inner_optimizer,
            policy,
            bucket_bytes,
            sample_count,
            gradient_accumulation_steps=None,
            name=name or "local_updates",
        )
        communicating.check_no_averages("LocalUpdates", inner_optimizer)
        self._schedule = schedule
        self._outer = outer_optimizers.parse(outer_optimizer)
        # Read settings now: an optimizer cannot evaluate its learning rate while a step is traced.
        self._outer_settings = settings(self._outer, "outer_optimizer")
        self._exchange = exchanges.of_differences(self)
        self._node: Step | None = None
        if hierarchical:
            self._node = exchanges.of_gradients_in_node(self)
        self._synchronization: Synchronization | None = None
        self._showing = Showing(lambda: self._synchronization)
        self._model: Callable[[], Any] = lambda: None

    # ------------------------------------------------------------------ state

    @override
    def build(self, variables: Sequence[Any]) -> None:
        """Creates the inner optimizer's state and the global weights.

        Args:
          variables: The trainable variables.

        Raises:
          ValueError: If a variable is not floating point, or scheme and outer optimizer conflict.
        """
        # Keras passes no variables when it loads an .h5 file.
        if self.built or not variables:
            return
        build_inner(self.inner_optimizer, variables)
        # Place the counter on the CPU, because Python branches depend on it.
        with tf.device("/CPU:0"):
            self._number = self.add_variable((), dtype="int64", name="rounds")
        if runtime.size() > 1:
            self._build_synchronization(variables)
        else:
            # Use copies, as on several ranks, because Keras names optimizer state after variables.
            self._outer.build(GlobalWeights(variables).copies)
        if self._node is not None:
            self._node.build()
        self._exchange.build()
        self._adopt(variables)

    def _build_synchronization(self, variables: Sequence[Any]) -> None:
        every = self._schedule.sync_every
        outer_optimizers.warn_of_momentum(self._outer, self.inner_optimizer, every)
        has_state = self._exchange.exchanger(variables).states.exist
        outer_optimizers.check_nothing_counts_twice(self._outer, self.policy, has_state)
        is_node = self._node is not None
        self._synchronization = Synchronization(
            self, self._outer, variables, self._schedule, self._number, is_node
        )

    @property
    @override
    def variables(self) -> list[Any]:
        """Variables that are equal on all ranks, apart from the global weights.

        A job of one rank has the same variables, so that jobs of one and of several ranks can
        resume from each other's checkpoints.
        """
        return [self._number, *self._outer.variables] if self.built else []

    @property
    @override
    def rank_state(self) -> list[tuple[Any, StateDescription]]:
        if not self.built:
            return []
        self._prepare(self._trainable_variables)
        slots = [
            (variable, StateDescription(name=f"inner {index}", placement=by_dtype(variable)))
            for index, variable in enumerate(self.inner_optimizer.variables)
        ]
        own = [] if self._synchronization is None else self._synchronization.rank_state
        of_schemes = self._exchange.plans.rank_state(self._trainable_variables)
        return [*slots, *own, *of_schemes]

    @property
    @override
    def plan(self) -> Plan:
        """Communication plan of a synchronization: scheme, bytes and reason for each variable.

        Raises:
          RuntimeError: If the optimizer is not built, so that its variables are unknown.
        """
        plan = super().plan
        if self._synchronization is None:
            return plan
        own = notes_of_plan(plan, self._schedule, self._outer, self._plan_in_node())
        return dataclasses.replace(plan, occasion="synchronization", notes=(*own, *plan.notes))

    @property
    @override
    def bytes_per_step(self) -> float:
        in_node = self._plan_in_node()
        of_node = 0.0 if in_node is None else in_node.cost.bytes
        return super().bytes_per_step / self._schedule.sync_every + of_node

    def _plan_in_node(self) -> Plan | None:
        if self._node is None:
            return None
        return self._node.plans.plan(self._trainable_variables, self.inner_optimizer)

    @override
    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, for saving with the model."""
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            **dataclasses.asdict(self._schedule),
            "hierarchical": self._node is not None,
            "outer_optimizer": keras.saving.serialize_keras_object(self._outer),
            "scheme": keras.saving.serialize_keras_object(self.policy),
            "bucket_bytes": self._exchange.plans.bucket_bytes,
            "sample_count": keras.saving.serialize_keras_object(self._exchange.batch.function),
        }

    @override
    def save_own_variables(self, store: Any) -> None:
        """Saves the outer optimizer's state; refuses to save a model that holds local weights."""
        super().save_own_variables(store)
        if self._synchronization is not None and self._synchronization.weights.is_apart:
            raise RuntimeError(
                "A model must be saved with its global weights. Received: a model whose "
                "variables hold the local weights of this rank. Save it within `with "
                "optimizer.global_weights():`."
            )
        for name, variable in self._saved_variables():
            store[name] = variable.numpy()

    @override
    def load_own_variables(self, store: Any) -> None:
        """Loads the outer optimizer's state if the file contains it."""
        for name, variable in self._saved_variables():
            if name in store:
                variable.assign(store[name][()])

    def _saved_variables(self) -> Iterator[tuple[str, Any]]:
        names = itertools.chain(["synchronizations"], map(str, itertools.count()))
        return zip(names, self.variables, strict=False)

    # ------------------------------------------------------------------ steps

    def _prepare(self, variables: Sequence[Any]) -> None:
        self._exchange.exchanger(variables)
        if self._node is not None:
            self._node.exchanger(variables)
        if self._synchronization is not None:
            self._synchronization.prepare()

    def statistics(self) -> list[Any]:
        """Returns the layer state, such as moving means, that synchronizations average."""
        model = self._model()
        return [] if model is None else entries.statistics_of(model, self)

    @override
    def _step(self, grads: list[Any], variables: list[Any], count: Any) -> None:
        communicating.check_all_variables("LocalUpdates", variables, self._trainable_variables)
        synchronization = self._synchronization
        if synchronization is None:
            self._update(grads, variables, count)
            return
        self._prepare(variables)
        is_first = synchronization.exchanger.prefix is None
        # Ranks agree on the exchange when a step is traced. The exchange itself runs between steps.
        with self._exchange.call(variables, variables, count):
            if is_first:
                synchronization.weights.check_equal()
        if not synchronization.weights.has_begun:
            with tf.init_scope():
                synchronization.begin_step()
        with tf.control_dependencies([synchronization.weights.check_hidden()]):
            synchronization.count_samples(self._update(grads, variables, count))

    def end_step(self, steps: int = 1) -> None:
        """Counts steps, and synchronizes the ranks when the schedule requires it.

        `fit` and `train_on_batch` call this method. A custom loop must call it after each step,
        outside of `tf.function`, on all ranks.

        Args:
          steps: Number of steps executed since the last call (default 1).

        Raises:
          RuntimeError: Within a `tf.function`, if an exchange in the background has failed, or if a
            step was not traced again after `change_scheme`.

        Example:
          >>> import keras, tensorflow as tf, tfposeidon as tp
          >>> weight = keras.Variable([1.0])
          >>> optimizer = tp.LocalUpdates(keras.optimizers.SGD(0.5), sync_every=2)
          >>> for _ in range(4):
          ...     optimizer.apply([tf.ones([1])], [weight])
          ...     optimizer.end_step()
          >>> with optimizer.global_weights():
          ...     print(weight.numpy())
          [-1.]
        """
        if tf.inside_function():
            raise RuntimeError(
                "LocalUpdates.end_step() must be called outside of tf.function, because ranks "
                "synchronize between steps, in Python. Received: a call within a tf.function. "
                "Call it after the function, on all ranks."
            )
        if self._synchronization is not None:
            self._synchronization.end_step(steps)

    def _update(self, grads: list[Any], variables: list[Any], count: Any) -> Any:
        """Updates this rank's weights; returns its number of samples, or `None` if unknown."""
        if self._node is None:
            self.updater.apply(with_merged_rows(grads), variables)
            return count
        self._node.is_timed = self._exchange.is_timed
        return exchanges.update_in_node(self._node, self.updater, grads, variables, count)

    def agreed_settings(self) -> dict[str, Any]:
        """Returns the settings of both exchanges that must be equal on all ranks."""
        return {
            **settings(self.inner_optimizer, "inner optimizer"),
            **dataclasses.asdict(self._schedule),
            "hierarchical": self._node is not None,
            **self._outer_settings,
        }

    @property
    @override
    def exposed_s(self) -> float:
        """Communication that did not overlap computation, in seconds over all steps so far."""
        own = 0.0 if self._synchronization is None else self._synchronization.exposed_s
        return own + (self._node.exposed_s if self._node and self._node.is_timed else 0.0)

    @override
    def change_scheme(self, scheme: Any) -> None:
        """Applies another scheme from the next traced step on.

        Args:
          scheme: Any value that the constructor accepts; the same on all ranks, at the same step.

        Raises:
          ValueError: If the scheme does not support pseudo-gradients or the outer optimizer, or if
            `overlap_steps` is not 0, because an exchange with the old scheme may be pending.
        """
        # An equal scheme retains its error-feedback state.
        if policies.parse(scheme) != self.policy:
            super().change_scheme(scheme)

    @override
    def check_change(self, policy: policies.Policy) -> None:
        exchanges.check_policy(policy)
        outer_optimizers.check_nothing_counts_twice(self._outer, policy, policy.keeps_state)
        if self._schedule.overlap_steps and policy != self.policy:
            raise ValueError(
                "`overlap_steps` must be 0 if the scheme changes. Received: a change from "
                f"{self.policy} to {policy} with overlap_steps={self._schedule.overlap_steps}. Use "
                "overlap_steps=0."
            )

    # ------------------------------------------------------------------ global weights

    @override
    def global_weights(self, assign: bool = False) -> contextlib.AbstractContextManager[None]:
        """Assigns the global weights to the variables within this context.

        Custom loops must evaluate and save models within the context. After `fit` and
        `train_on_batch`, the variables already hold the global weights.

        Args:
          assign: True if weights assigned within the context become the new global weights; each
            rank continues from its local weights (default False).

        Raises:
          RuntimeError: If steps were executed without a call of `end_step`, or, at the end of the
            context, if weights were assigned without `assign=True`.

        Example:
          >>> import keras, tfposeidon as tp
          >>> weight = keras.Variable([1.0])
          >>> optimizer = tp.LocalUpdates(keras.optimizers.SGD(0.5))
          >>> optimizer.build([weight])
          >>> with optimizer.global_weights():
          ...     print(weight.numpy())
          [1.]
        """
        if self._synchronization is None:
            return contextlib.nullcontext()
        self._synchronization.check_steps_are_counted()
        return self._synchronization.weights.shown(assign)

    @override
    def fit_hooks(self, model: Any) -> FitHooks:
        if runtime.size() == 1:
            return FitHooks()
        # The optimizer must not keep its model alive.
        self._model = weakref.ref(model)
        return dataclasses.replace(
            self._showing.hooks(),
            prepare=self._prepare,
            check=self._check_fit,
            join_hooks=self._join_hooks,
        )

    def _check_fit(self, callbacks: Sequence[Any]) -> None:
        communicating.check_saves_weights_only("LocalUpdates", callbacks)
        self._schedule.check_steps_per_execution(self._model().steps_per_execution)

    def restart_from_weights(self) -> None:
        """Makes all ranks continue from the current variables as the new global weights.

        `fit` calls this method if weights were assigned before `fit` or between epochs. A custom
        loop must call it after `load_weights`, on all ranks and with the same weights. The training
        since the last synchronization and the state of the schemes are discarded; the state of
        inner and outer optimizers is retained.

        Raises:
          RuntimeError: On all ranks, if their weights differ.
        """
        if self._synchronization is not None:
            check_equal(self._trainable_variables)
            self._synchronization.restart()
            # Call `begin_step` here, because a traced step does not execute Python code.
            self._synchronization.begin_step()

    def _join_hooks(self) -> list[JoinHook]:
        if self._synchronization is None or not self._exchange.exchangers:
            return []
        synchronization = self._synchronization
        in_node = [] if self._node is None else self._node.join_hooks()
        # Even in eager steps, a synchronization is a graph, so ranks match its collectives by name.
        return [*in_node, JoinHook(lambda eagerly: synchronization.join(), is_ordered=False)]

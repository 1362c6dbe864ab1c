"""Averages gradients over all ranks, in each step of an optimizer.

Think of `Step` as the distributed half of an optimizer: it agrees on plans, counts samples, and
returns averaged gradients.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfposeidon import sample_counts
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import Wire
from tfposeidon.exchange import parallel_operator
from tfposeidon.exchange.agreed_plan import AgreedPlans, next_prefix
from tfposeidon.exchange.exchanger import Exchanged, Exchanger
from tfposeidon.exchange.means import JoinHook, Means, Share
from tfposeidon.exchange.observer import ExposedTime
from tfposeidon.exchange.scheme_states import effective_rate
from tfposeidon.gradients import all_finite, with_merged_rows
from tfposeidon.optimizers.wrapper import settings, step_counter
from tfposeidon.policies import Policy
from tfposeidon.schemes.base import State


class Step:
    """Exchanges gradients in each step of one communicating optimizer.

    When a step is traced, this object checks that all ranks agree on plan and settings. Each step
    counts samples if ranks may have unequal batches, exchanges gradients, and on request measures
    its exposed communication. Training loops and callbacks access this object as
    `optimizer.exchange`.

    Args:
      optimizer: Optimizer whose `updater` applies the averaged gradients.
      policy: Policy that chooses the scheme of each variable.
      bucket_bytes: Size in bytes up to which small gradients are fused; see `DistributedOptimizer`.
      sample_count: Function from a batch to the number by which ranks are weighted; see
        `DistributedOptimizer`.
      wire: Function that returns the communicator of the ranks that exchange. The default includes
        all ranks.
      prefix: Function that returns a prefix for the names of collectives, called when ranks agree
        on a plan. The default numbers prefixes.
      settings: Function that returns further settings that must be equal on all ranks.

    Attributes:
      plans: Plans of the optimizer, on which all ranks agree.
      absence: Counter of ranks with exhausted input, which the training loop may watch.
      batch: Count of the current batch of the training loop.
      is_timed: True if steps that are traced from now on measure `exposed_s`.

    Example:
      >>> import keras, tensorflow as tf, tfposeidon as tp
      >>> weight = keras.Variable([1.0, 2.0])
      >>> optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.5))
      >>> optimizer.exchange.is_timed = True
      >>> x, y = tf.zeros([8, 2]), tf.zeros([8])
      >>> with optimizer.exchange.batch.counting((x, y)):  # weights this rank by its 8 samples
      ...     optimizer.apply([tf.ones([2])], [weight])
      >>> weight.numpy().tolist(), optimizer.exchange.exposed_s
      ([0.5, 1.5], 0.0)
    """

    def __init__(
        self,
        optimizer: Any,
        policy: Policy,
        bucket_bytes: int | None,
        sample_count: sample_counts.SampleCount | None,
        wire: Callable[[], Wire] = runtime.wire,
        prefix: Callable[[], str] = next_prefix,
        settings: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._optimizer, self._wire, self._own_settings = optimizer, wire, settings
        self.plans = AgreedPlans(policy, bucket_bytes, wire, prefix)
        self.absence = Absence()
        self.batch = BatchCount(sample_count)
        self._exposed: ExposedTime | None = None
        self.is_timed = False

    def build(self) -> None:
        """Creates the variables, because TensorFlow would retrace a step that creates any."""
        with tf.init_scope():
            self.absence.build()
            self._exposed = ExposedTime()

    # ------------------------------------------------------------------ one step

    @contextlib.contextmanager
    def call(self, gradients: list[Any], variables: list[Any], count: Any) -> Iterator[None]:
        """Returns a context for one call of the optimizer, which contains all of its exchanges."""
        if not self._exchanges(variables):
            yield
            return
        runtime.check_graph()
        self.plans.agree(gradients, variables, self._optimizer.updater, self._settings(count))
        with self.exchanger(variables).call():
            yield

    def join_call(
        self, gradients: list[Any], variables: list[Any], count: Any, skips: bool
    ) -> tuple[Any, tf.Tensor | None, tf.Tensor | None]:
        """Compares one call that accumulates gradients with the calls of other ranks.

        Returns this rank's weight, `None` without a count; whether gradients are finite on all
        ranks, `None` if `skips` is false, that is, if non-finite calls are not skipped; and whether
        all ranks have a batch, `None` if this was not compared.
        """
        finite = all_finite(gradients) if skips else None
        may_differ = count is not None or skips or self.absence.is_watched
        if self._wire().topology.size == 1 or not may_differ:
            return None, finite, None
        weight, finite, absent = self.exchanger(variables).join_call(
            1.0 if count is None else count, finite if skips else True
        )
        everybody = self.absence.record(absent)
        return None if count is None else weight, finite if skips else None, everybody

    def prepare(
        self, gradients: list[Any], variables: list[Any], count: Any
    ) -> tuple[Callable[[], Exchanged], Callable[[list[Any], list[State]], Means]]:
        """Returns a function that exchanges gradients, and one that makes `Means` of the result."""
        if not self._exchanges(variables):
            return lambda: (with_merged_rows(gradients), []), lambda values, _: Means(values)
        exchanger, updater = self.exchanger(variables), self._optimizer.updater
        states, replicated = exchanger.states, [*variables, *updater.variables]
        reader, plan = self.plans.policy.reader, exchanger.plan
        sent = gradients if reader is None else reader.take(gradients, plan.structured, replicated)
        observers = [self._exposed, exchanger.observer] if self._is_observed else []
        observed = [
            one.ready(plan.descriptions, gradients, sent, replicated)
            for one in observers
            if one is not None
        ]
        # Read the learning rate only for the state of schemes, because nothing else depends on it.
        rate = effective_rate(updater) if states.exist else None
        rescale = None if rate is None else states.rescale(rate)
        presence, weight, expectation = self._share(exchanger, sent, count)

        def averaged(values: list[Any], new: list[State]) -> Means:
            for done in observed:
                done(values)
            return Means(
                values,
                missing=exchanger.missing(gradients),
                present=presence.any_gradient,
                expected=states.expected(presence),
                everybody=self.absence.record(presence.absent),
                moves=True if rate is None else rate > 0.0,
                state=() if rate is None else states.updates(new, presence, rate),
            )

        exchange = functools.partial(exchanger.exchange, sent, weight, expectation, rescale)
        return exchange, averaged

    def _share(self, exchanger: Exchanger, sent: list[Any], count: Any) -> Share:
        # The result must be the same on all ranks, so these conditions depend only on values that
        # ranks have agreed on, or that the model's code determines.
        if (
            self.batch.is_known(count)
            and not self.absence.is_watched
            and exchanger.all_were_present
            and exchanger.is_first_call
            and not exchanger.plan.structured
        ):
            return exchanger.equal_share(sent)
        return exchanger.share(sent, count)

    def exchanger(self, variables: Sequence[Any]) -> Exchanger:
        """Returns the exchanger of `variables`, the trainable variables in the order of `apply`."""
        return self.plans.exchanger(list(variables), self._optimizer.inner_optimizer)

    def _exchanges(self, variables: list[Any]) -> bool:
        """Returns whether steps run exchanges: with other ranks, or for schemes with state."""
        return self._wire().topology.size > 1 or self.exchanger(variables).states.exist

    def _settings(self, count: Any) -> dict[str, Any]:
        """Returns the settings that must be equal on all ranks; `AgreedPlans` adds its own."""
        inner, updater = self._optimizer.inner_optimizer, self._optimizer.updater
        counts, steps, calls = self.batch.function, self._optimizer.gradient_accumulation_steps, 0
        if steps:
            with tf.init_scope():
                calls = int(step_counter(inner).numpy()) % int(steps)
        scale: dict[str, Any] = {"loss scale": None}
        if updater is not inner:
            scale = settings(updater, "loss scale")
        return {
            "counted": count is not None,
            "counted by rows": self.batch.is_of_rows(count),
            "calls since the last update": calls,
            "sample_count": counts and sample_counts.name(counts),
            **settings(inner),
            **{name: value for name, value in scale.items() if ".inner_optimizer" not in name},
            "gradient_accumulation_steps": steps,
            "functions compiled by XLA": self._optimizer.xla_functions,
            **self._own_settings(),
            **parallel_operator.norm_settings(inner),
        }

    # ------------------------------------------------------------------ state for callers

    @property
    def exchangers(self) -> list[Exchanger]:
        """Exchangers whose plans ranks have agreed on so far, one per list of variables."""
        return self.plans.agreed_exchangers

    def join_hooks(
        self, join: Callable[[Exchanger, int, bool], bool] = Exchanger.join
    ) -> list[JoinHook]:
        """Returns a hook for each exchange of a traced step; none before the first step."""
        return [
            JoinHook(functools.partial(join, exchanger, call))
            for exchanger in self.exchangers
            for call in range(exchanger.calls)
        ]

    @property
    def exposed_s(self) -> float:
        """Exposed communication in seconds, summed over all timed steps.

        Exposed communication is the time of a step in which communication is not overlapped by
        computation.

        Raises:
          RuntimeError: If no steps are timed.
        """
        exposed = self._exposed
        if not (self._is_observed or (exposed and exposed.has_observed)):
            raise RuntimeError(
                "Timing of steps must be enabled before its result is read. Received: an optimizer "
                "whose steps are not timed. Pass keras_callbacks.Throughput() to fit, or set "
                "optimizer.exchange.is_timed = True before the first step."
            )
        return exposed.seconds if exposed else 0.0

    @property
    def _is_observed(self) -> bool:
        return self.is_timed or self.plans.planner.is_watching

    def flush(self) -> None:
        """Starts a flush: later steps send all residuals, so that a scheme change loses none."""
        for exchanger in self.plans.exchangers.values():
            if exchanger.is_used:
                exchanger.states.flush()

    @property
    def has_flushed(self) -> bool:
        """True if all residuals have been sent since `flush`; the same on all ranks."""
        return all(one.states.has_flushed for one in self.plans.exchangers.values() if one.is_used)


class BatchCount:
    """Count of the batch of the current train step.

    Keras's train steps call `apply` without a count, so `fit` sets the count here around each step.
    `function` maps a batch to its count; `None` counts the batch's rows. `are_equal` is true if
    ranks have agreed that all batches of this `fit` have equally many rows. `is_nested` is true if
    the optimizer is called in a function or branch inside of the train step, and `was_known` if a
    traced step relies on equal batches.
    """

    def __init__(self, function: sample_counts.SampleCount | None) -> None:
        self.function = function
        self._count: Any = None
        self._read: tf.Tensor | None = None
        self._variable: tf.Variable | None = None
        self.are_equal = self.is_nested = self.was_known = False

    def build(self) -> None:
        """Creates the variable for functions inside of the train step, before it is traced."""
        if self._variable is None:
            with tf.init_scope(), tf.device("/CPU:0"):
                self._variable = tf.Variable(0.0, trainable=False, name="batch_count")

    @property
    def current(self) -> Any:
        """Count of the batch within `counting`, a scalar; else `None`."""
        if self._count is None or self._variable is None or _is_of_this_graph(self._count):
            return self._count
        # A function inside of the train step may keep its trace when the train step is traced
        # again, so this trace must not contain a tensor of the train step.
        if self._read is None or not _is_of_this_graph(self._read):
            self._read = self._variable.read_value()
        return self._read

    def is_of_rows(self, count: Any) -> bool:
        """Returns whether a count is the current batch's number of rows, the default count."""
        is_current = count is not None and (count is self._count or count is self._read)
        return is_current and self.function is None

    def is_known(self, count: Any) -> bool:
        """Returns whether a count is the current number of rows, and equal on all ranks."""
        if not self.is_of_rows(count) or not tf.is_symbolic_tensor(count):
            return False
        # Do not rely on equal batches in a function inside of the train step, because it may keep
        # its trace when ranks' batches are no longer equal.
        is_nested = not _is_of_this_graph(count) or count is self._read
        is_known = self.are_equal and not is_nested
        self.is_nested |= is_nested
        self.was_known |= is_known
        return is_known

    def counting(self, data: Any) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which `apply` weights this rank by the count of `data`."""
        return self._setting(sample_counts.counted(self.function or sample_counts.batch_size, data))

    def counting_none(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which `apply` averages gradients without samples of this rank."""
        return self._setting(tf.zeros([], tf.int32))

    @contextlib.contextmanager
    def _setting(self, count: Any) -> Iterator[None]:
        if count is not None and self._variable is not None:
            with tf.device("/CPU:0"):
                self._variable.assign(tf.cast(count, tf.float32))
        previous, self._count = (self._count, self._read), count
        try:
            yield
        finally:
            self._count, self._read = previous


def _is_of_this_graph(tensor: Any) -> bool:
    if not tf.is_symbolic_tensor(tensor):
        return tf.executing_eagerly()
    return tensor.graph is tf.compat.v1.get_default_graph()


class Absence:
    """Counts the ranks that took part in a step without a batch of their own.

    Steps that are traced while `is_watched` is true skip their update on all ranks if one rank's
    input is exhausted. The training loop requests this, and ends the epoch on all ranks together.
    """

    def __init__(self) -> None:
        self.is_watched = False
        self._counts: tf.Variable | None = None

    def build(self) -> None:
        """Creates the counters' variable; must be called before a step is traced."""
        # Place the counters on the CPU, because Python reads them after each execution.
        with tf.device("/CPU:0"):
            self._counts = tf.Variable(tf.zeros([2], tf.int64), trainable=False, name="absence")

    def watch(self, wanted: bool) -> None:
        """Sets whether steps traced from now on skip updates if a rank's input is exhausted."""
        self.is_watched = wanted
        # Discard the number of absent ranks of an interrupted `fit`.
        self.forget()

    @property
    def counts(self) -> tuple[int, int]:
        """Maximum number of absent ranks in a step of this epoch; complete exchanges so far."""
        absent, complete = (0, 0) if self._counts is None else self._counts.numpy()
        return int(absent), int(complete)

    def forget(self) -> None:
        """Resets the number of absent ranks before another epoch."""
        if self._counts is not None:
            self._counts.assign([0, self.counts[1]])

    def note(self, ranks: int) -> None:
        """Records a number of ranks without a batch that was found between two steps."""
        if self._counts is not None:
            absent, complete = self.counts
            self._counts.assign([max(absent, ranks), complete])

    def record(self, ranks: tf.Tensor) -> tf.Tensor | None:
        """Records the number of absent ranks; returns whether it is 0, or `None` if not watched."""
        assert self._counts is not None
        is_complete = ranks == 0.0
        # Assign the number in every step, because TensorFlow prunes a collective whose result is
        # unused. Retain the maximum, because a later exchange of the same execution, such as one
        # within the node, may only include ranks with data.
        with tf.device("/CPU:0"):
            absent, complete = tf.unstack(self._counts.read_value())
            absent = tf.maximum(absent, tf.cast(ranks, tf.int64))
            self._counts.assign([absent, complete + tf.cast(is_complete, tf.int64)])
        return is_complete if self.is_watched else None

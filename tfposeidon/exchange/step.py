"""The exchange of an optimizer's steps: from this rank's gradients to the means over all ranks."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from tfposeidon import sample_counts
from tfposeidon.communication import runtime, surroundings
from tfposeidon.exchange import factor_agreement, layer_norms
from tfposeidon.exchange.agreed_plan import AgreedPlans
from tfposeidon.exchange.exchanger import Exchanger
from tfposeidon.gradients.description import merge_rows
from tfposeidon.gradients.factors import Factors
from tfposeidon.optimizers.wrapping import innermost
from tfposeidon.policies import Policy

Apply = Callable[[list[Any]], None]
"""Applies a list of means, one per variable, with `None` for variables that are left out."""


class Server(Protocol):
    """Handles means of variables that servers update; see `server.shards.ServerShards`."""

    def own_parts(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns the parts that this rank serves, where it is the only one.

        Args:
          gradients: Gradient of each variable, or `None`.
        """

    def clip_by_whole_norms(self, means: list[Any]) -> list[Any]:
        """Returns means as the inner optimizer may see them: clipped by norms over all ranks.

        Args:
          means: One for each variable; `None` without a gradient, and parts where they are served.
        """


@dataclass(frozen=True)
class Means:
    """Mean gradients over all ranks, and whether they count.

    Attributes:
      values: Mean of each variable: a tensor, `IndexedSlices` on one rank, or `None`; of variables
        that servers update, this rank's part as a vector.
      missing: Groups of indices of variables without a gradient on this rank in the step that is
        traced. Other ranks may have one for all of a group or for none.
      expected: Bool, one for each variable: whether there is a mean to apply; `None` on one rank.
      everybody: Bool scalar: whether all ranks had a batch; `None` where that is not watched.
      moves: Bool scalar: whether the update moves the weights. At a learning rate of 0 what was
        sent would be lost.
      state: Pairs of a variable of the schemes' state and its new value.
    """

    values: list[Any]
    missing: tuple[list[int], ...] = ()
    expected: tf.Tensor | None = None
    everybody: tf.Tensor | None = None
    moves: Any = True
    state: tuple[tuple[tf.Variable, tf.Tensor], ...] = ()

    def update(self, apply: Apply) -> None:
        """Gives the means to `apply`, unless a rank is out of data: then all ranks drop the update.

        Args:
          apply: Function of a list of means, with `None` for variables that have a gradient on no
            rank.

        Raises:
          InvalidArgumentError: When the step runs, if no rank has any gradient, or if other ranks
            have gradients for some of a group of `missing` variables and not for others.
        """
        if self.everybody is None:
            self._apply_expected(apply)
        else:
            tf.cond(self.everybody, lambda: self._apply_expected(apply), lambda: None)

    def _apply_expected(self, apply: Apply) -> None:
        if self.expected is None:
            apply(self.values)
        else:
            _apply_expected(self.values, self.missing, self.expected, apply)

    def keep_state(self) -> None:
        """Assigns the schemes' new state, if the step counts.

        It counts if everybody took part, if it moves the weights, and if all means are finite.
        """
        if not self.state:
            return
        counts = (
            self.moves if self.everybody is None else tf.logical_and(self.everybody, self.moves)
        )
        # Under a loss scale the optimizer skips a step that is not finite: what was sent in it
        # would be lost. And a residual that is NaN would stay NaN.
        finite = tf.reduce_all(
            [tf.reduce_all(tf.math.is_finite(m)) for m in self.values if m is not None]
        )

        def assign() -> None:
            for variable, value in self.state:
                variable.assign(value)

        tf.cond(tf.logical_and(counts, finite), assign, lambda: None)


class Step:
    """Exchanges gradients in each step of one `DistributedOptimizer`.

    It makes ranks agree when a step is traced, finds factors, counts samples, exchanges, and
    measures how long the step waited. Training loops and callbacks reach it as
    `optimizer.exchange`::

        optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.1))
        with optimizer.exchange.counting((x, y)):  # this rank weighs by the samples of its batch
            optimizer.apply(gradients, variables)
        optimizer.exchange.exposed_s

    Args:
      optimizer: The `DistributedOptimizer`. Its inner optimizer may still be replaced, by one that
        scales losses.
      policy: Choice of the scheme by which a variable is exchanged.
      bucket_bytes: Bytes up to which small gradients are fused; see `DistributedOptimizer`.
      sample_count: Function from a batch to the number that ranks weigh by; see
        `DistributedOptimizer`.

    Attributes:
      plans: Plans that its steps follow.
      weigh_by: `sample_count`, as it was given.
      sample_count: Number that the batch counts within `counting`, else `None`.
    """

    def __init__(
        self,
        optimizer: Any,
        policy: Policy,
        bucket_bytes: int,
        sample_count: sample_counts.SampleCount | None,
    ) -> None:
        self._optimizer = optimizer
        self.plans = AgreedPlans(policy, bucket_bytes)
        self.weigh_by = sample_count
        self.sample_count: Any = None
        self._watches_absence = False
        self._absent: tf.Variable | None = None
        self._exposed_s: tf.Variable | None = None

    def build(self) -> None:
        """Makes the variables in which steps leave what they have measured.

        Before a step is traced: TensorFlow traces a step twice whose first trace makes variables.
        """
        with tf.init_scope():
            self._absent = tf.Variable(0.0, trainable=False, name="absent")
            # 64 bits, as the op gives: float32 tells times since 1970 apart only by 128 s.
            self._exposed_s = tf.Variable(
                tf.zeros([], tf.float64), trainable=False, name="exposed_s"
            )

    # ------------------------------------------------------------------ one step

    @contextlib.contextmanager
    def call(self, gradients: list[Any], variables: list[Any], count: Any) -> Iterator[list[Any]]:
        """Enters one call of the optimizer; all that is exchanged for it happens in this context.

        Args:
          gradients: One per variable: tensors, `IndexedSlices` or `None`.
          variables: Variables that they are for.
          count: Number of samples behind them, a scalar; `None` for equal weights.

        Yields:
          The gradients, with `Factors` in the place of those that are sent as factors.

        Raises:
          ValueError: When a step is traced, inside XLA or `tf.distribute`.
          RuntimeError: At the first step, if ranks differ in their variables or settings.
        """
        if not self._exchanges(variables):
            yield gradients
            return
        surroundings.check_graph()
        inner = self._optimizer.inner_optimizer
        self.plans.agree(gradients, variables, inner, self._settings(count))
        exchanger = self.exchanger(variables)
        gradients = factor_agreement.extract_factors(
            gradients, exchanger.plan, [*variables, *inner.variables]
        )
        with exchanger.call():
            yield gradients

    def means(
        self, gradients: list[Any], variables: list[Any], count: Any, server: Server | None = None
    ) -> Means:
        """Exchanges gradients.

        Args:
          gradients: Gradients from `call`, or means of them over several calls.
          variables: Variables that they are for.
          count: Number of samples behind them, a scalar; `None` for equal weights.
          server: Shards that this rank serves, if variables are updated at servers.

        Returns:
          Means over all samples of all ranks.
        """
        if not self._exchanges(variables):
            rows = [merge_rows(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
            return Means(
                rows if server is None else server.clip_by_whole_norms(server.own_parts(rows))
            )
        assert self._absent is not None
        assert self._exposed_s is not None
        exchanger = self.exchanger(variables)
        presence = exchanger.presence(gradients, count)
        sent = factor_agreement.convert_to_factors(gradients, exchanger.plan)
        # What passes between the last gradient and the last mean is communication that nothing
        # hides.
        ready = _time_after(sent)
        rate = self._rate(variables)
        values, states = exchanger.exchange(
            sent, presence.weight, None if rate is None else rate.rescale
        )
        if server is not None:
            values = server.clip_by_whole_norms(values)
        self._exposed_s.assign_add(_time_after(values) - ready)
        # Read by nobody in most steps, but TensorFlow leaves out a collective whose result is not
        # used.
        self._absent.assign(presence.absent)
        kept = itertools.chain(*exchanger.states.variables)
        state = list(zip(kept, itertools.chain(*states), strict=True))
        if rate is not None:
            state += [
                (rate.variable, rate.now),
                (
                    exchanger.states.had_gradient,
                    exchanger.states.updated_had_gradient(presence),
                ),
            ]
        return Means(
            values,
            missing=tuple(
                exchanger.group_by_first_step(
                    [index for index, gradient in enumerate(gradients) if gradient is None]
                )
            ),
            expected=exchanger.states.expected(presence),
            everybody=presence.absent == 0.0 if self._watches_absence else None,
            moves=True if rate is None else rate.now > 0.0,
            state=tuple(state),
        )

    def exchanger(self, variables: Sequence[Any]) -> Exchanger:
        """Returns the exchanger of `variables`, with the variables that it needs.

        `fit` asks for it before a step is traced. Otherwise the first trace makes them, and
        TensorFlow then traces the step once more.

        Args:
          variables: Trainable variables that the step gives to `apply`, all of them in this
            order.
        """
        return self.plans.exchanger(list(variables), self._optimizer.inner_optimizer)

    def _exchanges(self, variables: list[Any]) -> bool:
        """Returns whether there is anything to do.

        On one rank nothing is sent, but schemes may keep something, such as velocity.
        """
        return runtime.size() > 1 or self.exchanger(variables).states.exist

    def _rate(self, variables: list[Any]) -> _Rate | None:
        if not self.exchanger(variables).states.exist:
            return None
        effective = self.plans.effective_rate(variables)
        now = effective.current(self._optimizer.inner_optimizer)
        return _Rate(effective.variable, now, effective.rescale(now))

    def _settings(self, count: Any) -> dict[str, Any]:
        """Returns what has to be the same on all ranks, besides what the plans know."""
        optimizer = self._optimizer
        return {
            "counted": count is not None,
            "sample_count": self.weigh_by and sample_counts.name(self.weigh_by),
            "gradient_accumulation_steps": optimizer.gradient_accumulation_steps,
            "optimizer": [
                type(optimizer.inner_optimizer).__name__,
                type(innermost(optimizer)).__name__,
            ],
            **layer_norms.norm_settings(optimizer.inner_optimizer),
        }

    # ------------------------------------------------------------------ for training loops and
    # callbacks

    @contextlib.contextmanager
    def counting(self, data: Any) -> Iterator[None]:
        """Makes `apply` weigh this rank by what a batch counts, within this context.

        So `fit` supplies it, whose train step calls `apply` without a count.

        Args:
          data: Batch as the train step is given it, such as `(x, y, sample_weight)`.

        Raises:
          ValueError: If `sample_count` makes more than one number of it.
        """
        count = sample_counts.counted(self.weigh_by or sample_counts.batch_size, data)
        self.sample_count, previous = count, self.sample_count
        try:
            yield
        finally:
            self.sample_count = previous

    @property
    def suits_xla(self) -> bool:
        """True if XLA can compile its steps: on one rank, if schemes keep nothing."""
        return runtime.size() == 1 and not self.plans.policy.keeps_state

    @property
    def exchangers(self) -> list[Exchanger]:
        """Exchangers that ranks have agreed on in the steps so far, one for each list."""
        return self.plans.agreed_exchangers

    @property
    def exposed_s(self) -> float:
        """Communication that computation did not hide, in seconds over all steps so far."""
        return 0.0 if self._exposed_s is None else float(self._exposed_s.numpy())

    def watch_absence(self, wanted: bool) -> None:
        """Sets whether steps drop their updates on all ranks if one of them is out of data.

        Args:
          wanted: True for yes; it holds for steps that are traced from now on.
        """
        self._watches_absence = wanted

    @property
    def watches_absence(self) -> bool:
        """True if steps drop their updates when a rank is out of data."""
        return self._watches_absence

    @property
    def absent_ranks(self) -> int:
        """Number of ranks without a batch at the last step; counted while absence is watched."""
        return 0 if self._absent is None else int(self._absent.numpy())

    def forget_absence(self) -> None:
        """Begins another epoch, in which no rank is out of data yet."""
        if self._absent is not None:
            self._absent.assign(0.0)

    def flush(self) -> bool:
        """Makes all steps from now on send everything, what schemes have kept included.

        It comes before a change of schemes, or what they have kept would be lost.

        Returns:
          True if there are schemes that keep anything.
        """
        for exchanger in self.plans.exchangers:
            exchanger.states.flush()
        return any(exchanger.states.exist for exchanger in self.plans.exchangers)

    @property
    def has_flushed(self) -> bool:
        """True if a step that counted has sent everything since `flush`.

        It is the same on all ranks.
        """
        return all(exchanger.states.has_flushed for exchanger in self.plans.exchangers)


@dataclass(frozen=True)
class _Rate:
    """Effective learning rate of a step, and the factor for what was kept at an earlier one.

    Attributes:
      variable: Rate of the last step that counted, in which `now` is kept if this one counts.
      now: Rate of this step, a float32 scalar.
      rescale: Factor for what schemes have kept, a float32 scalar.
    """

    variable: tf.Variable
    now: tf.Tensor
    rescale: tf.Tensor


def _apply_expected(
    values: list[Any], missing: Sequence[list[int]], expected: tf.Tensor, apply: Apply
) -> None:
    """Applies means of variables that have a gradient on some rank; see `Means`."""
    if not any(value is not None for value in values):
        tf.debugging.Assert(
            False, ["There must be a gradient on some rank. Received: none for any variable."]
        )
        return
    if not missing:
        apply(values)
        return
    group, *others = missing
    found = tf.gather(expected, group)
    without = [None if index in group else value for index, value in enumerate(values)]

    # A branch for each group, not for each variable: each branch traces the rest once more.
    def with_group() -> None:
        rule = (
            "Of the variables without a gradient on this rank, all or none must have one on "
            "others. Received: some have. Give zeros as the gradients of all of them."
        )
        tf.debugging.Assert(tf.reduce_all(found), [rule, found])
        _apply_expected(values, others, expected, apply)

    tf.cond(
        tf.reduce_any(found), with_group, lambda: _apply_expected(without, others, expected, apply)
    )


def _time_after(gradients: list[Any]) -> tf.Tensor:
    """Returns the time, in seconds since 1970, at which all of these are there; float64."""
    with tf.control_dependencies(
        [tensor for g in gradients if g is not None for tensor in _tensors(g)]
    ):
        return tf.timestamp()


def _tensors(gradient: Any) -> list[tf.Tensor]:
    if isinstance(gradient, Factors):
        return [gradient.left, gradient.right]
    return [gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient]

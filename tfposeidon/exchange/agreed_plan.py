"""The plans of one optimizer, which ranks agree on when its steps are traced.

There is one plan for each list of variables that the optimizer is called with: a GAN or a model
that is trained in parts calls it with several.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfposeidon.communication import runtime
from tfposeidon.communication.wire import Zeros, exchange_objects
from tfposeidon.exchange import factor_agreement, layer_norms
from tfposeidon.exchange.effective_rate import EffectiveRate
from tfposeidon.exchange.exchanger import Exchanger
from tfposeidon.gradients.description import Description, describe, of_tensorflow
from tfposeidon.optimizers.layer_wise import Norms
from tfposeidon.planning import advice, rules
from tfposeidon.planning.plan import Plan, make_plan, with_rows
from tfposeidon.policies import Policy
from tfposeidon.state.rank_state import StateDescription

# Collectives are matched by name. Plans take their number at their first step, which all ranks
# reach together, and not when they are made: a rank may make or load more optimizers than others.
_numbers = itertools.count()


class AgreedPlans:
    """A plan and an `Exchanger` for each list of variables that an optimizer is called with.

    Args:
      policy: Choice of the scheme by which a variable is exchanged.
      bucket_bytes: Bytes up to which small gradients are fused; see `DistributedOptimizer`.

    Attributes:
      policy: Choice of the scheme by which a variable is exchanged; `change_policy` replaces it.
      bucket_bytes: Bytes up to which small gradients are fused.
    """

    def __init__(self, policy: Policy, bucket_bytes: int) -> None:
        self.policy = policy
        self.bucket_bytes = bucket_bytes
        self._exchangers: dict[Any, Exchanger] = {}
        self._effective_rates: dict[Any, EffectiveRate] = {}
        self._norms: dict[Any, layer_norms.NormMethod] = {}
        self._notes: dict[str, None] = {}
        self._zeros = Zeros()

    def exchanger(self, variables: list[Any], inner_optimizer: Any) -> Exchanger:
        """Returns the exchanger of a list of variables, and makes it if need be.

        Args:
          variables: Keras or TensorFlow variables; another order is another list.
          inner_optimizer: Optimizer that applies the means.

        Raises:
          ValueError: If the plan does not go with the inner optimizer, or for a variable that is
            not floating point.
        """
        key = _key(variables)
        if key not in self._exchangers:
            plan = self._plan([describe(v) for v in variables])
            rules.check_momentum(plan, inner_optimizer)
            self._exchangers[key] = Exchanger(plan, runtime.wire(), self._zeros)
            self._effective_rates[key] = EffectiveRate()
        return self._exchangers[key]

    def effective_rate(self, variables: list[Any]) -> EffectiveRate:
        """Returns the rate at which the schemes' state of `variables` was made.

        Args:
          variables: Variables for which `exchanger` was called, in the same order.
        """
        return self._effective_rates[_key(variables)]

    def norms(self, variables: list[Any]) -> Norms | None:
        """Returns the function by which a layer-wise optimizer computes norms; `None` for its own.

        Args:
          variables: Variables that the optimizer updates.
        """
        return self._norms.get(_key(variables), layer_norms.NormMethod()).norms

    @property
    def exchangers(self) -> list[Exchanger]:
        """All exchangers, in the order in which they were made."""
        return list(self._exchangers.values())

    @property
    def agreed_exchangers(self) -> list[Exchanger]:
        """Exchangers that ranks have agreed on in a step, in the order in which they were made."""
        return [exchanger for exchanger in self.exchangers if exchanger.prefix]

    def plan(self, variables: list[Any], inner_optimizer: Any) -> Plan:
        """Returns all plans as one, as the last step followed them.

        Before the first step it is the plan for `variables`, without factors.

        Args:
          variables: Trainable variables of the optimizer.
          inner_optimizer: Optimizer that applies the means.
        """
        plans = [self._of_last_step(exchanger) for exchanger in self.agreed_exchangers]
        if not plans:
            plans = [self.exchanger(variables, inner_optimizer).plan]
        buckets = tuple(itertools.chain(*(plan.buckets for plan in plans)))
        notes = dict.fromkeys([*itertools.chain(*(plan.notes for plan in plans)), *self._notes])
        return dataclasses.replace(plans[0], buckets=buckets, notes=tuple(notes))

    def agree(
        self,
        grads: list[Any],
        variables: list[Any],
        inner_optimizer: Any,
        settings: dict[str, Any],
    ) -> None:
        """Checks, while the first step is traced, that all ranks are about to do the same.

        Then it plans once more, with the factors that the graph shows. Later traces change nothing:
        ranks retrace when they like, and nobody else might be there to answer.

        Args:
          grads: Gradients of this rank, one per variable: tensors, `IndexedSlices` or `None`.
          variables: Variables of the gradients, in the same order.
          inner_optimizer: Optimizer that applies the means.
          settings: Further settings that have to be the same on all ranks, besides the variables,
            the policy and `bucket_bytes`; for JSON.

        Raises:
          RuntimeError: On all ranks alike, if variables or settings differ.
          ValueError: If a scheme needs factors and no gradient has any.
        """
        exchanger = self.exchanger(variables, inner_optimizer)
        if exchanger.prefix is None:
            own = {"scheme": repr(self.policy), "bucket_bytes": self.bucket_bytes}
            exchanger.agree(f"tp{next(_numbers)}", grads, own | settings)
            self._plan_step(grads, variables, inner_optimizer, settings)

    def _plan_step(
        self, grads: list[Any], variables: list[Any], inner_optimizer: Any, settings: dict[str, Any]
    ) -> None:
        if self.policy.reads_factors:
            replicated = [*variables, *inner_optimizer.variables]
            self._plan_with_factors(grads, variables, replicated)
        self._choose_norms(variables, inner_optimizer)
        self._take_notes(grads, variables, inner_optimizer, settings)

    def change_policy(self, policy: Policy) -> None:
        """Drops all plans; those of the next traced step follow `policy`.

        Args:
          policy: Policy of later steps, the same on all ranks.
        """
        self.policy = policy
        self._exchangers.clear()
        self._effective_rates.clear()
        self._norms.clear()
        self._notes.clear()

    def rank_state(self) -> Iterator[tuple[Any, StateDescription]]:
        """Yields the variables that schemes keep on this rank, each with what it is."""
        for key, exchanger in self._exchangers.items():
            states = exchanger.states
            if states.exist:
                yield from zip(itertools.chain(*states.variables), states.describe(), strict=True)
                # By the variables, and not by a number: another run may meet the lists in another
                # order.
                members = states.members
                rate = StateDescription(name="effective_rate", members=members)
                yield self._effective_rates[key].variable, rate
                yield states.had_gradient, StateDescription(name="had_gradient", members=members)

    def _plan(self, descriptions: list[Description]) -> Plan:
        topology = runtime.wire().topology
        notes = [] if topology.size > 1 else ["one rank: nothing is sent"]
        return make_plan(descriptions, self.policy, topology, self.bucket_bytes, notes)

    def _of_last_step(self, exchanger: Exchanger) -> Plan:
        with tf.init_scope():
            rows = exchanger.rows.numpy()
        return with_rows(exchanger.plan, rows, self.policy)

    def _plan_with_factors(
        self, grads: list[Any], variables: list[Any], replicated: list[Any]
    ) -> None:
        """Plans again, now that the graph shows the ops that make the gradients."""
        exchanger = self._exchangers[_key(variables)]
        descriptions = [describe(v) for v in variables]
        found = factor_agreement.find_factors(grads, descriptions, replicated)
        with tf.init_scope():
            everybody = exchange_objects(found, exchanger.wire, f"{exchanger.prefix}.factors")
        plan = self._plan(factor_agreement.merge_findings(descriptions, everybody))
        factor_agreement.check_any_factors(plan, self.policy)
        # With the variables of the old one: TensorFlow traces once more what makes variables.
        new = Exchanger(plan, exchanger.wire, self._zeros, exchanger.rows)
        new.take_over(exchanger)
        self._exchangers[_key(variables)] = new

    def _choose_norms(self, variables: list[Any], inner_optimizer: Any) -> None:
        key = _key(variables)
        exchanger = self._exchangers[key]
        served = any(bucket.server for bucket in exchanger.plan.buckets)
        self._norms[key] = layer_norms.choose_norms(
            inner_optimizer, variables, served, exchanger.wire, f"{exchanger.prefix}"
        )
        if self._norms[key].note:
            self._note(self._norms[key].note)

    def _take_notes(
        self, grads: list[Any], variables: list[Any], inner_optimizer: Any, settings: dict[str, Any]
    ) -> None:
        self._note(_weighing(settings))
        plan = self._exchangers[_key(variables)].plan
        by_rows = {d.path for b in plan.buckets if b.takes_factors for d in b.descriptions}
        steps = settings["gradient_accumulation_steps"]
        if steps and by_rows:
            self._note(f"rows of factors are kept over {steps} steps, other gradients are added up")
        for grad, variable in zip(grads, variables, strict=True):
            if isinstance(grad, tf.IndexedSlices) and describe(variable).path not in by_rows:
                self._note(f"{describe(variable).path}: rows are summed and sent as a dense matrix")
            if grad is None:
                self._note(
                    f"{describe(variable).path}: no gradient on rank {runtime.rank()}, "
                    "zeros are sent"
                )
        for text in (advice.sparsity_advice(plan, inner_optimizer), advice.cpu_advice(plan)):
            if text:
                self._note(text)
                runtime.say("tfposeidon: %s.", text)

    def _note(self, text: str) -> None:
        self._notes[text] = None


def _key(variables: list[Any]) -> Any:
    # TensorFlow's variables have no hash, for they compare element by element.
    return tuple(of_tensorflow(v).ref() for v in variables)


def _weighing(settings: dict[str, Any]) -> str:
    if settings["sample_count"]:
        return (
            f"ranks weigh by {settings['sample_count']}: exact for losses that are means over what "
            "it counts"
        )
    if settings["counted"]:
        return (
            "ranks weigh by their number of samples: exact for losses that are means over samples"
        )
    return "no sample_count was given: ranks weigh the same, unequal batches give a mean of means"

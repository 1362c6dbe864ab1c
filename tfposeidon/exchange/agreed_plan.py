"""The plans of one optimizer, made and agreed on as its steps are traced, and what carries them out."""

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
from tfposeidon.state.rank_state import Piece

# Collectives are matched by name. Planners take their number at their first step, which all ranks
# reach together, and not when they are made: a rank may make or load more of them than others.
_numbers = itertools.count()


class AgreedPlans:
    """A plan and an `Exchanger` for each list of variables that the optimizer is called with.

    Args:
      policy: Decides which variable goes by which scheme.
      bucket_bytes: See `DistributedOptimizer`.
    """

    def __init__(self, policy: Policy, bucket_bytes: int) -> None:
        self.policy = policy
        self.bucket_bytes = bucket_bytes
        self._exchangers: dict[Any, Exchanger] = {}
        self._effective_rates: dict[Any, EffectiveRate] = {}
        self._norms: dict[Any, layer_norms.Choice] = {}
        self._notes: dict[str, None] = {}
        self._zeros = Zeros()

    def exchanger(self, variables: list[Any], inner_optimizer: Any) -> Exchanger:
        """What exchanges the gradients of `variables`; made at the first call."""
        key = _key(variables)
        if key not in self._exchangers:
            plan = self._plan([describe(v) for v in variables])
            rules.check_momentum(plan, inner_optimizer)
            self._exchangers[key] = Exchanger(plan, runtime.wire(), self._zeros)
            self._effective_rates[key] = EffectiveRate()
        return self._exchangers[key]

    def effective_rate(self, variables: list[Any]) -> EffectiveRate:
        """How far the weights moved for a gradient of 1, for the exchanger of `variables`."""
        return self._effective_rates[_key(variables)]

    def norms(self, variables: list[Any]) -> Norms | None:
        """How a layer-wise optimizer takes norms of these variables; as it likes, where `None`."""
        return self._norms.get(_key(variables), layer_norms.Choice()).norms

    @property
    def exchangers(self) -> list[Exchanger]:
        """All of them, in the order in which they were made."""
        return list(self._exchangers.values())

    @property
    def agreed(self) -> list[Exchanger]:
        """Those that have been in a step, in the order of their first."""
        return [exchanger for exchanger in self.exchangers if exchanger.prefix]

    def plan(self, variables: list[Any], inner_optimizer: Any) -> Plan:
        """All plans as one, as the last step followed them; before the first step, that for `variables`."""
        plans = [self._of_last_step(exchanger) for exchanger in self.agreed]
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
        """While a step is traced: makes sure that all ranks are about to do the same; at the first, plans with factors.

        Args:
          settings: What has to be the same on all ranks, besides the variables and this planner's own.
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
        """Drops all plans; those of the next traced step follow `policy`."""
        self.policy = policy
        self._exchangers.clear()
        self._effective_rates.clear()
        self._norms.clear()
        self._notes.clear()

    def rank_state(self) -> Iterator[tuple[Any, Piece]]:
        """Variables that schemes keep on this rank, and what each of them is."""
        for number, (key, exchanger) in enumerate(self._exchangers.items()):
            if any(exchanger.states):
                yield from zip(itertools.chain(*exchanger.states), exchanger.pieces(), strict=True)
                yield self._effective_rates[key].variable, Piece(name=f"update_rate_{number}")
                yield exchanger.seen, Piece(name=f"seen_{number}")

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
        """Plans again, now that the ops are there that make the gradients."""
        exchanger = self._exchangers[_key(variables)]
        descriptions = [describe(v) for v in variables]
        found = factor_agreement.find(grads, descriptions, replicated)
        with tf.init_scope():
            everybody = exchange_objects(found, exchanger.wire, f"{exchanger.prefix}.factors")
        plan = self._plan(factor_agreement.agreed(descriptions, everybody))
        factor_agreement.check(plan, self.policy)
        new = Exchanger(plan, exchanger.wire, self._zeros, exchanger.rows)
        new.take_over(exchanger)
        self._exchangers[_key(variables)] = new

    def _choose_norms(self, variables: list[Any], inner_optimizer: Any) -> None:
        key = _key(variables)
        exchanger = self._exchangers[key]
        served = any(bucket.server for bucket in exchanger.plan.buckets)
        self._norms[key] = layer_norms.choose(
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
                    f"{describe(variable).path}: no gradient on rank {runtime.rank()}, zeros are sent"
                )
        for text in (advice.sparsity_advice(plan, inner_optimizer), advice.cpu_advice(plan)):
            if text:
                self._note(text)
                runtime.say("tfposeidon: %s.", text)

    def _note(self, text: str) -> None:
        self._notes[text] = None


def _key(variables: list[Any]) -> Any:
    return tuple(of_tensorflow(v).ref() for v in variables)


def _weighing(settings: dict[str, Any]) -> str:
    if settings["sample_count"]:
        return f"ranks weigh by {settings['sample_count']}: exact for losses that are means over what it counts"
    if settings["counted"]:
        return (
            "ranks weigh by their number of samples: exact for losses that are means over samples"
        )
    return "no sample_count was given: ranks weigh the same, unequal batches give a mean of means"

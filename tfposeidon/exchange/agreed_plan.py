"""The plans of one optimizer, which ranks agree on when its steps are traced.

There is one plan for each list of variables that the optimizer is called with: a GAN or a model
that is trained in parts calls it with several.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import tensorflow as tf

from tfposeidon.communication import agreement, runtime
from tfposeidon.communication.links import Links
from tfposeidon.communication.wire import Zeros, exchange_objects
from tfposeidon.exchange import factor_agreement, layer_norms
from tfposeidon.exchange.effective_rate import EffectiveRate
from tfposeidon.exchange.exchanger import Exchanger
from tfposeidon.exchange.measured import Measured
from tfposeidon.exchange.race import Race
from tfposeidon.exchange.resumed import Resumed
from tfposeidon.exchange.scheme_states import descriptions_of
from tfposeidon.gradients.description import Description, describe, of_tensorflow
from tfposeidon.optimizers.layer_wise import Norms
from tfposeidon.planning import advice, probe, rules
from tfposeidon.planning.forecast import Forecast
from tfposeidon.planning.plan import Plan, with_rows
from tfposeidon.planning.search import choose_plan, predict
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
        # By the paths of variables, as snapshots name them.
        self._measured: dict[tuple[str, ...], Measured] = {}
        self._learnt: dict[tuple[str, ...], Measured] = {}
        # Plans that stay unless their successors are adopted, with what is predicted for them now.
        self._kept: list[tuple[Exchanger, Forecast]] = []
        self._race = Race()
        self._left: set[str] = set()
        self._resumed: dict[tuple[str, ...], Resumed] = {}
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
            descriptions = [describe(v) for v in variables]
            resumed = self._resumed.get(_paths(descriptions))
            # Without it nobody knows, before the first step shows factors, what schemes have kept.
            plan = resumed.plan(descriptions) if resumed else self._plan(descriptions)
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
        forecasts = tuple(itertools.chain(*(plan.forecasts for plan in plans)))
        notes = dict.fromkeys([*itertools.chain(*(plan.notes for plan in plans)), *self._notes])
        return replace(plans[0], buckets=buckets, notes=tuple(notes), forecasts=forecasts)

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
            links = runtime.links()
            own = {
                "scheme": repr(self.policy),
                "bucket_bytes": self.bucket_bytes,
                "links": links.to_json() if links else runtime.measures_links(),
            }
            exchanger.agree(f"tp{next(_numbers)}", grads, own | settings)
            self._plan_step(grads, variables, inner_optimizer, settings)

    def _plan_step(
        self, grads: list[Any], variables: list[Any], inner_optimizer: Any, settings: dict[str, Any]
    ) -> None:
        if self.leave_open and runtime.links() is None:
            _measure_links()
        if self.policy.reads_factors or self.leave_open:
            replicated = [*variables, *inner_optimizer.variables]
            self._plan_again(grads, variables, replicated)
        self._choose_norms(variables, inner_optimizer)
        self._take_notes(grads, variables, inner_optimizer, settings)

    def measure_links_again(self) -> None:
        """Measures links that were measured before; those that were given stay.

        All ranks call it together.
        """
        if runtime.measures_links():
            _measure_links()

    def change_policy(self, policy: Policy) -> None:
        """Drops all plans; those of the next traced step follow `policy`.

        Args:
          policy: Policy of later steps, the same on all ranks.
        """
        self.policy = policy
        self._measured.clear()
        self._left.clear()
        self.forget()

    def forget(self) -> None:
        """Drops all plans; those of the next traced step are made by what is known then."""
        self._resumed.clear()
        self._exchangers.clear()
        self._effective_rates.clear()
        self._norms.clear()
        self._notes.clear()

    @property
    def leave_open(self) -> bool:
        """True if the predicted step decides, and may decide otherwise once steps have run."""
        knows_links = runtime.links() is not None or runtime.measures_links()
        # What servers update was cut when the optimizer was built, and stays.
        return knows_links and self.policy.leaves_open and not self.policy.updates_at_servers

    @property
    def may_learn(self) -> bool:
        """True if plans depend on what steps measure, and none has measured anything yet."""
        return self.leave_open and not self._measured

    def to_dict(self) -> dict[str, Any]:
        """Returns what plans were made by, for JSON: links, and what steps and races measured."""
        links = runtime.links()
        return {
            "nodes": runtime.wire().topology.nodes,
            "links": links and links.to_json(),
            "measured": [
                {"paths": paths, **asdict(measured)} for paths, measured in self._measured.items()
            ],
            "raced": self._race.known,
            "plans": [Resumed.of(exchanger.plan).to_dict() for exchanger in self.agreed_exchangers],
        }

    def resume(self, saved: dict[str, Any]) -> bool:
        """Plans by what the plans of an earlier run were made by, if this one is on the same nodes.

        Where both measure links, those of the earlier run are kept. Otherwise, if links are others
        than those of the earlier run, plans are made anew. All ranks call it together.

        Args:
          saved: Result of `to_dict` in the earlier run, from JSON.

        Returns:
          True if later plans may be others than those so far.
        """
        wire = runtime.wire()
        nodes = [list(node) for node in wire.topology.nodes]
        if not self.leave_open or saved["links"] is None or saved["nodes"] != nodes:
            return False
        links = Links.from_json(saved["links"], "the snapshot")
        if runtime.measures_links() and links.hosts == probe.hosts_of(wire):
            runtime.keep_links(links)
        if runtime.links() != links:
            runtime.say("tfposeidon: links are not those of the snapshot: plans are made anew.")
            return False
        self._measured = {
            tuple(one["paths"]): Measured(
                one["first_s"], one["compute_s"], one["step_s"], tuple(one["rows"])
            )
            for one in saved["measured"]
        }
        self._race = Race(saved["raced"])
        self.forget()
        plans = [Resumed.from_dict(one) for one in saved["plans"]]
        self._resumed = {plan.paths: plan for plan in plans}
        return True

    def learn(self, found: Mapping[tuple[str, ...], Measured]) -> float:
        """Plans by what steps have measured; steps go on by the plans so far until `adopt`.

        Args:
          found: What was measured, by the paths of a list of variables; the same on all ranks.

        Returns:
          Predicted seconds that each step would save by the new plans; 0 if they are the old ones.
        """
        links = runtime.links()
        self._learnt, saved_s = dict(found), 0.0
        self._kept.clear()
        if links is None or not self.leave_open:
            return saved_s
        for exchanger in self.agreed_exchangers:
            descriptions = descriptions_of(exchanger.plan)
            measured = found.get(_paths(descriptions))
            if measured is None:
                continue
            best = self._plan(descriptions, measured, races=True)
            if best.buckets == exchanger.plan.buckets:
                exchanger.plan = best
                continue
            if best.digest in self._left:
                # Never back and forth.
                continue
            (before,), (after,) = exchanger.plan.forecasts, best.forecasts
            now = predict(
                self._of_last_step(exchanger), links, measured.timeline, before.chosen.slowdown
            )
            self._kept.append((exchanger, after.kept(before, now)))
            saved_s += now.step_s - after.chosen.step_s
        return saved_s

    def slowness(self, found: Mapping[tuple[str, ...], Measured]) -> float:
        """Returns how much longer steps take than predicted, as a multiple; 0 without predictions.

        Args:
          found: What was measured, by the paths of a list of variables.
        """
        ratios = [0.0]
        for exchanger in self.agreed_exchangers:
            measured = found.get(_paths(descriptions_of(exchanger.plan)))
            if measured is not None:
                ratios += [
                    measured.step_s / forecast.chosen.step_s
                    for forecast in exchanger.plan.forecasts
                    if forecast.knows_computation
                ]
        return max(ratios)

    def keep(self) -> None:
        """Keeps the plans so far, though others were predicted to be faster."""
        for exchanger, forecast in self._kept:
            exchanger.plan = replace(exchanger.plan, forecasts=(forecast,))
        self._kept.clear()

    def adopt(self, *, changes: bool) -> None:
        """Keeps what was learnt, by which plans are made from now on, in resumed runs too.

        Args:
          changes: True if the new plans are others: those so far are dropped.
        """
        self._measured, self._learnt = self._learnt, {}
        if changes:
            self._left |= {exchanger.plan.digest for exchanger in self.agreed_exchangers}
            self.forget()

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

    def _plan(
        self,
        descriptions: Sequence[Description],
        measured: Measured | None = None,
        *,
        races: bool = False,
    ) -> Plan:
        """Makes a plan; with `races` all ranks do it together, and may time some exchanges."""
        topology = runtime.wire().topology
        measured = measured or self._measured.get(_paths(descriptions))
        return choose_plan(
            descriptions if measured is None else measured.with_rows(descriptions),
            self.policy,
            topology,
            runtime.links(),
            bucket_bytes=self.bucket_bytes,
            timeline=None if measured is None else measured.timeline,
            notes=[] if topology.size > 1 else ["one rank: nothing is sent"],
            race=lambda plans: self._race.times(plans, runtime.wire() if races else None),
        )

    def _of_last_step(self, exchanger: Exchanger) -> Plan:
        with tf.init_scope():
            rows, means = exchanger.rows.numpy(), exchanger.times.means
        plan = with_rows(exchanger.plan, rows, self.policy)
        step_s = None if means is None else means.step_s
        forecasts = tuple(replace(one, measured_s=step_s) for one in plan.forecasts)
        return replace(plan, forecasts=forecasts)

    def _plan_again(self, grads: list[Any], variables: list[Any], replicated: list[Any]) -> None:
        """Plans again, now that the graph shows the ops that make the gradients."""
        exchanger = self._exchangers[_key(variables)]
        descriptions = [describe(v) for v in variables]
        found = factor_agreement.find_factors(grads, descriptions, replicated)
        with tf.init_scope():
            everybody = exchange_objects(found, exchanger.wire, f"{exchanger.prefix}.factors")
        plan = self._plan(factor_agreement.merge_findings(descriptions, everybody), races=True)
        if self.leave_open:
            self._check_same_plan(plan, f"{exchanger.prefix}.plan")
        factor_agreement.check_any_factors(plan, self.policy)
        # With the variables of the old one: TensorFlow traces once more what makes variables.
        new = Exchanger(plan, exchanger.wire, self._zeros, exchanger)
        new.take_over(exchanger)
        self._exchangers[_key(variables)] = new

    def _check_same_plan(self, plan: Plan, name: str) -> None:
        """Compares what predicted steps have decided, which rests on floating-point numbers."""
        with tf.init_scope():
            everybody = exchange_objects(plan.digest, runtime.wire(), name)
        agreement.require_equal(
            everybody,
            "All ranks must make the same plan",
            "Name the scheme, where ranks have processors that round in other ways.",
        )

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


def _measure_links() -> None:
    with tf.init_scope():
        runtime.keep_links(probe.measure(runtime.wire()))
    runtime.say("tfposeidon: links: %s.", runtime.links())


def _key(variables: list[Any]) -> Any:
    # TensorFlow's variables have no hash, for they compare element by element.
    return tuple(of_tensorflow(v).ref() for v in variables)


def _paths(descriptions: Sequence[Description]) -> tuple[str, ...]:
    return tuple(description.path for description in descriptions)


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

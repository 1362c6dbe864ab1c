"""Plans of one optimizer, which ranks agree on when its steps are traced.

There is one plan for each list of variables that the optimizer is called with. A GAN, or a model
that is trained in parts, has several.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import tensorflow as tf

from tfposeidon.communication import agreement, runtime, surroundings
from tfposeidon.communication.network_profile import NetworkProfile
from tfposeidon.communication.wire import Wire, Zeros, exchange_objects
from tfposeidon.exchange import layer_norms
from tfposeidon.exchange.exchanger import Exchanger
from tfposeidon.exchange.planner import Paths, Planner
from tfposeidon.exchange.resumed import Resumed
from tfposeidon.exchange.scheme_states import EffectiveRate
from tfposeidon.exchange.step_times import Measured
from tfposeidon.gradients.description import Description, describe, of_tensorflow
from tfposeidon.optimizers.layer_wise import Norms
from tfposeidon.planning import advice
from tfposeidon.planning.forecast import Forecast, Prediction
from tfposeidon.planning.plan import Plan, sized
from tfposeidon.planning.search import predict
from tfposeidon.policies import Policy
from tfposeidon.state.rank_state import StateDescription

# Collectives are matched by name. Plans take their number at their first step, which all ranks
# reach together, and not at their creation: a rank may create or load more optimizers than others.
_numbers = itertools.count()


def next_prefix() -> str:
    """Returns a prefix of the names of collectives, different at each call."""
    return f"tp{next(_numbers)}"


class AgreedPlans:
    """A plan and an `Exchanger` for each list of variables that an optimizer is called with.

    `choose_norms` is the function that chooses how layer norms are computed; see `layer_norms`.
    """

    def __init__(
        self,
        policy: Policy,
        bucket_bytes: int,
        wire: Callable[[], Wire] = runtime.wire,
        prefix: Callable[[], str] = next_prefix,
    ) -> None:
        self.planner, self._wire = Planner(policy, bucket_bytes, wire), wire
        self.choose_norms: Callable[..., layer_norms.NormMethod] = layer_norms.choose_norms
        self._prefix = prefix
        self._exchangers: dict[Any, Exchanger] = {}
        self._effective_rates: dict[Any, EffectiveRate] = {}
        self._norms: dict[Any, layer_norms.NormMethod] = {}
        self._learnt: dict[Paths, Measured] = {}
        # Lists of variables whose plans change unless they are retained, and the forecasts of the
        # current plans.
        self._changing: set[Paths] = set()
        self._kept: list[tuple[Exchanger, Forecast]] = []
        self._notes: dict[Any, dict[str, None]] = {}
        self._zeros = Zeros()

    def exchanger(self, variables: list[Any], inner_optimizer: Any) -> Exchanger:
        """Returns the exchanger of a list of variables, after creating it if necessary."""
        key = _key(variables)
        if key not in self._exchangers:
            plan = self.planner.plan_before_first_step([describe(v) for v in variables])
            advice.check_momentum(plan, inner_optimizer)
            advice.check_sparse_updates(plan, inner_optimizer)
            with surroundings.made_before_the_trace():
                self._exchangers[key] = Exchanger(plan, self._wire(), self._zeros)
                self._effective_rates[key] = EffectiveRate()
        return self._exchangers[key]

    def effective_rate(self, variables: list[Any]) -> EffectiveRate:
        """Returns the learning rate at which the schemes' state of `variables` was computed."""
        return self._effective_rates[_key(variables)]

    def norms(self, variables: list[Any]) -> Norms | None:
        """Returns the norm function for a layer-wise optimizer; `None` for the optimizer's own."""
        return self._norms.get(_key(variables), layer_norms.NormMethod()).norms

    @property
    def exchangers(self) -> list[Exchanger]:
        """All exchangers, in the order of their creation."""
        return list(self._exchangers.values())

    @property
    def agreed_exchangers(self) -> list[Exchanger]:
        """Exchangers that ranks have agreed on in a step, in the order of their creation."""
        return [exchanger for exchanger in self.exchangers if exchanger.prefix]

    def plan(self, variables: list[Any], inner_optimizer: Any) -> Plan:
        """Returns all plans as one, as of the last step, or before it the plan of `variables`."""
        plans = [self._of_last_step(exchanger) for exchanger in self.agreed_exchangers]
        if not plans:
            plans = [self.exchanger(variables, inner_optimizer).plan]
        buckets = tuple(itertools.chain(*(plan.buckets for plan in plans)))
        forecasts = tuple(itertools.chain(*(plan.forecasts for plan in plans)))
        notes = dict.fromkeys(
            itertools.chain(*(plan.notes for plan in plans), *self._notes.values())
        )
        return replace(plans[0], buckets=buckets, notes=tuple(notes), forecasts=forecasts)

    def agree(
        self,
        grads: list[Any],
        variables: list[Any],
        inner_optimizer: Any,
        settings: dict[str, Any],
    ) -> None:
        """Checks that all ranks exchange the same, while the first step is traced; plans again.

        The new plan uses the structure of gradients that the graph shows. Later traces change
        nothing: a rank may retrace at any time, when other ranks do not respond.
        """
        exchanger = self.exchanger(variables, inner_optimizer)
        if exchanger.prefix is None:
            links = runtime.links()
            own = {
                "scheme": repr(self.planner.policy),
                "bucket_bytes": self.planner.bucket_bytes,
                "links": links.to_json() if links else runtime.measures_links(),
            }
            exchanger.agree(self._prefix(), grads, own | settings)
            self._plan_step(grads, variables, inner_optimizer, settings)

    def _plan_step(
        self, grads: list[Any], variables: list[Any], inner_optimizer: Any, settings: dict[str, Any]
    ) -> None:
        self.planner.measure_links()
        if self.planner.policy.reader is not None or self.planner.leaves_open:
            steps = settings["gradient_accumulation_steps"]
            replicated = [*variables, *inner_optimizer.variables]
            self._plan_again(variables, self._read(grads, variables, replicated, steps))
        self._choose_norms(variables, inner_optimizer)
        self._take_notes(grads, variables, inner_optimizer, settings)

    def change_policy(self, policy: Policy) -> None:
        """Discards all plans; those of the next traced step follow `policy`."""
        self.planner.change_policy(policy)
        self.forget()

    def forget(self) -> None:
        """Discards all plans; the next traced step makes plans from the data available then."""
        self._changing.clear()
        for key in list(self._exchangers):
            self._forget(key)

    def _forget(self, key: Any) -> None:
        for of_all in (self._exchangers, self._effective_rates, self._norms, self._notes):
            of_all.pop(key, None)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plans and the data behind them, for JSON."""
        plans = [Resumed.of(exchanger.plan).to_dict() for exchanger in self.agreed_exchangers]
        # If plans are about to change, the new ones have been computed from `_learnt`.
        learnt = self._learnt if self._changing else None
        changing = sorted(self._changing)
        return self.planner.to_dict(learnt) | {"plans": plans, "changing": changing}

    def resume(self, saved: dict[str, Any]) -> bool:
        """Continues with an earlier run's plans if profile and nodes are the same.

        All ranks call it together. It returns true if later plans may differ from the current ones.
        """
        if not self.planner.resume(saved):
            return False
        self.forget()
        self._changing = {tuple(paths) for paths in saved["changing"]}
        return True

    def learn(self, found: Mapping[tuple[str, ...], Measured]) -> float:
        """Plans from measured step times; the plans take effect in `adopt`.

        `found` is the same on all ranks. Returns the predicted seconds that new plans save per
        step; 0 if plans are unchanged.
        """
        links = runtime.links()
        self._learnt, saved_s = dict(found), 0.0
        self._changing.clear()
        self._kept.clear()
        if links is None or not self.planner.leaves_open:
            return saved_s
        for exchanger in self.agreed_exchangers:
            paths = exchanger.plan.paths
            measured = found.get(paths)
            if measured is None:
                continue
            best = self.planner.plan(exchanger.plan.descriptions, measured, together=True)
            if best.buckets == exchanger.plan.buckets:
                exchanger.plan = best
            else:
                self._changing.add(paths)
                before, (after,) = self._prediction(exchanger, links, measured), best.forecasts
                self._kept.append((exchanger, after.kept(before)))
                saved_s += before.step_s - after.chosen.step_s
        return saved_s

    def _prediction(
        self, exchanger: Exchanger, links: NetworkProfile, measured: Measured
    ) -> Prediction:
        """Predicts, from measured step times, the step of the current plan."""
        followed, slowdown = self._of_last_step(exchanger), 1.0
        # Without a forecast, the sizes of structures were not known yet.
        name, bucket_bytes = "the first plan", self.planner.bucket_bytes
        for before in exchanger.plan.forecasts:
            name, bucket_bytes = before.chosen.name, before.chosen.bucket_bytes
            # A timed trial on another network does not apply to this one.
            slowdown = before.chosen.slowdown if before.links == links else 1.0
        return Prediction(
            name=name,
            bucket_bytes=bucket_bytes,
            simulated=predict(followed, links, measured.timeline, slowdown),
            slowdown=slowdown,
        )

    def keep(self) -> None:
        """Retains the current plans, although others are predicted to be faster."""
        for exchanger, forecast in self._kept:
            exchanger.plan = replace(exchanger.plan, forecasts=(forecast,))
        self.planner.decide()
        self._kept.clear()
        self._changing.clear()

    def adopt(self) -> None:
        """Applies the plans of `learn`, also in resumed runs.

        Plans that change are discarded. The others stay, with the state of their schemes.
        """
        self.planner.keep(self._learnt)
        for key, exchanger in list(self._exchangers.items()):
            if self._changes(exchanger):
                self._forget(key)
        self._changing.clear()

    @property
    def are_changing(self) -> bool:
        """True from `learn` until `keep` or `adopt`, if plans change."""
        return bool(self._changing)

    def flush(self) -> None:
        """Makes schemes whose plans change send everything, including residuals."""
        for exchanger in self._to_change:
            exchanger.states.flush()

    @property
    def have_flushed(self) -> bool:
        """True if schemes whose plans change have no residuals, on all ranks alike."""
        return all(exchanger.states.has_flushed for exchanger in self._to_change)

    @property
    def _to_change(self) -> list[Exchanger]:
        return [exchanger for exchanger in self.agreed_exchangers if self._changes(exchanger)]

    def _changes(self, exchanger: Exchanger) -> bool:
        return exchanger.plan.paths in self._changing

    def rank_state(self) -> Iterator[tuple[Any, StateDescription]]:
        """Yields the variables of schemes' state on this rank, each with its description."""
        for key, exchanger in self._exchangers.items():
            states = exchanger.states
            if states.exist:
                yield from zip(itertools.chain(*states.variables), states.describe(), strict=True)
                # Identify it by the variables, not by a number: another run may use the lists in
                # another order.
                members = states.members
                rate = StateDescription(name="effective_rate", members=members)
                yield self._effective_rates[key].variable, rate
                yield states.had_gradient, StateDescription(name="had_gradient", members=members)

    def _of_last_step(self, exchanger: Exchanger) -> Plan:
        with tf.init_scope():
            sizes, means = exchanger.sizes.numpy(), exchanger.times.means
        plan = sized(exchanger.plan, sizes, self.planner.policy)
        step_s = None if means is None else means.step_s
        forecasts = tuple(replace(one, measured_s=step_s) for one in plan.forecasts)
        return replace(plan, forecasts=forecasts)

    def _read(
        self, grads: list[Any], variables: list[Any], replicated: list[Any], steps: int | None
    ) -> list[Description]:
        """Describes gradients with their structure; sums over several steps have none."""
        reader, descriptions = self.planner.policy.reader, [describe(v) for v in variables]
        if steps:
            why = f"gradients are accumulated over {steps} steps"
            return [replace(d, why_no_structure=why) for d in descriptions]
        if reader is None:
            return descriptions
        found = reader.find(grads, descriptions, replicated)
        return reader.describe(descriptions, self._exchanged(found, variables, "structures"))

    def _exchanged(self, value: Any, variables: list[Any], name: str) -> list[Any]:
        exchanger = self._exchangers[_key(variables)]
        with tf.init_scope():
            return exchange_objects(value, exchanger.wire, f"{exchanger.prefix}.{name}")

    def _plan_again(self, variables: list[Any], descriptions: list[Description]) -> None:
        """Plans again, now that the graph shows the ops that compute the gradients."""
        exchanger = self._exchangers[_key(variables)]
        plan = self.planner.plan_first_step(descriptions)
        if self.planner.leaves_open:
            # Predictions depend on floating-point arithmetic.
            agreement.require_equal(
                self._exchanged(plan.digest, variables, "plan"),
                "All ranks must compute the same plan",
                "Pass an explicit `scheme` if ranks have processors that round differently.",
            )
        _check_structures(plan, self.planner.policy)
        # Reuse the old exchanger's variables: TensorFlow retraces a function that creates any.
        new = Exchanger(plan, exchanger.wire, self._zeros, exchanger)
        new.take_over(exchanger)
        self._exchangers[_key(variables)] = new

    def _choose_norms(self, variables: list[Any], inner_optimizer: Any) -> None:
        key = _key(variables)
        exchanger = self._exchangers[key]
        self._norms[key] = self.choose_norms(
            inner_optimizer, variables, exchanger.wire, f"{exchanger.prefix}"
        )
        if self._norms[key].note:
            self._note(key, self._norms[key].note)

    def _take_notes(
        self, grads: list[Any], variables: list[Any], inner_optimizer: Any, settings: dict[str, Any]
    ) -> None:
        key = _key(variables)
        self._note(key, _weighing(settings))
        plan = self._exchangers[key].plan
        structured = {description.path for description in plan.structured.values()}
        for grad, variable in zip(grads, variables, strict=True):
            if isinstance(grad, tf.IndexedSlices) and describe(variable).path not in structured:
                path = describe(variable).path
                self._note(key, f"{path}: rows are summed and sent as a dense matrix")
            if grad is None:
                self._note(
                    key,
                    f"{describe(variable).path}: no gradient on rank {runtime.rank()}, "
                    "zeros are sent",
                )
        for text in (advice.sparsity_advice(plan, inner_optimizer), advice.cpu_advice(plan)):
            if text:
                self._note(key, text)
                runtime.say("tfposeidon: %s.", text)

    def _note(self, key: Any, text: str) -> None:
        self._notes.setdefault(key, {})[text] = None


def _key(variables: list[Any]) -> Any:
    # TensorFlow's variables are not hashable, because they compare element by element.
    return tuple(of_tensorflow(v).ref() for v in variables)


def _check_structures(plan: Plan, policy: Policy) -> None:
    """Refuses a scheme that exchanges structures if no gradient has any."""
    reader = policy.reader
    if reader is None or plan.structured:
        return
    for description in plan.descriptions:
        scheme = policy.choose(description, plan.topology).scheme
        error = reader.missing(scheme.name, description) if scheme.reader is not None else ""
        if error:
            raise ValueError(error)


def _weighing(settings: dict[str, Any]) -> str:
    if settings["sample_count"]:
        return (
            f"gradients are weighted by {settings['sample_count']}: exact for losses that are "
            "means over the counted items"
        )
    if settings["counted"]:
        return (
            "gradients are weighted by the number of samples: exact for losses that are means "
            "over samples"
        )
    return (
        "sample_count is not set: all ranks have the same weight, unequal batches give a mean of "
        "means"
    )

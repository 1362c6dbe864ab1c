"""Plans of one optimizer, which ranks agree on when its steps are traced.

There is one plan for each list of variables that the optimizer is called with. A GAN, or a model
that is trained in parts, has several. A `Planner` makes them, by default from the policy alone;
policies whose choices depend on more, such as predicted steps, have a subclass of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import keras
import tensorflow as tf

from tfposeidon.checks import require_equal
from tfposeidon.communication import runtime
from tfposeidon.communication.wire import Wire, Zeros, exchange_objects
from tfposeidon.exchange import parallel_operator
from tfposeidon.exchange.exchanger import Exchanger
from tfposeidon.exchange.observer import Observer
from tfposeidon.exchange.plan import (
    Plan,
    check_optimizer,
    cpu_advice,
    make_plan,
    sized,
    sparsity_advice,
)
from tfposeidon.exchange.scheme_states import SchemeStates
from tfposeidon.gradients import (
    Description,
    describe,
    distinct_paths,
    of_tensorflow,
)
from tfposeidon.policies.base import Policy
from tfposeidon.schemes import names
from tfposeidon.state.placement import StateDescription


class Planner:
    """Makes the plans of one optimizer, the same on every rank.

    `is_watching` is true while steps that are traced call observers. `callback` is the class of the
    callback that `fit` runs once for all optimizers with such a planner; of its methods, those at
    the begin of an epoch and around a batch are called.
    """

    callback: ClassVar[type[keras.callbacks.Callback] | None] = None
    is_watching = False

    def __init__(self, policy: Policy, bucket_bytes: int | None, wire: Callable[[], Wire]) -> None:
        self._wire = wire
        self.policy = policy
        self.bucket_bytes = bucket_bytes

    @property
    def plans_steps(self) -> bool:
        """True if the first traced step may change the plan; the same on all ranks."""
        return self.policy.reader is not None

    def plan(self, descriptions: Sequence[Description]) -> Plan:
        """Makes a plan before the first step shows the structure of gradients."""
        return make_plan(
            descriptions, self.policy, self._wire().topology, self.bucket_bytes, self._notes()
        )

    def plan_step(self, descriptions: Sequence[Description]) -> Plan:
        """Makes the plan of the first traced step; all ranks call it together."""
        return self.plan(descriptions)

    def _notes(self) -> list[str]:
        return [] if self._wire().topology.size > 1 else ["one rank: no data is sent"]

    def observer(self, descriptions: Sequence[Description]) -> Observer | None:
        """Returns the observer of the steps of a list of variables, if there is one."""
        return None

    def of_last_step(self, plan: Plan, observer: Observer | None) -> Plan:
        """Returns a plan with the measurements of the observer."""
        return plan

    def forget_steps(self) -> None:
        """Discards measurements of steps, because later ones will differ from them."""

    def to_dict(self, plans: Sequence[Plan]) -> dict[str, Any]:
        """Returns the data behind the plans that are in use, for JSON."""
        return {}

    def resume(self, saved: dict[str, Any]) -> bool:
        """Uses the data behind an earlier run's plans; returns true if it changes later plans.

        All ranks call it together.
        """
        return False


def planner_for(policy: Policy, bucket_bytes: int | None, wire: Callable[[], Wire]) -> Planner:
    """Returns the policy's planner, or one that predicts steps if the network is known."""
    make = policy.planner or Planner
    if policy.is_fixed and runtime.network_profile() is not None and names.PLANNERS:
        make = names.resolve(names.PLANNERS, __name__, "AutoPlanner")
    planner: Planner = make(policy, bucket_bytes, wire)
    return planner


# Collectives are matched by name. Plans take their number at their first step, which all ranks
# reach together, and not at their creation: a rank may create or load more optimizers than others.
_numbers = itertools.count()


def next_prefix() -> str:
    """Returns a prefix of the names of collectives, different at each call."""
    return f"tp{next(_numbers)}"


class AgreedPlans:
    """A plan and an `Exchanger` for each list of variables that an optimizer is called with.

    `choose_norms` chooses how layer norms are computed; see `parallel_operator`.
    """

    def __init__(
        self,
        policy: Policy,
        bucket_bytes: int | None,
        wire: Callable[[], Wire] = runtime.wire,
        prefix: Callable[[], str] = next_prefix,
    ) -> None:
        self.policy, self.bucket_bytes = policy, bucket_bytes
        self._wire = wire
        self._planner: Planner | None = None
        self.choose_norms: Callable[..., parallel_operator.NormMethod] = (
            parallel_operator.choose_norms
        )
        self._prefix = prefix
        self._exchangers: dict[Any, Exchanger] = {}
        self._zeros = Zeros()

    @property
    def planner(self) -> Planner:
        """Planner of the current policy."""
        # Made when it is used, because it depends on whether the network is known.
        if self._planner is None:
            self._planner = planner_for(self.policy, self.bucket_bytes, self._wire)
        return self._planner

    def exchanger(self, variables: list[Any], inner_optimizer: Any) -> Exchanger:
        """Returns the exchanger of a list of variables, after creating it if necessary."""
        key = _key(variables)
        if key not in self._exchangers:
            plan = self.planner.plan([describe(v) for v in variables])
            check_optimizer(plan, inner_optimizer)
            with runtime.variables_outside_trace():
                exchanger = Exchanger(plan, self._wire(), self._zeros)
                exchanger.observer = self.planner.observer(plan.descriptions)
                self._exchangers[key] = exchanger
        return self._exchangers[key]

    @property
    def exchangers(self) -> list[Exchanger]:
        """All exchangers, in the order of their creation."""
        return list(self._exchangers.values())

    @property
    def lists(self) -> list[list[tf.Variable]]:
        """Lists of variables of `used_exchangers`, in their order."""
        used = self.used_exchangers
        keys = [key for key, exchanger in self._exchangers.items() if exchanger in used]
        return [[reference.deref() for reference in key] for key in keys]

    @property
    def agreed_exchangers(self) -> list[Exchanger]:
        """Exchangers that ranks have agreed on in a step, in the order of their creation."""
        return [exchanger for exchanger in self.exchangers if exchanger.prefix]

    @property
    def used_exchangers(self) -> list[Exchanger]:
        """Exchangers that ranks have agreed on, or whose state comes from an earlier run."""
        return [one for one in self.exchangers if one.prefix or one.states.had_any_gradient]

    def plan(self, variables: list[Any], inner_optimizer: Any) -> Plan:
        """Returns all plans as one, as of the last step, or before it the plan of `variables`."""
        plans = [self.of_last_step(exchanger) for exchanger in self.agreed_exchangers]
        if not plans:
            plans = [self.exchanger(variables, inner_optimizer).plan]
        buckets = tuple(itertools.chain(*(plan.buckets for plan in plans)))
        forecasts = tuple(itertools.chain(*(plan.forecasts for plan in plans)))
        found = [*(plan.notes for plan in plans), *(one.notes for one in self.exchangers)]
        notes = dict.fromkeys(itertools.chain(*found))
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
        if exchanger.prefix is not None:
            # A script that has caught the error below must not train with the plan.
            check_optimizer(exchanger.plan, inner_optimizer)
            return
        links = runtime.network_profile()
        own = {
            "scheme": repr(self.policy),
            "bucket_bytes": self.bucket_bytes,
            "links": links.to_json() if links else runtime.measures_network(),
        }
        exchanger.agree(self._prefix(), grads, own | settings)
        if self.planner.plans_steps:
            steps = settings["gradient_accumulation_steps"]
            replicated = [*variables, *inner_optimizer.variables]
            self._plan_again(exchanger, self._read(exchanger, grads, replicated, steps))
        wire, prefix = exchanger.wire, f"{exchanger.prefix}"
        exchanger.norm_method = self.choose_norms(inner_optimizer, variables, wire, prefix)
        # The new plan may have other schemes.
        check_optimizer(exchanger.plan, inner_optimizer)
        exchanger.notes = tuple(_notes(exchanger, grads, inner_optimizer, settings))

    def change_policy(self, policy: Policy) -> None:
        """Discards all plans; those of the next traced step follow `policy`."""
        self.policy, self._planner = policy, None
        self.forget()

    def forget(self) -> None:
        """Discards all plans; the next traced step makes plans from the data available then."""
        self.forget_some(self.exchangers)

    def forget_some(self, exchangers: Collection[Exchanger]) -> None:
        """Discards the plans of some exchangers. The others stay, with the state of schemes."""
        for key in [key for key, one in self._exchangers.items() if one in exchangers]:
            del self._exchangers[key]

    def to_dict(self) -> dict[str, Any]:
        """Returns the data behind the plans, for JSON."""
        return self.planner.to_dict([exchanger.plan for exchanger in self.agreed_exchangers])

    def resume(self, saved: dict[str, Any]) -> bool:
        """Continues with an earlier run's plans if the planner can; all ranks call it together.

        It returns true if later plans may differ from the current ones, which are discarded.
        """
        has_resumed = self.planner.resume(saved)
        if has_resumed:
            self.forget()
        return has_resumed

    def rank_state(self, variables: Sequence[Any]) -> Iterator[tuple[Any, StateDescription]]:
        """Yields the variables of schemes' state on this rank, each with its description.

        `variables` are those of all lists.
        """
        # Over all lists, of which two may have variables of equal paths.
        distinct = distinct_paths([describe(variable) for variable in variables])
        of_variables = dict(zip(_key(list(variables)), distinct, strict=True))
        for key, exchanger in self._exchangers.items():
            states = exchanger.states
            if states.exist:
                pairs = zip(key, states.plan.descriptions, strict=True)
                paths = [of_variables.get(reference, own.path) for reference, own in pairs]
                described = states.describe(paths)
                yield from zip(itertools.chain(*states.variables), described, strict=True)
                # Identify it by the variables, not by a number: another run may use the lists in
                # another order.
                members = states.members(paths)
                rate = StateDescription(name="effective_rate", members=members)
                yield exchanger.effective_rate.variable, rate
                yield states.had_gradient, StateDescription(name="had_gradient", members=members)

    def of_last_step(self, exchanger: Exchanger) -> Plan:
        """Returns a plan as of the last step that used it."""
        with tf.init_scope():
            plan = sized(exchanger.plan, exchanger.sizes.numpy(), self.policy)
            return self.planner.of_last_step(plan, exchanger.observer)

    def _read(
        self, exchanger: Exchanger, grads: list[Any], replicated: list[Any], steps: int | None
    ) -> list[Description]:
        """Describes gradients with their structure; sums over several steps have none."""
        reader, descriptions = self.policy.reader, list(exchanger.plan.descriptions)
        if steps:
            why = f"gradients are accumulated over {steps} steps"
            return [replace(d, why_no_structure=why) for d in descriptions]
        if reader is None:
            return descriptions
        found = reader.find(grads, descriptions, replicated)
        return reader.describe(descriptions, _exchanged(found, exchanger, "structures"))

    def _plan_again(self, exchanger: Exchanger, descriptions: list[Description]) -> None:
        """Plans again, now that the graph shows the ops that compute the gradients."""
        plan = self.planner.plan_step(descriptions)
        # A planner may depend on floating-point arithmetic.
        require_equal(
            _exchanged(plan.digest, exchanger, "plan"),
            "All ranks must compute the same plan",
            "Pass an explicit `scheme` if ranks have processors that round differently.",
        )
        _check_structures(plan, self.policy)
        # Keep the exchanger's variables: TensorFlow retraces a function that creates any.
        states = SchemeStates(plan)
        states.take_over(exchanger.states)
        exchanger.plan, exchanger.states = plan, states


def _exchanged(value: Any, exchanger: Exchanger, name: str) -> list[Any]:
    with tf.init_scope():
        return exchange_objects(value, exchanger.wire, f"{exchanger.prefix}.{name}")


def _notes(
    exchanger: Exchanger, grads: list[Any], inner_optimizer: Any, settings: dict[str, Any]
) -> Iterator[str]:
    """Yields remarks on the first traced step, for the plan."""
    plan, norm_method = exchanger.plan, exchanger.norm_method
    if norm_method.note:
        yield norm_method.note
    yield _weighing(settings)
    for member, (grad, path) in enumerate(zip(grads, plan.paths, strict=True)):
        if isinstance(grad, tf.IndexedSlices) and member not in plan.structured:
            yield f"{path}: rows are summed and sent as a dense matrix"
        if grad is None:
            yield f"{path}: no gradient on rank {runtime.rank()}, zeros are sent"
    for text in (sparsity_advice(plan, inner_optimizer), cpu_advice(plan)):
        if text:
            runtime.log_once("tfposeidon: %s.", text)
            yield text


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

"""Agrees with all ranks on the plans of one optimizer, when its steps are traced.

There is one plan for each list of variables that the optimizer is called with. A GAN, or a model
that is trained in parts, has several plans. A `Planner` makes the plans, by default from the policy
alone. A policy whose choices depend on other data, such as predicted times, has its own subclass of
`Planner`.
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
from tfposeidon.gradients import Description, describe, distinct_paths, of_tensorflow
from tfposeidon.policies import Policy
from tfposeidon.schemes import names
from tfposeidon.state.placement import StateDescription


class Planner:
    """Makes the plans of one optimizer, the same on every rank.

    `is_watching` is true while traced steps call observers. `callback` is the class of a Keras
    callback, which `fit` runs once for all optimizers with such a planner; `None` for no callback.
    `fit` calls only the callback's methods at the start of an epoch and around a batch.
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
        """Makes a plan before the structure of gradients is known."""
        topology = self._wire().topology
        return make_plan(descriptions, self.policy, topology, self.bucket_bytes, self._notes())

    def plan_step(self, descriptions: Sequence[Description]) -> Plan:
        """Makes the plan of the first traced step; all ranks call it together."""
        return self.plan(descriptions)

    def _notes(self) -> list[str]:
        return [] if self._wire().topology.size > 1 else ["one rank: no data is sent"]

    def observer(self, descriptions: Sequence[Description]) -> Observer | None:
        """Returns the observer of the steps of a list of variables, if there is one."""
        return None

    def of_last_step(self, plan: Plan, observer: Observer | None) -> Plan:
        """Returns the plan with the observer's measurements of the last step."""
        return plan

    def forget_steps(self) -> None:
        """Discards step measurements, on which plans may depend: later steps will differ."""

    def to_dict(self, plans: Sequence[Plan]) -> dict[str, Any]:
        """Returns the data on which the current `plans` are based, for JSON."""
        return {}

    def resume(self, saved: dict[str, Any]) -> bool:
        """Applies data of an earlier `to_dict`; returns whether later plans change; collective."""
        return False


# Horovod matches collectives by name. Plans receive their number at their first step, which all
# ranks reach together, and not at their creation, because a rank may create or load more optimizers
# than others.
_numbers = itertools.count()


def next_prefix() -> str:
    """Returns a prefix of the names of collectives, different at each call."""
    return f"tp{next(_numbers)}"


class AgreedPlans:
    """Stores an `Exchanger` with its plan for each list of variables that `apply` has received.

    `exchangers` is in the order of creation. `choose_norms` chooses how layer norms are computed;
    see `parallel_operator`.
    """

    def __init__(
        self,
        policy: Policy,
        bucket_bytes: int | None,
        wire: Callable[[], Wire] = runtime.wire,
        prefix: Callable[[], str] = next_prefix,
    ) -> None:
        self.policy, self.bucket_bytes = policy, bucket_bytes
        self._wire, self._prefix, self._zeros = wire, prefix, Zeros()
        self._planner: Planner | None = None
        self.choose_norms = parallel_operator.choose_norms
        self.exchangers: dict[Any, Exchanger] = {}

    @property
    def planner(self) -> Planner:
        """Planner of the current policy; it predicts step times if there is a network profile."""
        if self._planner is None:
            make = self.policy.planner or Planner
            if self.policy.is_fixed and runtime.network_profile() is not None and names.PLANNERS:
                make = names.resolve(names.PLANNERS, __name__, "AutoPlanner")
            self._planner = make(self.policy, self.bucket_bytes, self._wire)
        return self._planner

    def exchanger(self, variables: list[Any], inner_optimizer: Any) -> Exchanger:
        """Returns the exchanger of a list of variables, after creating it if necessary."""
        key = _key(variables)
        if key not in self.exchangers:
            plan = self.planner.plan([describe(v) for v in variables])
            check_optimizer(plan, inner_optimizer)
            with runtime.variables_outside_trace():
                exchanger = Exchanger(plan, self._wire(), self._zeros)
                exchanger.observer = self.planner.observer(plan.descriptions)
                self.exchangers[key] = exchanger
        return self.exchangers[key]

    @property
    def lists(self) -> list[list[tf.Variable]]:
        """Variables of each used exchanger, in the order of creation."""
        return [[one.deref() for one in key] for key, e in self.exchangers.items() if e.is_used]

    @property
    def agreed_exchangers(self) -> list[Exchanger]:
        """Exchangers whose plans ranks have agreed on in a step, in the order of creation."""
        return [exchanger for exchanger in self.exchangers.values() if exchanger.prefix]

    def plan(self, variables: list[Any], inner_optimizer: Any) -> Plan:
        """Returns all plans of the last step as one, or the plan of `variables` before any step."""
        plans = [self.of_last_step(exchanger) for exchanger in self.agreed_exchangers]
        if not plans:
            plans = [self.exchanger(variables, inner_optimizer).plan]
        notes = [*(plan.notes for plan in plans), *(one.notes for one in self.exchangers.values())]
        return replace(
            plans[0],
            buckets=tuple(itertools.chain(*(plan.buckets for plan in plans))),
            forecasts=tuple(itertools.chain(*(plan.forecasts for plan in plans))),
            notes=tuple(dict.fromkeys(itertools.chain(*notes))),
        )

    def agree(
        self, grads: list[Any], variables: list[Any], inner_optimizer: Any, settings: dict[str, Any]
    ) -> None:
        """Checks, while the first step is traced, that ranks have equal settings; then plans again.

        The new plan uses the structure of gradients in the graph. Later traces do not change the
        plan, because a rank may retrace at any time, while other ranks join no collectives.
        """
        exchanger = self.exchanger(variables, inner_optimizer)
        compiled = settings["functions compiled by XLA"]
        if exchanger.prefix is not None:
            _check_compiled(compiled, exchanger.xla_functions)
            # Check again, because a script may have caught the error of the last check below.
            check_optimizer(exchanger.plan, inner_optimizer)
            return
        links = runtime.network_profile()
        own = {
            "scheme": repr(self.policy),
            "bucket_bytes": self.bucket_bytes,
            "network": links.to_json() if links else runtime.measures_network(),
        }
        exchanger.agree(self._prefix(), grads, own | settings)
        exchanger.xla_functions = compiled
        if self.planner.plans_steps:
            replicated = [*variables, *inner_optimizer.variables]
            self._plan_again(exchanger, grads, replicated, settings["gradient_accumulation_steps"])
        exchanger.norm_method = self.choose_norms(
            inner_optimizer, variables, exchanger.wire, f"{exchanger.prefix}"
        )
        # Check again, because the new plan may contain other schemes.
        check_optimizer(exchanger.plan, inner_optimizer)
        exchanger.notes = tuple(_notes(exchanger, grads, inner_optimizer, settings))

    def change_policy(self, policy: Policy) -> None:
        """Discards all plans; the next traced step makes new ones with `policy`."""
        self.policy, self._planner = policy, None
        self.exchangers.clear()

    def discard(self, exchangers: Collection[Exchanger]) -> None:
        """Discards some exchangers; the others retain their plans and the state of schemes."""
        for key in [key for key, one in self.exchangers.items() if one in exchangers]:
            del self.exchangers[key]

    def to_dict(self) -> dict[str, Any]:
        """Returns the data on which the plans are based, for JSON."""
        return self.planner.to_dict([exchanger.plan for exchanger in self.agreed_exchangers])

    def resume(self, saved: dict[str, Any]) -> bool:
        """Continues with an earlier run's plans; returns true if it discarded the current plans."""
        has_resumed = self.planner.resume(saved)
        if has_resumed:
            self.exchangers.clear()
        return has_resumed

    def rank_state(self, variables: Sequence[Any]) -> Iterator[tuple[Any, StateDescription]]:
        """Yields the variables of schemes' state on this rank, each with its description."""
        # Number equal paths over all variables, because two lists may contain equal paths.
        distinct = distinct_paths([describe(variable) for variable in variables])
        of_variables = dict(zip(_key(list(variables)), distinct, strict=True))
        for key, exchanger in self.exchangers.items():
            states = exchanger.states
            if states.exist:
                pairs = zip(key, states.plan.descriptions, strict=True)
                paths = [of_variables.get(reference, own.path) for reference, own in pairs]
                described = states.describe(paths)
                yield from zip(itertools.chain(*states.variables), described, strict=True)
                # Identify this state by its members: another run may order the lists differently.
                members = states.members(paths)
                yield states.rate, StateDescription(name="effective_rate", members=members)
                yield states.had_gradient, StateDescription(name="had_gradient", members=members)

    def of_last_step(self, exchanger: Exchanger) -> Plan:
        """Returns an exchanger's plan as of the last step that used it."""
        with tf.init_scope():
            plan = sized(exchanger.plan, exchanger.sizes.numpy(), self.policy)
            return self.planner.of_last_step(plan, exchanger.observer)

    def _plan_again(
        self, exchanger: Exchanger, grads: list[Any], replicated: list[Any], steps: int | None
    ) -> None:
        """Plans again with the structure of the gradients, which accumulated gradients lack."""
        reader, descriptions = self.policy.reader, list(exchanger.plan.descriptions)
        if steps:
            why = f"gradients are accumulated over {steps} steps"
            descriptions = [replace(d, why_no_structure=why) for d in descriptions]
        elif reader is not None:
            # A rank without samples has no gradients, and accepts what the other ranks find.
            has_any = any(grad is not None for grad in grads)
            found = reader.find(grads, descriptions, replicated) if has_any else None
            received = _exchanged(found, exchanger, "structures")
            everybody = [one for one in received if one is not None]
            descriptions = reader.describe(descriptions, everybody) if everybody else descriptions
        plan = self.planner.plan_step(descriptions)
        # Compare plans, because a planner may depend on floating-point arithmetic.
        require_equal(
            _exchanged(plan.digest, exchanger, "plan"),
            "All ranks must compute the same plan",
            "Pass an explicit `scheme` if ranks have processors that round differently.",
        )
        _check_structures(plan, self.policy)
        # Create variables outside of the trace: TensorFlow retraces a function that creates any.
        with runtime.variables_outside_trace():
            states = SchemeStates(plan)
        states.take_over(exchanger.states)
        exchanger.plan, exchanger.states = plan, states


def _check_compiled(functions: int, agreed: int) -> None:
    """Raises `ValueError` if the number of functions that XLA compiles is not the agreed one."""
    if functions != agreed:
        raise ValueError(
            "XLA must compile the same number of functions in all steps of an optimizer, because "
            f"ranks agree on it once. Received: {functions} instead of {agreed} function(s). "
            "Compile the model with a new optimizer."
        )


def _notes(
    exchanger: Exchanger, grads: list[Any], inner_optimizer: Any, settings: dict[str, Any]
) -> Iterator[str]:
    """Yields remarks on the first traced step, for the plan."""
    plan = exchanger.plan
    if exchanger.norm_method.note:
        yield exchanger.norm_method.note
    yield _weighing(settings)
    if functions := settings["functions compiled by XLA"]:
        yield (
            f"XLA compiles the gradients in {functions} function(s): the gradients of a function "
            "are ready together, and have no sufficient factors"
        )
    for member, (grad, path) in enumerate(zip(grads, plan.paths, strict=True)):
        if isinstance(grad, tf.IndexedSlices) and member not in plan.structured:
            yield f"{path}: rows are summed and sent as a dense matrix"
        if grad is None:
            yield f"{path}: no gradient on rank {runtime.rank()}, zeros are sent"
    for text in (sparsity_advice(plan, inner_optimizer), cpu_advice(plan)):
        if text:
            runtime.log_once("tfposeidon: %s.", text)
            yield text


def _exchanged(value: Any, exchanger: Exchanger, name: str) -> list[Any]:
    with tf.init_scope():
        return exchange_objects(value, exchanger.wire, f"{exchanger.prefix}.{name}")


def _key(variables: list[Any]) -> Any:
    # Use references, because TensorFlow's variables are not hashable.
    return tuple(of_tensorflow(v).ref() for v in variables)


def _check_structures(plan: Plan, policy: Policy) -> None:
    """Raises `ValueError` if a scheme exchanges structures, but no gradient has a structure."""
    reader = policy.reader
    if reader is None or plan.structured:
        return
    for description in plan.descriptions:
        scheme = policy.choose(description, plan.topology).scheme
        if scheme.reader is not None and (error := reader.missing(scheme.name, description)):
            raise ValueError(error)


def _weighing(settings: dict[str, Any]) -> str:
    if not settings["sample_count"] and not settings["counted"]:
        return (
            "sample_count is not set: all ranks have the same weight, so unequal batches give a "
            "mean of means"
        )
    number = settings["sample_count"] or "the number of samples"
    items = "the counted items" if settings["sample_count"] else "samples"
    return f"gradients are weighted by {number}: exact for losses that are means over {items}"

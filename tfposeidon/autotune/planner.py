"""Implements the policy `auto`, and its planner, which predicts steps of any policy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.util import _pywrap_determinism  # There is no public API.
from typing_extensions import override

from tfposeidon import checks
from tfposeidon.autotune import measurement
from tfposeidon.autotune.choose_plan import ChoosePlan, Measured, StepTimes
from tfposeidon.autotune.forecast import Forecast, forecasts_of
from tfposeidon.autotune.search import (
    Tunable,
    candidates_of,
    choose_plan,
    plan_of,
    timed_exchanges,
)
from tfposeidon.autotune.simulation import Timeline
from tfposeidon.communication import runtime
from tfposeidon.communication.network_profile import NetworkProfile
from tfposeidon.communication.topology import Topology
from tfposeidon.communication.wire import Wire
from tfposeidon.exchange.agreed_plan import AgreedPlans, Planner
from tfposeidon.exchange.exchanger import Exchanger
from tfposeidon.exchange.observer import Observer
from tfposeidon.exchange.plan import Plan
from tfposeidon.gradients import Description, GradientReader
from tfposeidon.policies import POLICIES, Choice, Policy, Uniform
from tfposeidon.schemes import AllReduce, AllToAll, HiTopK, Scheme, TopK, Torus2D

WRONG_BY = 0.25
"""Relative error of a predicted step time above which the planner logs both times: the 90th
percentile of the errors of predicted exchanges is 24 % (docs/results/planning.md)."""
COMPRESSION, DENSITY = ("fp16", "topk"), 0.01
"""Kinds of compression, and the default density of sparse schemes."""


class AutoPlanner(Planner):
    """Chooses the plans of one optimizer by predicted steps.

    `has_decided` is true once plans are chosen by the times that steps record while `is_watching`.
    `proposed` has decisions that apply once the schemes in use have sent their residuals.
    """

    callback = ChoosePlan

    def __init__(
        self, policy: Policy, bucket_bytes: int | None, wire: Callable[[], Wire] = runtime.wire
    ) -> None:
        super().__init__(policy, bucket_bytes, wire)
        # The paths of a list of variables identify the list in snapshots.
        self._decisions: dict[frozenset[str], Forecast] = {}
        self.proposed: dict[frozenset[str], Forecast] = {}
        self.is_watching = self.has_decided = False

    @property
    def is_tunable(self) -> bool:
        """True if predictions choose plans, and measured times may change them."""
        # With deterministic ops, plans must not depend on measured times, which vary between runs.
        knows_links = runtime.network_profile() is not None or runtime.measures_network()
        return not self.policy.is_fixed and knows_links and not _pywrap_determinism.is_enabled()

    @property
    @override
    def plans_steps(self) -> bool:
        return super().plans_steps or self.is_tunable

    @override
    def plan(self, descriptions: Sequence[Description], timed: bool = False) -> Plan:
        decision = self._decisions.get(frozenset(one.path for one in descriptions))
        if decision is None:
            return self._choose(descriptions, timed=timed)
        topology = self._wire().topology
        candidate = candidates_of(self.policy, topology)[decision.chosen.name]
        return plan_of(decision, descriptions, candidate, topology, self._notes())

    def measure_network(self) -> None:
        """Measures the network profile if it is needed and unknown; all ranks must call this."""
        if self.is_tunable and runtime.network_profile() is None:
            with tf.init_scope():
                links = measurement.measure(runtime.wire())
            runtime.set_network_profile(links, measures=True)
            runtime.log_once("tfposeidon: network: %s.", links)

    @override
    def plan_step(self, descriptions: Sequence[Description]) -> Plan:
        self.measure_network()
        # While steps are timed, `propose` decides later whether exchanges are timed, too.
        return self.plan(descriptions, timed=self.is_tunable and not self.is_watching)

    def _choose(
        self,
        descriptions: Sequence[Description],
        timeline: Timeline | None = None,
        timed: bool = False,
    ) -> Plan:
        """Makes a plan; with `timed`, may time exchanges, and all ranks must call this."""
        return choose_plan(
            descriptions,
            self.policy,
            self._wire().topology,
            runtime.network_profile(),
            bucket_bytes=self.bucket_bytes,
            timeline=timeline,
            notes=self._notes(),
            trial=functools.partial(timed_exchanges, wire=self._wire()) if timed else None,
        )

    @override
    def _notes(self) -> list[str]:
        one_rank = super()._notes()
        if one_rank or self.policy.is_fixed or not _pywrap_determinism.is_enabled():
            return one_rank
        return ["deterministic ops: the plan does not depend on measured times"]

    @override
    def observer(self, descriptions: Sequence[Description]) -> StepTimes:
        return StepTimes(len(descriptions), self.policy.reader if self.is_tunable else None)

    @override
    def of_last_step(self, plan: Plan, observer: Observer | None) -> Plan:
        measured = observer.measured if isinstance(observer, StepTimes) else None
        step_s = measured and measured.step_s
        found = tuple(replace(one, measured_s=step_s) for one in forecasts_of(plan))
        return replace(plan, forecasts=found)

    def propose(
        self, plans: AgreedPlans, found: Sequence[Measured | None], shortest_s: float
    ) -> float:
        """Proposes plans by measured steps; returns the seconds that they save per step.

        All ranks must call this. Exchanges are timed if steps take longer than `shortest_s`.
        """
        self.has_decided, saved_s = True, 0.0
        pairs = zip(plans.agreed_exchangers, found, strict=True)
        for exchanger, one in ((e, measured) for e, measured in pairs if measured):
            plan, timed = exchanger.plan, one.step_s > shortest_s
            sizes = zip(plan.descriptions, one.sizes, strict=True)
            descriptions = [d.sized(size) if size else d for d, size in sizes]
            best = self._choose(descriptions, one.timeline, timed)
            for forecast in forecasts_of(best):
                before = forecast.of_plan(plan)
                if abs(one.step_s - before.step_s) > WRONG_BY * before.step_s:
                    wrong = "tfposeidon: steps take %.3g ms instead of the predicted %.3g ms."
                    runtime.log_once(wrong, 1e3 * one.step_s, 1e3 * before.step_s)
                if best.buckets == plan.buckets:
                    exchanger.plan = best
                    continue
                # The plan remains in use until the proposal is applied or discarded.
                exchanger.plan = replace(plan, forecasts=(replace(forecast, chosen=before),))
                # Within the margin the default is chosen, although the plan in use may be faster.
                if forecast.chosen.step_s <= before.step_s:
                    self.proposed[frozenset(plan.paths)] = forecast
                    saved_s += before.step_s - forecast.chosen.step_s
        return saved_s

    def changing(self, plans: AgreedPlans) -> list[Exchanger]:
        """Returns the exchangers for which another plan is proposed."""
        return [e for e in plans.agreed_exchangers if frozenset(e.plan.paths) in self.proposed]

    def apply(self, plans: AgreedPlans) -> None:
        """Applies the proposed plans; other plans and the state of their schemes are unchanged."""
        self._decisions |= self.proposed
        changing = self.changing(plans)
        self.proposed.clear()
        plans.discard(changing)
        # Steps that are traced later record no times.
        self.is_watching, self.has_decided = False, True

    @override
    def forget_steps(self) -> None:
        self.has_decided = False

    @override
    def to_dict(self, plans: Sequence[Plan]) -> dict[str, Any]:
        if self.policy.is_fixed:
            return {}
        links, serialize = runtime.network_profile(), keras.saving.serialize_keras_object
        return {
            "scheme": repr(self.policy),
            "bucket_bytes": self.bucket_bytes,
            "nodes": [list(node) for node in self._wire().topology.nodes],
            "network": links and links.to_json(),
            "has_decided": self.has_decided,
            "plans": serialize([[plan.paths, forecasts_of(plan)] for plan in plans]),
            "proposed": serialize([[[*paths], [one]] for paths, one in self.proposed.items()]),
        }

    @override
    def resume(self, saved: dict[str, Any]) -> bool:
        # If both runs measure the network on the same hosts, use the earlier profile. Otherwise,
        # compute plans again if nodes, profile or policy differ.
        if not self.is_tunable or saved["network"] is None:
            return False
        wire, links = self._wire(), NetworkProfile.from_json(saved["network"], "the snapshot")
        own = self.to_dict([])
        is_same_layout = own["nodes"] == saved["nodes"] and runtime.measures_network()
        if is_same_layout and links.hosts == measurement.hosts_of(wire):
            runtime.set_network_profile(links, measures=True)
            own["network"] = saved["network"]
        compared = "scheme", "bucket_bytes", "nodes", "network"
        differing = [name for name in compared if own[name] != saved[name]]
        deserialize = keras.saving.deserialize_keras_object
        decisions, self.proposed = (
            {frozenset(paths): one for paths, found in deserialize(saved[key]) for one in found}
            for key in ("plans", "proposed")
        )
        if differing:
            # Retain schemes with saved residuals, which only these schemes can send.
            is_known = not {"scheme", "bucket_bytes"} & {*differing}
            candidates = candidates_of(self.policy, wire.topology) if is_known else {}
            stateful = {name for name, policy in candidates.items() if policy.keeps_state}
            decisions = {p: one for p, one in decisions.items() if one.chosen.name in stateful}
            self.proposed = {}
            what = "with residuals are retained until steps are timed" if decisions else "change"
            text = "tfposeidon: `%s` differs from the snapshot; the plans %s."
            runtime.log_once(text, differing[0], what)
        self._decisions, self.has_decided = decisions, not differing and saved["has_decided"]
        return bool(decisions)


# ------------------------------------------------------------------ policy


@dataclass(frozen=True)
class Auto(Tunable):
    """Chooses the scheme and the bucket size with the shortest predicted step.

    `Auto` needs the network profile of the job, which is measured at the first step unless it is
    passed to `tfposeidon.init(network=...)`. Without a profile, every variable uses all-reduce. By
    default, `Auto` considers only schemes that average gradients exactly, up to rounding. `Auto`
    was not tested on several GPUs.

    Args:
      compression: Kinds of compression to consider: `"fp16"` for schemes that send 16 bits per
        element, `"topk"` for sparse schemes. By default none, so that all schemes are lossless.
      density: Share of elements that sparse schemes send, in (0, 1] (default 0.01).
      margin: Share by which the predicted step of another scheme must be shorter than the step
        with all-reduce, in [0, 1) (default 0.02).

    Raises:
      ValueError: If `density` or `margin` is out of its range, a kind is unknown, or `density` is
        given without "topk".

    Example:
      >>> import keras, tfposeidon as tp
      >>> policy = tp.policies.Auto(compression=("fp16",))
      >>> optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(0.1), scheme=policy)
      >>> optimizer.policy
      Auto(compression=('fp16',), density=0.01, margin=0.02)
    """

    compression: tuple[str, ...] = ()
    density: float = DENSITY
    margin: float = 0.02

    def __post_init__(self) -> None:
        checks.check_number("margin", self.margin, checks.BELOW_1, "Leave it out for 2 %.")
        checks.check_number("density", self.density, checks.FRACTION, "Leave it out for 1 %.")
        given = self.compression
        kinds = [given] if isinstance(given, str) else given
        if not isinstance(kinds, list | tuple | set | frozenset) or set(kinds) - {*COMPRESSION}:
            raise ValueError(
                f"`compression` must be one or more of {', '.join(COMPRESSION)}. Received: "
                f"compression={given!r}. Leave it out for lossless schemes."
            )
        if self.density != DENSITY and "topk" not in kinds:
            raise ValueError(
                f"`density` applies only to sparse schemes. Received: density={self.density}, "
                f'compression={given!r}. Add "topk" to `compression`.'
            )
        # Store a tuple in a fixed order, so that settings of ranks and runs can be compared.
        ordered = tuple(kind for kind in COMPRESSION if kind in kinds)
        object.__setattr__(self, "compression", ordered)

    @override
    def choose(self, description: Description, topology: Topology) -> Choice:
        why = "the network profile is unknown" if topology.size > 1 else "a single rank"
        return Choice(AllReduce(), f"auto: {why}")

    @override
    def candidates(self, topology: Topology) -> dict[str, Policy]:
        # On one node, or with nodes of one rank, `Torus2D` equals `AllToAll`.
        has_levels = len(topology.nodes) > 1 and topology.positions > 1
        schemes: list[Scheme] = [AllReduce(), AllToAll(), *([Torus2D()] if has_levels else [])]
        wire_dtype = "float16" if "fp16" in self.compression else None
        if wire_dtype:
            schemes += [replace(scheme, wire_dtype=wire_dtype) for scheme in schemes]  # type: ignore
        if "topk" in self.compression:
            sparse = (HiTopK, TopK)
            schemes += [kind(density=self.density, wire_dtype=wire_dtype) for kind in sparse]
        by_rows = [None, *([POLICIES["hybcomm"]()] if "hybcomm" in POLICIES else [])]
        found = [Considered(scheme, structured) for structured in by_rows for scheme in schemes]
        return {str(one): one for one in found}

    @property
    @override
    def reader(self) -> GradientReader | None:
        return POLICIES["hybcomm"]().reader if "hybcomm" in POLICIES else None

    @property
    @override
    def planner(self) -> type[AutoPlanner]:
        return AutoPlanner


@dataclass(frozen=True)
class Considered(Uniform):
    """Candidate of `Auto`: a scheme, or a choice by batch rows between factors and this scheme."""

    structured: Policy | None = None

    def __str__(self) -> str:
        return f"factors and {self.scheme}" if self.structured else str(self.scheme)

    @override
    def choose(self, description: Description, topology: Topology) -> Choice:
        scheme = self.scheme
        if self.structured is not None and description.structure is not None:
            by_rows: Any = self.structured.choose(description.sized(None), topology).scheme
            # A scheme that chooses by batch rows has no state, so it cannot contain a scheme with
            # state.
            dense = AllReduce() if scheme.slots(description.length, topology) else scheme
            scheme = replace(by_rows, many=dense).fitted(description.structure, topology)
        return Choice(scheme, "auto: shortest predicted step")

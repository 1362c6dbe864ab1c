"""Plans from the known network profile and step times: measured now, given, or from a snapshot.

The first plan depends on the network profile alone. Once steps have been timed, the planner can
plan again with their computation times.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import tensorflow as tf
from tensorflow.python.util import _pywrap_determinism  # There is no public API.
from typing_extensions import override

from tfposeidon.autotune import measurement
from tfposeidon.autotune.forecast import Forecast, Prediction, forecasts_of
from tfposeidon.autotune.predicting import PredictingPlanner
from tfposeidon.autotune.race import Race
from tfposeidon.autotune.resumed import Resumed
from tfposeidon.autotune.search import choose_plan, predict
from tfposeidon.autotune.step_times import Measured, StepTimes
from tfposeidon.communication import runtime
from tfposeidon.communication.network_profile import NetworkProfile
from tfposeidon.communication.wire import Wire
from tfposeidon.exchange.agreed_plan import AgreedPlans
from tfposeidon.exchange.exchanger import Exchanger
from tfposeidon.exchange.plan import Plan
from tfposeidon.gradients.description import Description
from tfposeidon.policies import Policy

Paths = tuple[str, ...]
"""Paths of a list of variables, which identify it in snapshots."""


class AutoPlanner(PredictingPlanner):
    """Makes the plans of one optimizer by predicted steps.

    `spent_s` is the time spent on network measurements and timed trials so far. While `is_watching`
    is true, traced steps record the times that plans depend on. `has_decided` is true once plans
    were chosen by measured step times, or retained.
    """

    def __init__(
        self, policy: Policy, bucket_bytes: int, wire: Callable[[], Wire] = runtime.wire
    ) -> None:
        super().__init__(policy, bucket_bytes, wire)
        self._measured: dict[Paths, Measured] = {}
        self._race, self._raced_over = Race(), runtime.links()
        self._resumed: dict[Paths, Resumed] = {}
        # Times from which plans were updated. They replace `_measured` when the plans apply.
        self._updated: dict[Paths, Measured] = {}
        # Lists of variables whose plans change unless they are retained, and the forecasts of the
        # current plans.
        self._changing: set[Paths] = set()
        self._retained: list[tuple[Exchanger, Forecast]] = []
        self.spent_s = 0.0
        self.is_watching = self.has_decided = False

    @property
    @override
    def is_tunable(self) -> bool:
        # A plan that depends on measured times would differ in the next run.
        knows_links = runtime.links() is not None or runtime.measures_links()
        return knows_links and not is_deterministic()

    @property
    def is_undecided(self) -> bool:
        """True if plans depend on measured step times, and were not chosen by them yet."""
        return self.is_tunable and not self.has_decided

    # ------------------------------------------------------------------ plans

    @property
    @override
    def plans_steps(self) -> bool:
        return super().plans_steps or self.is_tunable

    @override
    def plan(self, descriptions: Sequence[Description]) -> Plan:
        resumed = self._resumed.get(paths_of(descriptions))
        return resumed.plan(descriptions) if resumed else self._choose(descriptions)

    @override
    def plan_step(self, descriptions: Sequence[Description]) -> Plan:
        self._measure_links()
        plan = self._choose(descriptions, together=True)
        paths = paths_of(descriptions)
        resumed, measured = self._resumed.get(paths), self._measured.get(paths)
        if resumed is None:
            return plan
        # The earlier run may have retained a plan although another was predicted to be faster.
        if measured is None:
            return resumed.followed(plan, descriptions, None)
        return resumed.followed(plan, measured.sized(descriptions), measured.timeline)

    @override
    def observer(self, descriptions: Sequence[Description]) -> StepTimes:
        # Predictions also need the sizes of structures that the plan does not exchange.
        return StepTimes(len(descriptions), self.policy.reader)

    def _choose(
        self,
        descriptions: Sequence[Description],
        measured: Measured | None = None,
        *,
        together: bool = False,
    ) -> Plan:
        """Makes a plan, from the times of `apply` by default.

        `together` is true if all ranks call it together, so that it may time exchanges.
        """
        links = runtime.links()
        measured = measured or self._measured.get(paths_of(descriptions))
        if links != self._raced_over:
            # A timed trial on another network does not apply to this one.
            self._race, self._raced_over = Race(), links
        wire = self._wire() if together and not is_deterministic() else None
        return choose_plan(
            descriptions if measured is None else measured.sized(descriptions),
            self.policy,
            self._wire().topology,
            links,
            bucket_bytes=self.bucket_bytes,
            timeline=None if measured is None else measured.timeline,
            notes=self._notes(),
            race=lambda plans: self._raced(plans, wire),
        )

    @override
    def _notes(self) -> list[str]:
        if self._wire().topology.size > 1 and is_deterministic():
            return ["deterministic ops: the plan does not depend on measured times"]
        return super()._notes()

    def _raced(self, plans: Sequence[Plan], wire: Wire | None) -> Sequence[float]:
        with self._spending():
            return self._race.times(plans, wire)

    def _measure_links(self) -> None:
        """Measures the network profile if it is needed and unknown."""
        if self.is_tunable and runtime.links() is None:
            with self._spending():
                with tf.init_scope():
                    runtime.keep_links(measurement.measure(runtime.wire()))
                runtime.say("tfposeidon: network: %s.", runtime.links())

    @contextlib.contextmanager
    def _spending(self) -> Iterator[None]:
        begin_s = time.perf_counter()
        yield
        self.spent_s += time.perf_counter() - begin_s

    # ------------------------------------------------------------------ plans from measured steps

    def update(self, plans: AgreedPlans, found: Mapping[Paths, Measured]) -> float:
        """Plans from measured step times; the plans take effect in `apply`.

        `found` is the same on all ranks. Returns the predicted seconds that new plans save per
        step; 0 if plans are unchanged.
        """
        links = runtime.links()
        self._updated, saved_s = dict(found), 0.0
        self._changing.clear()
        self._retained.clear()
        if links is None or not self.is_tunable:
            return saved_s
        for exchanger in plans.agreed_exchangers:
            paths = exchanger.plan.paths
            measured = found.get(paths)
            if measured is None:
                continue
            best = self._choose(exchanger.plan.descriptions, measured, together=True)
            if best.buckets == exchanger.plan.buckets:
                exchanger.plan = best
            else:
                self._changing.add(paths)
                followed = plans.of_last_step(exchanger)
                before, (after,) = self._prediction(followed, links, measured), forecasts_of(best)
                self._retained.append((exchanger, after.kept(before)))
                saved_s += before.step_s - after.chosen.step_s
        return saved_s

    def _prediction(self, plan: Plan, links: NetworkProfile, measured: Measured) -> Prediction:
        """Predicts, from measured step times, the step of the current plan."""
        # Without a forecast, the sizes of structures were not known yet.
        name, bucket_bytes, slowdown = "the first plan", self.bucket_bytes, 1.0
        for before in forecasts_of(plan):
            name, bucket_bytes = before.chosen.name, before.chosen.bucket_bytes
            # A timed trial on another network does not apply to this one.
            slowdown = before.chosen.slowdown if before.links == links else 1.0
        return Prediction(
            name=name,
            bucket_bytes=bucket_bytes,
            simulated=predict(plan, links, measured.timeline, slowdown),
            slowdown=slowdown,
        )

    def retain(self) -> None:
        """Retains the current plans, although others are predicted to be faster."""
        for exchanger, forecast in self._retained:
            exchanger.plan = replace(exchanger.plan, forecasts=(forecast,))
        self._retained.clear()
        self._changing.clear()
        self._decide()

    def apply(self, plans: AgreedPlans) -> None:
        """Applies the plans of `update`, also in resumed runs.

        Plans that change are discarded. The others stay, with the state of their schemes.
        """
        self._measured |= self._updated
        self._resumed.clear()
        self._decide()
        plans.forget_some([one for one in plans.exchangers if self._changes(one)])
        self._changing.clear()

    def _decide(self) -> None:
        # Steps that are traced later record no times.
        self.is_watching, self.has_decided = False, True

    @property
    def are_changing(self) -> bool:
        """True from `update` until `retain` or `apply`, if plans change."""
        return bool(self._changing)

    def flush(self, plans: AgreedPlans) -> None:
        """Makes schemes whose plans change send everything, including residuals."""
        for exchanger in plans.agreed_exchangers:
            if self._changes(exchanger):
                exchanger.states.flush()

    def has_flushed(self, plans: AgreedPlans) -> bool:
        """Returns whether schemes whose plans change have no residuals, on all ranks alike."""
        changing = [one for one in plans.agreed_exchangers if self._changes(one)]
        return all(exchanger.states.has_flushed for exchanger in changing)

    def _changes(self, exchanger: Exchanger) -> bool:
        return exchanger.plan.paths in self._changing

    @override
    def forget_steps(self) -> None:
        self._measured.clear()
        self.has_decided = False

    # ------------------------------------------------------------------ snapshots

    @override
    def to_dict(self, plans: Sequence[Plan]) -> dict[str, Any]:
        links = runtime.links()
        # If plans are about to change, the new ones have been computed from `_updated`.
        measured = self._measured | (self._updated if self._changing else {})
        return {
            "policy": repr(self.policy),
            "bucket_bytes": self.bucket_bytes,
            "nodes": self._wire().topology.nodes,
            "links": links and links.to_json(),
            "measured": [{"paths": paths, **asdict(one)} for paths, one in measured.items()],
            "raced": self._race.known,
            "has_decided": self.has_decided or self.are_changing,
            "plans": [Resumed.of(plan).to_dict() for plan in plans],
            "changing": sorted(self._changing),
        }

    @override
    def resume(self, saved: dict[str, Any]) -> bool:
        # If both runs measure the network on the same hosts, the earlier profile is used.
        # Otherwise, plans are recomputed if profile or policy differ.
        wire = self._wire()
        nodes = [list(node) for node in wire.topology.nodes]
        if not self.is_tunable or saved["links"] is None or saved["nodes"] != nodes:
            return False
        if (saved["policy"], saved["bucket_bytes"]) != (repr(self.policy), self.bucket_bytes):
            runtime.say(
                "tfposeidon: `scheme` or `bucket_bytes` differs from the snapshot; the plans are "
                "computed again."
            )
            return False
        links = NetworkProfile.from_json(saved["links"], "the snapshot")
        if runtime.measures_links() and links.hosts == measurement.hosts_of(wire):
            runtime.keep_links(links)
        if runtime.links() != links:
            runtime.say(
                "tfposeidon: the network profile differs from the snapshot; the plans are "
                "computed again."
            )
            return False
        self._measured = {
            tuple(one["paths"]): Measured(
                one["first_s"], one["compute_s"], one["step_s"], tuple(one["sizes"])
            )
            for one in saved["measured"]
        }
        self._race, self._raced_over = Race(saved["raced"]), links
        self.has_decided = saved["has_decided"]
        plans = [Resumed.from_dict(one) for one in saved["plans"]]
        self._resumed = {plan.paths: plan for plan in plans}
        self._changing = {tuple(paths) for paths in saved["changing"]}
        return True


def is_deterministic() -> bool:
    """Returns whether `tf.config.experimental.enable_op_determinism` was called."""
    return bool(_pywrap_determinism.is_enabled())


def paths_of(descriptions: Sequence[Description]) -> Paths:
    """Returns the paths of the described variables."""
    return tuple(description.path for description in descriptions)

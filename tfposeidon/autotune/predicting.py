"""Plans with a predicted step, of any policy whose costs are known, over a known network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import keras
from typing_extensions import override

from tfposeidon.autotune.choose_plan import ChoosePlan
from tfposeidon.autotune.forecast import forecasts_of
from tfposeidon.autotune.search import choose_plan
from tfposeidon.autotune.step_times import StepTimes
from tfposeidon.communication import runtime
from tfposeidon.exchange.observer import Observer
from tfposeidon.exchange.plan import Plan
from tfposeidon.exchange.planner import Planner
from tfposeidon.gradients.description import Description


class PredictingPlanner(Planner):
    """Predicts the step of each plan, and shows beside it the time of steps that are observed."""

    callback: ClassVar[type[keras.callbacks.Callback]] = ChoosePlan

    @property
    def is_tunable(self) -> bool:
        """True if predictions choose plans, and may choose others once steps have run."""
        return False

    @override
    def plan(self, descriptions: Sequence[Description]) -> Plan:
        return choose_plan(
            descriptions,
            self.policy,
            self._wire().topology,
            runtime.links(),
            bucket_bytes=self.bucket_bytes,
            notes=self._notes(),
        )

    @override
    def observer(self, descriptions: Sequence[Description]) -> StepTimes:
        return StepTimes(len(descriptions))

    @override
    def of_last_step(self, plan: Plan, observer: Observer | None) -> Plan:
        means = observer.means if isinstance(observer, StepTimes) else None
        step_s = None if means is None else means.step_s
        found = tuple(replace(one, measured_s=step_s) for one in forecasts_of(plan))
        return replace(plan, forecasts=found)

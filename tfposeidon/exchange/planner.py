"""Makes the plans of an optimizer, by default from its policy alone.

Policies whose choices depend on more, such as predicted steps, have a subclass of `Planner`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import keras

from tfposeidon.communication import runtime
from tfposeidon.communication.wire import Wire
from tfposeidon.exchange.observer import Observer
from tfposeidon.exchange.plan import Plan, make_plan
from tfposeidon.gradients.description import Description
from tfposeidon.policies.base import Policy
from tfposeidon.schemes import names


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
    if policy.is_fixed and runtime.links() is not None and names.PLANNERS:
        make = names.resolve(names.PLANNERS, __name__, "PredictingPlanner")
    planner: Planner = make(policy, bucket_bytes, wire)
    return planner

"""Plans of an earlier run, as snapshots keep them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras

from tfposeidon.communication import runtime
from tfposeidon.exchange.scheme_states import descriptions_of
from tfposeidon.gradients.description import Description
from tfposeidon.planning.plan import Bucket, Plan
from tfposeidon.policies import Choice
from tfposeidon.schemes import Scheme


@dataclass(frozen=True)
class Resumed:
    """Schemes and members of all buckets of a plan.

    Attributes:
      paths: Paths of the variables, in their order.
      buckets: Scheme and members of each bucket.
    """

    paths: tuple[str, ...]
    buckets: tuple[tuple[Scheme, tuple[int, ...]], ...]

    @classmethod
    def of(cls, plan: Plan) -> Resumed:
        """Returns what snapshots keep of a plan.

        Args:
          plan: Plan that steps have followed.
        """
        buckets = tuple((bucket.scheme, bucket.members) for bucket in plan.buckets)
        return cls(tuple(d.path for d in descriptions_of(plan)), buckets)

    def plan(self, descriptions: Sequence[Description]) -> Plan:
        """Returns the plan for the same variables.

        Args:
          descriptions: Descriptions of the variables, in their order.
        """
        buckets = []
        for scheme, members in self.buckets:
            own = tuple(descriptions[member] for member in members)
            choices = (Choice(scheme, "as in the snapshot"),) * len(own)
            buckets.append(
                Bucket(members=members, descriptions=own, scheme=scheme, choices=choices)
            )
        return Plan(buckets=tuple(buckets), topology=runtime.wire().topology)

    def to_dict(self) -> dict[str, Any]:
        """Returns it for JSON."""
        buckets = [
            [keras.saving.serialize_keras_object(scheme), members]
            for scheme, members in self.buckets
        ]
        return {"paths": self.paths, "buckets": buckets}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Resumed:
        """Reads what `to_dict` returned.

        Args:
          saved: The same, from JSON.
        """
        buckets = tuple(
            (keras.saving.deserialize_keras_object(scheme), tuple(members))
            for scheme, members in saved["buckets"]
        )
        return cls(tuple(saved["paths"]), buckets)

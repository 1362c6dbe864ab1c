"""Plans of an earlier run, as snapshots keep them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras

from tfposeidon.communication import runtime
from tfposeidon.gradients.description import Description
from tfposeidon.planning.forecast import Prediction
from tfposeidon.planning.plan import Bucket, Plan
from tfposeidon.planning.search import predict
from tfposeidon.planning.simulation import Timeline
from tfposeidon.policies import Choice
from tfposeidon.schemes import Scheme


@dataclass(frozen=True)
class Resumed:
    """Schemes and members of all buckets of a plan.

    Attributes:
      paths: Paths of the variables, in their order.
      buckets: Scheme and members of each bucket.
      name: Name of the plan among those that were predicted; empty without a prediction.
      bucket_bytes: Size up to which it fuses gradients.
    """

    paths: tuple[str, ...]
    buckets: tuple[tuple[Scheme, tuple[int, ...]], ...]
    name: str = ""
    bucket_bytes: int = 0

    @classmethod
    def of(cls, plan: Plan) -> Resumed:
        """Returns what snapshots keep of a plan.

        Args:
          plan: Plan that steps have followed.
        """
        buckets = tuple((bucket.scheme, bucket.members) for bucket in plan.buckets)
        if not plan.forecasts:
            return cls(plan.paths, buckets)
        (forecast,) = plan.forecasts
        return cls(plan.paths, buckets, forecast.chosen.name, forecast.chosen.bucket_bytes)

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

    def followed(
        self, plan: Plan, descriptions: Sequence[Description], timeline: Timeline | None
    ) -> Plan:
        """Returns the plan that the earlier run followed, with a forecast.

        Args:
          plan: What would be planned now for the same variables, with its forecast.
          descriptions: Descriptions of the variables, in their order, with the rows of factors
            where they are known.
          timeline: Times of a step's computation, if they are known.
        """
        if self.buckets == tuple((bucket.scheme, bucket.members) for bucket in plan.buckets):
            return plan
        before = dataclasses.replace(self.plan(plan.descriptions), notes=plan.notes)
        timed = self.plan(descriptions)
        if not plan.forecasts or not all(map(_has_cost, timed.buckets)):
            return before
        (forecast,) = plan.forecasts
        chosen = Prediction(
            name=self.name or "the plan of the snapshot",
            bucket_bytes=self.bucket_bytes,
            simulated=predict(timed, forecast.links, timeline),
        )
        return dataclasses.replace(before, forecasts=(forecast.kept(chosen),))

    def to_dict(self) -> dict[str, Any]:
        """Returns it for JSON."""
        buckets = [
            [keras.saving.serialize_keras_object(scheme), members]
            for scheme, members in self.buckets
        ]
        return {
            "paths": self.paths,
            "buckets": buckets,
            "name": self.name,
            "bucket_bytes": self.bucket_bytes,
        }

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
        return cls(tuple(saved["paths"]), buckets, saved["name"], saved["bucket_bytes"])


def _has_cost(bucket: Bucket) -> bool:
    """Returns whether the rows of factors are known, where they are exchanged."""
    return not bucket.takes_factors or all(
        d.factors is None or d.factors.rows is not None for d in bucket.descriptions
    )

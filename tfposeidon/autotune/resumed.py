"""Plans of an earlier run, restored from snapshots.

A snapshot stores the scheme and members of each bucket. Descriptions, forecasts and costs are
recomputed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras

from tfposeidon.autotune.forecast import Prediction, forecasts_of
from tfposeidon.autotune.search import predict
from tfposeidon.autotune.simulation import Timeline
from tfposeidon.communication import runtime
from tfposeidon.exchange.plan import Bucket, Plan
from tfposeidon.gradients.description import Description
from tfposeidon.policies import Choice
from tfposeidon.schemes import Scheme


@dataclass(frozen=True)
class Resumed:
    """Schemes and members of all buckets of a plan.

    `name` is its name among the predicted plans, or empty without a prediction.
    """

    paths: tuple[str, ...]
    buckets: tuple[tuple[Scheme, tuple[int, ...]], ...]
    name: str = ""
    bucket_bytes: int = 0

    @classmethod
    def of(cls, plan: Plan) -> Resumed:
        """Returns the parts of a plan that snapshots store."""
        buckets = tuple((bucket.scheme, bucket.members) for bucket in plan.buckets)
        if not plan.forecasts:
            return cls(plan.paths, buckets)
        (forecast,) = forecasts_of(plan)
        return cls(plan.paths, buckets, forecast.chosen.name, forecast.chosen.bucket_bytes)

    def plan(self, descriptions: Sequence[Description]) -> Plan:
        """Returns the plan for the same variables."""
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
        """Returns the earlier run's plan with a forecast.

        `plan` is the one that would be made now for the same variables. `descriptions` include the
        sizes of structures if they are known.
        """
        if self.buckets == tuple((bucket.scheme, bucket.members) for bucket in plan.buckets):
            return plan
        before = dataclasses.replace(self.plan(plan.descriptions), notes=plan.notes)
        timed = self.plan(descriptions)
        if not plan.forecasts or not all(map(_has_cost, timed.buckets)):
            return before
        (forecast,) = forecasts_of(plan)
        chosen = Prediction(
            name=self.name or "the plan of the snapshot",
            bucket_bytes=self.bucket_bytes,
            simulated=predict(timed, forecast.links, timeline),
        )
        return dataclasses.replace(before, forecasts=(forecast.kept(chosen),))

    def to_dict(self) -> dict[str, Any]:
        """Returns a dictionary for JSON."""
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
        """Restores a plan from the dictionary of `to_dict`."""
        buckets = tuple(
            (keras.saving.deserialize_keras_object(scheme), tuple(members))
            for scheme, members in saved["buckets"]
        )
        return cls(tuple(saved["paths"]), buckets, saved["name"], saved["bucket_bytes"])


def _has_cost(bucket: Bucket) -> bool:
    """Returns whether the sizes of structures that are exchanged are known."""
    return all(structure.is_sized for structure in bucket.structures)

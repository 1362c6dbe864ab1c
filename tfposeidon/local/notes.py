"""Remarks of the plan of `LocalUpdates`, apart from the bytes of a synchronization."""

from __future__ import annotations

from tfposeidon.local.rules import Rule
from tfposeidon.local.schedule import Schedule
from tfposeidon.planning.plan import Plan
from tfposeidon.units import readable_size


def notes(plan: Plan, schedule: Schedule, rule: Rule, in_node: Plan | None) -> list[str]:
    """Returns remarks on bytes per step, memory and exactness; `in_node` is the gradients' plan."""
    every, is_late = schedule.sync_every, bool(schedule.overlap_steps)
    length = readable_size(sum(description.bytes for description in plan.descriptions))
    is_exact = all(bucket.scheme.exact for bucket in plan.buckets)
    return [
        f"differences from the centre, once in {every} steps: "
        f"{readable_size(plan.cost.bytes / every)} a step; rule {rule}",
        f"{3 if is_late else 1} x {length} of memory for the centre"
        + (" and an exchange under way" if is_late else "")
        + ", and what the rule keeps",
        *_of_node(in_node, schedule.overlap_steps),
        "replicas are equal in their centre only"
        + ("" if is_exact else "; the scheme rounds or selects"),
    ]


def _of_node(plan: Plan | None, overlap_steps: int) -> list[str]:
    if plan is None:
        return []
    note = f"gradients: all-reduce in the node at every step, {readable_size(plan.cost.bytes)}"
    if overlap_steps:
        note += "; while weights are exchanged, it waits for at most one of their buckets"
    return [note]

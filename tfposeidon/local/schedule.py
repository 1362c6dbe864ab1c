"""Steps at which ranks with local weights synchronize, and what the plan remarks about them."""

from __future__ import annotations

from dataclasses import dataclass

from tfposeidon import ranges
from tfposeidon.local.rules import Rule
from tfposeidon.planning.plan import Plan
from tfposeidon.units import readable_size


@dataclass(frozen=True)
class Schedule:
    """Steps at which ranks with local weights synchronize.

    An exchange starts every `sync_every` steps, and its result is applied `overlap_steps` later,
    where 0 waits for it. The first `warmup_steps` synchronizations follow one step each, without
    overlap.
    """

    sync_every: int
    overlap_steps: int
    warmup_steps: int

    def __post_init__(self) -> None:
        ranges.check_integer("sync_every", self.sync_every, 1)
        ranges.check_integer("overlap_steps", self.overlap_steps, 0)
        ranges.check_integer("warmup_steps", self.warmup_steps, 0)
        if self.overlap_steps >= self.sync_every:
            raise ValueError(
                "`overlap_steps` must be below `sync_every`, so that a result is there before the "
                f"next round. Received: overlap_steps={self.overlap_steps}, "
                f"sync_every={self.sync_every}. Give at most {self.sync_every - 1}."
            )

    def check_steps_per_execution(self, steps: int) -> None:
        """Refuses `steps_per_execution` if synchronizations would fall within an execution."""
        if steps > 1 and self.warmup_steps:
            raise ValueError(
                "With `warmup_steps` ranks synchronize after each step. Received: "
                f"warmup_steps={self.warmup_steps}, steps_per_execution={steps}. Leave "
                "steps_per_execution out."
            )
        for name, value in (("sync_every", self.sync_every), ("overlap_steps", self.overlap_steps)):
            if value % steps:
                raise ValueError(
                    f"`{name}` must be a multiple of steps_per_execution, as ranks synchronize "
                    f"between executions. Received: {name}={value}, steps_per_execution={steps}."
                )


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

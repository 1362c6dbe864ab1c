"""When rounds are."""

from __future__ import annotations

from dataclasses import dataclass

from tfposeidon import ranges


@dataclass(frozen=True)
class Schedule:
    """When rounds are.

    Args:
      sync_every: Steps from one round to the next, at least 1.
      overlap_steps: Steps from an exchange to its result, below `sync_every`; 0 waits for it.
      warmup_steps: Rounds at the beginning that have one step each, without delay.

    Raises:
      ValueError: If a number is out of its range.
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
        """Refuses executions of several steps that do not end where ranks synchronize."""
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

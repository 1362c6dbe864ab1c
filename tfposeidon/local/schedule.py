"""When rounds are."""

from __future__ import annotations

from dataclasses import dataclass

from tfposeidon import ranges


@dataclass(frozen=True)
class Schedule:
    """When rounds are.

    Args:
      every: Steps from one round to the next, at least 1.
      delay: Steps from an exchange to its result, below `every`; 0 waits for it.
      start_after: Rounds at the beginning that have one step each, without delay.

    Raises:
      ValueError: If a number is out of its range.
    """

    every: int
    delay: int
    start_after: int

    def __post_init__(self) -> None:
        ranges.check_integer("every", self.every, 1)
        ranges.check_integer("delay", self.delay, 0)
        ranges.check_integer("start_after", self.start_after, 0)
        if self.delay >= self.every:
            raise ValueError(
                "`delay` must be below `every`, so that a result is there before the next round. "
                f"Received: delay={self.delay}, every={self.every}. Give at most {self.every - 1}."
            )

    def check_steps_per_execution(self, steps: int) -> None:
        """Refuses executions of several steps that do not end where ranks synchronize."""
        if steps > 1 and self.start_after:
            raise ValueError(
                "With `start_after` ranks synchronize after each step. Received: "
                f"start_after={self.start_after}, steps_per_execution={steps}. Leave "
                "steps_per_execution out."
            )
        for name, value in (("every", self.every), ("delay", self.delay)):
            if value % steps:
                raise ValueError(
                    f"`{name}` must be a multiple of steps_per_execution, as ranks synchronize "
                    f"between executions. Received: {name}={value}, steps_per_execution={steps}."
                )

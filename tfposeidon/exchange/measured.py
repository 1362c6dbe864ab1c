"""Measured step times, which later plans depend on.

They come from the first steps, and are equal on all ranks so that all plans are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tfposeidon.gradients.description import Description
from tfposeidon.planning.simulation import Timeline


@dataclass(frozen=True)
class Measured:
    """Measurements of one list of variables, the same on all ranks.

    Times are in seconds from the end of one exchange, to the first and last gradient and the end of
    the next. `rows` has the rows of each gradient's factors on a rank; 0 without factors.
    """

    first_s: float
    compute_s: float
    step_s: float
    rows: tuple[float, ...]

    @property
    def timeline(self) -> Timeline:
        """Times of the gradients of a step."""
        return Timeline.even(
            variables=len(self.rows),
            # The clock may have been set back during a step.
            first_s=max(0.0, min(self.first_s, self.compute_s)),
            compute_s=max(0.0, self.compute_s),
        )

    def with_rows(self, descriptions: Sequence[Description]) -> list[Description]:
        """Returns descriptions whose factors have the measured rows."""
        return [
            replace(d, factors=replace(d.factors, rows=rows)) if d.factors and rows else d
            for d, rows in zip(descriptions, self.rows, strict=True)
        ]

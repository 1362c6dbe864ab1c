"""What steps have measured, by which plans are made again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tfposeidon.gradients.description import Description
from tfposeidon.planning.simulation import Timeline


@dataclass(frozen=True)
class Measured:
    """What steps have measured of one list of variables, the same on all ranks.

    Attributes:
      first_s: Seconds from the end of one exchange to the first gradient of the next.
      compute_s: Seconds from the end of one exchange to the last gradient of the next.
      step_s: Seconds from the end of one exchange to the end of the next.
      rows: Rows of each gradient's factors on a rank; 0 without factors.
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
            # The clock may have been set back between two of them.
            first_s=max(0.0, min(self.first_s, self.compute_s)),
            compute_s=max(0.0, self.compute_s),
        )

    def with_rows(self, descriptions: Sequence[Description]) -> list[Description]:
        """Returns descriptions whose factors have the measured rows.

        Args:
          descriptions: Descriptions of the variables.
        """
        return [
            replace(d, factors=replace(d.factors, rows=rows)) if d.factors and rows else d
            for d, rows in zip(descriptions, self.rows, strict=True)
        ]

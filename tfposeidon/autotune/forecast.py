"""Describes the predicted step of the chosen plan, and the predicted steps of its alternatives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tfposeidon.communication.network_profile import NetworkProfile
from tfposeidon.config import Configured
from tfposeidon.exchange.plan import Plan
from tfposeidon.text import readable_size

MOST_RANKS = 16
"""Maximum number of ranks for which predictions have been compared with measured steps."""


@dataclass(frozen=True, kw_only=True)
class Prediction(Configured):
    """Predicted step of one plan.

    Attributes:
      name: Name of the policy.
      bucket_bytes: Size in bytes up to which the plan fuses gradients.
      step_s: Seconds of the step.
      compute_s: Seconds of the forward and backward pass.
      slowdown: Factor on the predicted time of exchanges, from a timed trial; 1 without a trial.
    """

    name: str
    bucket_bytes: int
    step_s: float
    compute_s: float
    slowdown: float = 1.0

    @property
    def exposed_s(self) -> float:
        """Seconds of communication that computation does not hide."""
        return self.step_s - self.compute_s

    @property
    def efficiency(self) -> float:
        """Share of the step spent in computation; 0 for a step without computation."""
        return self.compute_s / self.step_s if self.step_s else 0.0

    def __str__(self) -> str:
        return f"{self.name} in buckets of {readable_size(self.bucket_bytes)}"


@dataclass(frozen=True, kw_only=True)
class Forecast(Configured):
    """Predicted step of a plan, with the alternatives and the input of the predictions.

    Attributes:
      chosen: Prediction for the plan.
      predictions: Predictions for all plans, beginning with the default.
      links: Network profile on which the predictions are based.
      ranks: Number of ranks.
      knows_computation: False if the predictions are for a step without computation.
      measured_s: Mean time in seconds of the steps that used the plan; `None` if no step was timed.
    """

    chosen: Prediction
    predictions: tuple[Prediction, ...]
    links: NetworkProfile
    ranks: int
    knows_computation: bool
    measured_s: float | None = None

    @property
    def others(self) -> tuple[Prediction, ...]:
        """Predictions for the other plans, fastest first."""
        others = [one for one in self.predictions if one != self.chosen]
        return tuple(sorted(others, key=lambda one: one.step_s))

    def of_plan(self, plan: Plan) -> Prediction:
        """Returns the prediction for a plan; without one, the prediction for the default plan."""
        names = [str(one.chosen) for one in forecasts_of(plan)]
        return next((one for one in self.predictions if str(one) in names), self.predictions[0])

    def lines(self) -> Iterator[str]:
        """Yields the lines of the forecast in the printed plan."""
        chosen, step_ms = self.chosen, 1e3 * self.chosen.step_s
        if self.knows_computation:
            yield (
                f"predicted step: {step_ms:.4g} ms, of which {1e3 * chosen.exposed_s:.3g} ms "
                f"wait for communication (efficiency {chosen.efficiency:.0%})"
            )
        else:
            yield f"predicted exchange: {step_ms:.3g} ms, without overlap with computation"
        if self.measured_s is not None:
            yield f"measured step: {1e3 * self.measured_s:.4g} ms, on this rank"
        yield f"network: {self.links}"
        if others := self.others:
            slower = others[0].step_s / chosen.step_s - 1 if chosen.step_s else 0.0
            comparison = "slower" if slower >= 0 else "faster"
            yield f"next best: {others[0]}, {abs(slower):.1%} {comparison}"
            if slower < 0:
                yield "plan retained: another must save `margin`, and the time of three traces"
        timed = {one.name: one.slowdown for one in (chosen, *others)}
        found = [f"{slowdown:.2f} ({name})" for name, slowdown in timed.items() if slowdown != 1.0]
        if found:
            yield f"timed exchanges, relative to the predicted ones: {', '.join(found)}"
        if self.links.device != "cpu" or self.ranks > MOST_RANKS:
            yield f"not validated: predictions were tested with up to {MOST_RANKS} ranks on CPUs"


def forecasts_of(plan: Plan) -> list[Forecast]:
    """Returns the forecasts of a plan, one for each list of variables."""
    return [one for one in plan.forecasts if isinstance(one, Forecast)]

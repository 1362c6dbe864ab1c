"""Describes the predicted step of the chosen plan, and the predicted steps of its alternatives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from tfposeidon.autotune.simulation import Simulated
from tfposeidon.communication.network_profile import NetworkProfile
from tfposeidon.exchange.plan import Plan
from tfposeidon.text import readable_size

MOST_RANKS, MOST_RANKS_PER_CORE = 16, 2
"""Maximum number of ranks, and of a node's ranks per core, for which predictions have been compared
with measured steps."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Prediction for one plan.

    Attributes:
      name: Name of the policy.
      bucket_bytes: Size in bytes up to which the plan fuses gradients.
      simulated: Predicted times of the step.
      is_default: True for the plan that is used unless another is predicted to be faster.
      slowdown: Time of the plan's exchanges in a timed trial, as a multiple of the predicted time;
        1 without a trial.
    """

    name: str
    bucket_bytes: int
    simulated: Simulated
    is_default: bool = False
    slowdown: float = 1.0

    @property
    def step_s(self) -> float:
        """Predicted step time in seconds."""
        return self.simulated.step_s

    def __str__(self) -> str:
        return f"{self.name} in buckets of {readable_size(self.bucket_bytes)}"


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Predicted step of a plan, with the alternatives and the data behind the prediction.

    Attributes:
      chosen: Prediction for the plan.
      others: Predictions for the other plans, fastest first.
      links: Network profile on which the predictions are based.
      ranks: Number of ranks.
      measured_s: Mean time in seconds of the steps that used the plan; `None` if no step was timed.
      knows_computation: True if the times of the forward and backward pass are known. Otherwise the
        predictions are for a step without computation.
      is_kept: True if the plan is retained although another is predicted to be faster, because
        tracing a step again takes longer than the remaining steps would save.
    """

    chosen: Prediction
    others: tuple[Prediction, ...]
    links: NetworkProfile
    ranks: int
    knows_computation: bool
    measured_s: float | None = None
    is_kept: bool = False

    def of_plan(self, plan: Plan) -> Prediction:
        """Returns the prediction for a plan, or the default prediction if there is none."""
        names = [str(one.chosen) for one in forecasts_of(plan)]
        every = sorted((self.chosen, *self.others), key=lambda one: not one.is_default)
        return next((one for one in every if str(one) in names), every[0])

    def kept(self, chosen: Prediction) -> Forecast:
        """Returns this forecast with the prediction of the plan in use as `chosen`."""
        every = sorted((self.chosen, *self.others), key=lambda one: one.step_s)
        others = tuple(one for one in every if one != chosen)
        return replace(self, chosen=chosen, others=others, is_kept=every[0].step_s < chosen.step_s)

    def to_dict(self) -> dict[str, Any]:
        """Returns the predictions and the network profile as a dictionary for JSON."""
        pairs = [(one, one.simulated) for one in (self.chosen, *self.others)]
        return {
            "links": asdict(self.links),
            "knows_computation": self.knows_computation,
            "measured_s": self.measured_s,
            "predictions": [
                asdict(one) | asdict(times) | {"exposed_s": times.exposed_s} for one, times in pairs
            ],
        }

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Forecast:
        """Restores a forecast from its fields; `links` is JSON text."""
        chosen, *others = (
            Prediction(**one | {"simulated": Simulated(**one["simulated"])})
            for one in (fields["chosen"], *fields["others"])
        )
        links = NetworkProfile.from_json(fields["links"], "the snapshot")
        return cls(**fields | {"chosen": chosen, "others": tuple(others), "links": links})

    def lines(self) -> Iterator[str]:
        """Formats the forecast for the printed plan.

        Yields:
          Lines of text.
        """
        simulated, step_ms = self.chosen.simulated, 1e3 * self.chosen.step_s
        if self.knows_computation:
            yield (
                f"predicted step: {step_ms:.4g} ms, of which {1e3 * simulated.exposed_s:.3g} ms "
                f"wait for communication (efficiency {simulated.efficiency:.0%})"
            )
        else:
            yield f"predicted exchange: {step_ms:.3g} ms, without overlap with computation"
        if self.measured_s is not None:
            yield f"measured step: {1e3 * self.measured_s:.4g} ms, on this rank"
        yield f"network: {self.links}"
        if self.others:
            best = self.others[0]
            slower = best.step_s / self.chosen.step_s - 1 if self.chosen.step_s else 0.0
            yield f"next best: {best}, {abs(slower):.1%} {'slower' if slower >= 0 else 'faster'}"
            if self.is_kept:
                yield "plan retained: the remaining steps would save less time than a trace takes"
        timed = {one.name: one.slowdown for one in (self.chosen, *self.others)}
        found = [f"{slowdown:.2f} ({name})" for name, slowdown in timed.items() if slowdown != 1.0]
        if found:
            yield f"timed exchanges, relative to the predicted ones: {', '.join(found)}"
        if why := self._why_not_validated():
            yield f"not validated: {why}"

    def _why_not_validated(self) -> str:
        compared = "predictions have been compared with steps of up to"
        per_core = self.links.ranks_per_core
        if self.links.device != "cpu":
            return f"predictions have not been compared with steps on {self.links.device}"
        if self.ranks > MOST_RANKS:
            return f"{compared} {MOST_RANKS} ranks"
        if per_core > MOST_RANKS_PER_CORE:
            return f"{per_core:.3g} ranks share a core; {compared} {MOST_RANKS_PER_CORE}"
        return ""


def forecasts_of(plan: Plan) -> list[Forecast]:
    """Returns the forecasts of a plan, one for each list of variables."""
    return [one for one in plan.forecasts if isinstance(one, Forecast)]

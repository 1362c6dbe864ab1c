"""Searches for the plan with the shortest predicted step.

The search tries each candidate of a policy with several bucket sizes, then other schemes for single
large variables, and finally times the best candidates if their predictions are close.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from tfposeidon.autotune.forecast import Forecast, Prediction, decide
from tfposeidon.autotune.seconds import StageTime, stage_times
from tfposeidon.autotune.simulation import Simulated, Timeline, fusion_bytes_of, simulate
from tfposeidon.autotune.tunable import candidates_of, margin_of, races
from tfposeidon.communication.network_profile import NetworkProfile
from tfposeidon.communication.topology import Topology
from tfposeidon.exchange.plan import DEFAULT_BUCKET_BYTES, Bucket, Plan, make_plan
from tfposeidon.gradients.description import Description
from tfposeidon.policies import Choice, Policy

BUCKET_FACTORS = (1, 1 / 4, 4, 16, 64)
"""Bucket sizes to try, as multiples of the default; of equally good sizes, the first is used."""
LARGEST_VARIABLES = 20
"""Number of the largest variables, for each of which other schemes are tried."""
LEAST_GAIN = 0.001
"""Minimum share of the step that another scheme for one variable must save."""
RACED_WITHIN = 0.10
"""Relative difference of predicted steps within which plans are timed; larger if the uncertainty of
the network profile is."""
RUNNERS = 3
"""Maximum number of plans to time, in addition to that of the default scheme."""
RACE_S = 6.0
"""Predicted seconds of three exchanges of each plan above which plans are not timed."""

Race = Callable[[Sequence[Plan]], Sequence[float]]
"""Times the exchanges of plans. Returns the seconds of each, the same on every rank, or an empty
list if times are unknown and ranks do not call it together."""


def choose_plan(
    descriptions: Sequence[Description],
    policy: Policy,
    topology: Topology,
    links: NetworkProfile | None,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    timeline: Timeline | None = None,
    notes: Sequence[str] = (),
    race: Race | None = None,
) -> Plan:
    """Returns the plan with the shortest predicted step among the candidates of a policy.

    It tries each candidate with five bucket sizes, if `bucket_bytes` is the default and `timeline`
    is known; without a timeline, it compares exchanges alone. Then it tries other schemes for each
    of the largest variables. If predictions are close or the profile is too uncertain, `race` times
    the best plans and the default. A candidate, or a mixture of schemes, must gain the margin of
    the policy to be used. The result is the same on every rank, except for `topology.rank`.
    """
    if links is None or topology.size == 1:
        return make_plan(descriptions, policy, topology, bucket_bytes, notes)
    margin = margin_of(policy)
    search = _Search(descriptions, topology, links, timeline, tuple(notes), margin)
    open_to = candidates_of(policy, topology)
    candidates = open_to or {"as configured": policy}
    options = search.known(candidates)
    if not options:
        # The cost of structures without a size is unknown.
        return make_plan(descriptions, _first(candidates), topology, bucket_bytes, notes)
    sizes = [bucket_bytes]
    if open_to and timeline is not None and bucket_bytes == DEFAULT_BUCKET_BYTES:
        sizes = [round(factor * bucket_bytes) for factor in BUCKET_FACTORS]
    attempts = search.attempts(options, sizes)
    best = min(attempts, key=lambda attempt: attempt.step_s)
    attempts.append(search.mixed(best, options))
    # Plans of one scheme are easier to understand, so a mixture must be worth it.
    if attempts[-1].step_s >= (1 - margin) * best.step_s:
        attempts.pop()
    if race is not None and races(policy):
        attempts = search.raced(attempts, race)
    # Mark it last, because a timed trial may change the best bucket size of the default scheme.
    attempts = search.with_default(attempts)
    chosen = attempts.pop(decide([attempt.prediction for attempt in attempts], margin))
    ordered = [chosen, *sorted(attempts, key=lambda attempt: attempt.step_s)]
    return search.with_forecast(ordered)


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    """A plan with its predicted step."""

    policy: Policy
    plan: Plan
    prediction: Prediction

    @property
    def name(self) -> str:
        return self.prediction.name

    @property
    def bucket_bytes(self) -> int:
        return self.prediction.bucket_bytes

    @property
    def step_s(self) -> float:
        return self.prediction.step_s

    def changed(self, **changes: Any) -> _Attempt:
        """Returns the attempt with changed fields of its prediction."""
        prediction = dataclasses.replace(self.prediction, **changes)
        return dataclasses.replace(self, prediction=prediction)

    @property
    def key(self) -> Any:
        """Schemes and members of all buckets, which identify a plan."""
        return tuple((bucket.scheme, bucket.members) for bucket in self.plan.buckets)


@dataclass(frozen=True)
class _Search:
    """Inputs that all plans of a search have in common."""

    descriptions: Sequence[Description]
    topology: Topology
    links: NetworkProfile
    timeline: Timeline | None
    notes: tuple[str, ...]
    margin: float

    def attempt(self, name: str, policy: Policy, bucket_bytes: int) -> _Attempt:
        plan = make_plan(self.descriptions, policy, self.topology, bucket_bytes, self.notes)
        simulated = predict(plan, self.links, self.timeline)
        prediction = Prediction(name=name, bucket_bytes=bucket_bytes, simulated=simulated)
        return _Attempt(policy=policy, plan=plan, prediction=prediction)

    @staticmethod
    def with_default(attempts: list[_Attempt]) -> list[_Attempt]:
        """Returns the attempts, with the best of the first candidate marked as the default."""
        first = [attempt for attempt in attempts if attempt.name == attempts[0].name]
        best = min(first, key=lambda attempt: attempt.step_s)
        return [one.changed(is_default=True) if one is best else one for one in attempts]

    def known(self, options: Mapping[str, Policy]) -> dict[str, Policy]:
        """Returns the candidates with known costs: those of structures require their size.

        Structures of unknown size that all candidates send alike do not matter.
        """
        unknown = [
            d
            for d in self.descriptions
            if d.structure and not d.structure.is_sized and self._differ(options, d)
        ]
        return {
            name: policy
            for name, policy in options.items()
            if not any(policy.choose(d, self.topology).scheme.reader for d in unknown)
        }

    def _differ(self, options: Mapping[str, Policy], description: Description) -> bool:
        schemes = {one.choose(description, self.topology).scheme for one in options.values()}
        return len(options) == 1 or len(schemes) > 1

    def attempts(self, options: Mapping[str, Policy], sizes: Iterable[int]) -> list[_Attempt]:
        """Returns an attempt for each distinct plan."""
        different: dict[Any, tuple[str, Policy]] = {}
        for name, policy in options.items():
            schemes = tuple(policy.choose(d, self.topology).scheme for d in self.descriptions)
            different.setdefault(schemes, (name, policy))
        found: dict[Any, _Attempt] = {}
        for size in sizes:
            for name, policy in different.values():
                attempt = self.attempt(name, policy, size)
                found.setdefault(attempt.key, attempt)
        return list(found.values())

    def mixed(self, best: _Attempt, options: Mapping[str, Policy]) -> _Attempt:
        """Returns the best attempt, with other schemes for large variables if they are faster."""
        largest = sorted(self.descriptions, key=lambda d: -d.length)[:LARGEST_VARIABLES]
        for description in largest:
            # One policy for each scheme that is possible for this variable.
            schemes = {
                policy.choose(description, self.topology).scheme: policy
                for policy in options.values()
            }
            schemes.pop(best.policy.choose(description, self.topology).scheme, None)
            for scheme, policy in schemes.items():
                assigned = _Assigned(best.policy, description.path, policy)
                attempt = self.attempt(_mixed_name(best, str(scheme)), assigned, best.bucket_bytes)
                if attempt.step_s < (1 - LEAST_GAIN) * best.step_s:
                    best = attempt
        return best

    def raced(self, attempts: Sequence[_Attempt], race: Race) -> list[_Attempt]:
        """Returns attempts corrected by timed trials of the best schemes, if some are close.

        The slowdown of a scheme applies to all its bucket sizes.
        """
        found = list(attempts)
        best: dict[str, _Attempt] = {}
        for attempt in sorted(found, key=lambda attempt: attempt.step_s):
            best.setdefault(attempt.name, attempt)
        fastest = next(iter(best.values()))
        limit_s = (1 + max(RACED_WITHIN, self.links.uncertainty)) * fastest.step_s
        close = [one for one in best.values() if one.step_s <= limit_s][:RUNNERS]
        default = best[found[0].name]
        runners = close if any(one is default for one in close) else [*close, default]
        alone = [predict(attempt.plan, self.links).step_s for attempt in runners]
        # Long exchanges are bandwidth-bound, where predictions are accurate.
        if len(close) == 1 or 3 * sum(alone) > RACE_S:
            return found
        times = race([attempt.plan for attempt in runners])
        if not times:
            return found
        slowdowns = {
            attempt.name: seconds / alone_s if alone_s else 1.0
            for attempt, seconds, alone_s in zip(runners, times, alone, strict=True)
        }
        # Candidates without a trial must not win by a more optimistic prediction.
        slowest = max(1.0, *slowdowns.values())
        return [self.slowed(one, slowdowns.get(one.name, slowest)) for one in found]

    def slowed(self, attempt: _Attempt, slowdown: float) -> _Attempt:
        """Returns the attempt with the step predicted for a slowdown."""
        simulated = predict(attempt.plan, self.links, self.timeline, slowdown)
        return attempt.changed(simulated=simulated, slowdown=slowdown)

    def with_forecast(self, attempts: Sequence[_Attempt]) -> Plan:
        """Returns the plan of the first attempt, with the predictions of all."""
        chosen, *others = (attempt.prediction for attempt in attempts)

        forecast = Forecast(
            chosen=chosen,
            others=tuple(others),
            links=self.links,
            ranks=self.topology.size,
            knows_computation=self.timeline is not None,
        )
        # Each step chooses by its actual sizes, so the plan has none.
        best = attempts[0]
        plan = make_plan(
            [d.sized(None) for d in self.descriptions],
            best.policy,
            self.topology,
            best.bucket_bytes,
            self.notes,
        )
        return dataclasses.replace(plan, forecasts=(forecast,))


def _first(policies: Mapping[str, Policy]) -> Policy:
    return next(iter(policies.values()))


def _mixed_name(attempt: _Attempt, scheme: str) -> str:
    begin, _, others = attempt.name.partition(", some by ")
    names = dict.fromkeys([*filter(None, others.split(" and ")), scheme])
    return f"{begin}, some by {' and '.join(names)}"


@dataclass(frozen=True)
class _Assigned(Policy):
    """A policy with an exception for the variable of one path."""

    base: Policy
    path: str
    other: Policy

    @override
    def choose(self, description: Description, topology: Topology) -> Choice:
        policy = self.other if description.path == self.path else self.base
        return policy.choose(description, topology)


def predict(
    plan: Plan, links: NetworkProfile, timeline: Timeline | None = None, slowdown: float = 1.0
) -> Simulated:
    """Predicts the step of a plan, the same on all ranks; `slowdown` scales its exchanges."""
    if timeline is None:
        members = [member for bucket in plan.buckets for member in bucket.members]
        timeline = Timeline.without_computation(1 + max(members, default=0))
    chains = [bucket_times(bucket, plan.topology, links) for bucket in plan.buckets]
    if slowdown != 1.0:
        chains = [tuple(stage.slowed(slowdown) for stage in chain) for chain in chains]
    return simulate(
        chains,
        [max(timeline.ready_s[m] for m in bucket.members) for bucket in plan.buckets],
        timeline.compute_s,
        slowdown * links.collective_s,
        fusion_bytes_of(),
    )


def bucket_times(
    bucket: Bucket, topology: Topology, links: NetworkProfile
) -> tuple[StageTime, ...]:
    """Predicts the time of each stage of a bucket's exchange, the same on all ranks."""
    itemsize = bucket.descriptions[0].itemsize
    return stage_times(bucket.scheme, bucket.length, itemsize, bucket.structures, topology, links)

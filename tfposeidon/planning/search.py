"""Search for the plan with the shortest predicted step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from tfposeidon.communication.network_profile import NetworkProfile
from tfposeidon.communication.topology import Topology
from tfposeidon.gradients.description import Description
from tfposeidon.planning.forecast import Forecast, Prediction, decide
from tfposeidon.planning.plan import DEFAULT_BUCKET_BYTES, Bucket, Plan, make_plan
from tfposeidon.planning.seconds import StageTime, stage_times
from tfposeidon.planning.simulation import Simulated, Timeline, fusion_bytes_of, simulate
from tfposeidon.policies import Choice, Policy

BUCKET_FACTORS = (1, 1 / 4, 4, 16, 64)
"""Bucket sizes that are tried, as multiples of the default; of equally good ones the first."""
LARGEST_VARIABLES = 20
"""Variables for each of which the other schemes are tried."""
LEAST_GAIN = 0.001
"""Share of the step that another scheme for one variable must save."""
RACED_WITHIN = 0.10
"""Share by which predicted steps may differ whose plans are raced; more where links are uncertain
by more."""
RUNNERS = 3
"""Plans that are raced, at most, besides that of the default scheme."""
RACE_S = 6.0
"""Seconds that three exchanges of each plan of a race may be predicted to take."""

Race = Callable[[Sequence[Plan]], Sequence[float]]
"""Times the exchanges of plans by themselves; returns the seconds of each, the same on every rank,
or nothing where they are not known and ranks are not there to time them."""


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
    """Makes the plan with the shortest predicted step of those that a policy leaves open.

    Each of the policy's candidates is tried with five bucket sizes, unless `bucket_bytes` is not
    the default; then each of the largest variables with the schemes of the others. Where some of
    the best are close, or the links too uncertain to tell, they and all-reduce are raced. Where a
    candidate gains less than `policy.margin`, the first is kept, and where mixing does, it is not
    done.

    Args:
      descriptions: Descriptions of the gradients, in the order of the variables. Factors count
        among the candidates where their rows are known.
      policy: Policy that chooses the scheme of each variable, or leaves it open.
      topology: The ranks of the job, as this rank sees them.
      links: Links of the job; `None` where they are not known.
      bucket_bytes: Size up to which gradients are fused (default 4 MiB).
      timeline: Times of a step's computation. Without it (default) exchanges alone are compared,
        with `bucket_bytes` as it is.
      notes: Lines for the plan besides those of its schemes.
      race: Times the exchanges of plans; `None` (default) to go by predictions alone.

    Returns:
      The plan, the same on every rank but for the rank that looks at it; with a forecast, where
      links are known.
    """
    if links is None or topology.size == 1:
        return make_plan(descriptions, policy, topology, bucket_bytes, notes)
    search = _Search(descriptions, topology, links, timeline, tuple(notes), policy.margin)
    candidates = policy.candidates(topology) or {"as asked for": policy}
    options = search.known(candidates)
    if not options:
        # Factors without rows have no cost yet.
        return make_plan(descriptions, _first(candidates), topology, bucket_bytes, notes)
    sizes = [bucket_bytes]
    if policy.leaves_open and timeline is not None and bucket_bytes == DEFAULT_BUCKET_BYTES:
        sizes = [round(factor * bucket_bytes) for factor in BUCKET_FACTORS]
    attempts = search.attempts(options, sizes)
    best = min(attempts, key=lambda attempt: attempt.step_s)
    attempts.append(search.mixed(best, options))
    # Plans of one scheme are easier to follow, so others have to be worth it.
    if attempts[-1].step_s >= (1 - policy.margin) * best.step_s:
        attempts.pop()
    if race is not None and policy.races:
        attempts = search.raced(attempts, race)
    # Only now, as a race may make another bucket size the best of the default scheme.
    attempts = search.with_default(attempts)
    chosen = attempts.pop(decide([attempt.prediction for attempt in attempts], policy.margin))
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
        """Returns the attempt with another prediction for its plan."""
        prediction = dataclasses.replace(self.prediction, **changes)
        return dataclasses.replace(self, prediction=prediction)

    @property
    def key(self) -> Any:
        """Schemes and members of all buckets, which tell plans apart."""
        return tuple((bucket.scheme, bucket.members) for bucket in self.plan.buckets)


@dataclass(frozen=True)
class _Search:
    """Job, links and times that all plans of a search have in common."""

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
        """Returns attempts with the best one of the first candidate marked as the default."""
        first = [attempt for attempt in attempts if attempt.name == attempts[0].name]
        best = min(first, key=lambda attempt: attempt.step_s)
        return [one.changed(is_default=True) if one is best else one for one in attempts]

    def known(self, options: Mapping[str, Policy]) -> dict[str, Policy]:
        """Returns the candidates whose costs are known: factors have them once there are rows."""
        return {
            name: policy
            for name, policy in options.items()
            if not any(
                description.factors is not None
                and description.factors.rows is None
                and policy.choose(description, self.topology).scheme.needs_factors
                for description in self.descriptions
            )
        }

    def attempts(self, options: Mapping[str, Policy], sizes: Iterable[int]) -> list[_Attempt]:
        """Returns an attempt for each plan that differs from those before it."""
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
        """Returns the best attempt with other schemes for large variables where they are faster."""
        largest = sorted(self.descriptions, key=lambda d: -d.length)[:LARGEST_VARIABLES]
        for description in largest:
            # One policy for each scheme that this variable may go by.
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
        """Returns attempts with what a race tells about the best schemes, where some are close.

        What it tells about a scheme holds for all bucket sizes.
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
        # Bytes decide about exchanges that take long, and bytes are predicted well.
        if len(close) == 1 or 3 * sum(alone) > RACE_S:
            return found
        times = race([attempt.plan for attempt in runners])
        if not times:
            return found
        slowdowns = {
            attempt.name: seconds / alone_s if alone_s else 1.0
            for attempt, seconds, alone_s in zip(runners, times, alone, strict=True)
        }
        # What was not timed is not taken for a better prediction than what was.
        slowest = max(1.0, *slowdowns.values())
        return [self.slowed(one, slowdowns.get(one.name, slowest)) for one in found]

    def slowed(self, attempt: _Attempt, slowdown: float) -> _Attempt:
        """Returns the attempt with its step as a race has told."""
        simulated = predict(attempt.plan, self.links, self.timeline, slowdown)
        return attempt.changed(simulated=simulated, slowdown=slowdown)

    def with_forecast(self, attempts: Sequence[_Attempt]) -> Plan:
        """Returns the plan of the first attempt, with predictions for all."""
        chosen, *others = (attempt.prediction for attempt in attempts)

        forecast = Forecast(
            chosen=chosen,
            others=tuple(others),
            links=self.links,
            ranks=self.topology.size,
            knows_computation=self.timeline is not None,
        )
        # Steps decide for themselves by the rows that they have; the plan knows of none.
        best = attempts[0]
        plan = make_plan(
            [_without_rows(d) for d in self.descriptions],
            best.policy,
            self.topology,
            best.bucket_bytes,
            self.notes,
        )
        return dataclasses.replace(plan, forecasts=(forecast,))


def _first(policies: Mapping[str, Policy]) -> Policy:
    return next(iter(policies.values()))


def _without_rows(description: Description) -> Description:
    factors = description.factors and dataclasses.replace(description.factors, rows=None)
    return dataclasses.replace(description, factors=factors)


def _mixed_name(attempt: _Attempt, scheme: str) -> str:
    begin, _, others = attempt.name.partition(", some by ")
    names = dict.fromkeys([*filter(None, others.split(" and ")), scheme])
    return f"{begin}, some by {' and '.join(names)}"


@dataclass(frozen=True)
class _Assigned(Policy):
    """A policy, with another one for the variable of one path."""

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
    """Predicts the step of a plan.

    Args:
      plan: Plan of the step.
      links: Links of the job.
      timeline: Times of a step's computation; `None` (default) for a step that computes nothing.
      slowdown: Time of its exchanges, as a multiple of what links and speeds of ranks tell
        (default 1).

    Returns:
      The prediction, the same on all ranks.
    """
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
    """Predicts the time of each stage of a bucket's exchange.

    Args:
      bucket: Bucket of a plan.
      topology: The ranks of the job; the result is the same on each.
      links: Links of the job.

    Returns:
      A time for each stage, one after the other.
    """
    factors: tuple[Any, ...] = ()
    if bucket.takes_factors:
        factors = tuple(d.factors for d in bucket.descriptions if d.factors)
    itemsize = bucket.descriptions[0].itemsize
    return stage_times(bucket.scheme, bucket.length, itemsize, factors, topology, links)

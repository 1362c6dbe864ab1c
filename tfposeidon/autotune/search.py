"""Searches for the plan with the shortest predicted step."""

from __future__ import annotations

import itertools
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import tensorflow as tf

from tfposeidon.autotune.forecast import Forecast, Prediction
from tfposeidon.autotune.simulation import Timeline, fusion_bytes_of, simulate, stage_times
from tfposeidon.communication.network_profile import NetworkProfile
from tfposeidon.communication.topology import Topology
from tfposeidon.communication.wire import Wire, Zeros, exchange_objects
from tfposeidon.exchange.exchanger import Exchanger
from tfposeidon.exchange.plan import DEFAULT_BUCKET_BYTES, Plan, make_plan
from tfposeidon.gradients import Description
from tfposeidon.policies import Policy, Rules

BUCKET_FACTORS = (1, 1 / 4, 1 / 16, 4, 16, 64)
"""Bucket sizes to try, as multiples of the default; the first of equally good sizes is used."""
CLOSE_WITHIN, MOST_CLOSE = 0.10, 3
"""Relative difference of predicted steps within which plans are timed, unless the network profile
is more uncertain, and maximum number of these plans. The median error of predictions is 7 %."""
ROUNDS, LONGEST_TRIAL_S = 5, 6.0
"""Number of timed exchanges of each plan, and maximum predicted seconds of a trial."""

Trial = Callable[[Sequence[Plan]], Sequence[float]]
"""Function that returns the seconds of each plan's exchanges, the same on every rank."""

_Plans = dict[tuple[str, int], Plan]
"""Different plans by the name of the candidate and the bucket size, beginning with the default."""


class Tunable(Policy):
    """Base class of policies whose `planner`, an `AutoPlanner`, chooses among candidates.

    The first candidate is chosen unless the step of another one is shorter by the share `margin`.
    """

    margin: float = 0.0

    @abstractmethod
    def candidates(self, topology: Topology) -> dict[str, Policy]:
        """Returns fixed policies by name, the same on all ranks; the first is the default."""


def candidates_of(policy: Policy, topology: Topology) -> dict[str, Policy]:
    """Returns the candidates of a tunable policy, or of rules that contain one; else none."""
    if isinstance(policy, Tunable):
        return policy.candidates(topology)
    if not isinstance(policy, Rules):
        return {}
    found = [candidates_of(part, topology) for _, part in policy.rules]
    names = dict.fromkeys(itertools.chain(*found))

    def rules(name: str) -> Rules:
        pairs = zip(policy.rules, found, strict=True)
        # A part without this candidate uses its first candidate.
        return Rules([(p, own.get(name, [*own.values(), part][0])) for (p, part), own in pairs])

    return {name: rules(name) for name in names}


def _tunable_parts(policy: Policy) -> list[Tunable]:
    if isinstance(policy, Tunable):
        return [policy]
    return [one for part in policy.parts for one in _tunable_parts(part)]


def choose_plan(
    descriptions: Sequence[Description],
    policy: Policy,
    topology: Topology,
    links: NetworkProfile | None,
    *,
    bucket_bytes: int | None = None,
    timeline: Timeline | None = None,
    notes: Sequence[str] = (),
    trial: Trial | None = None,
) -> Plan:
    """Returns the plan with the shortest predicted step among the candidates of a policy.

    Without a timeline, exchanges are compared without computation, and bucket sizes are not tried.
    The result is the same on every rank except for `topology.rank`.
    """
    if links is None or topology.size == 1:
        return make_plan(descriptions, policy, topology, bucket_bytes, notes)
    tunable = candidates_of(policy, topology)
    candidates = tunable or {"as configured": policy}
    known = _known(candidates, descriptions, topology)
    if not known:
        # The cost of structures without a size is unknown.
        first = next(iter(candidates.values()))
        return make_plan(descriptions, first, topology, bucket_bytes, notes)
    sizes = [DEFAULT_BUCKET_BYTES if bucket_bytes is None else bucket_bytes]
    if tunable and timeline is not None and bucket_bytes is None:
        sizes = [round(factor * DEFAULT_BUCKET_BYTES) for factor in BUCKET_FACTORS]
    plans: _Plans = {}
    for size, (name, candidate) in itertools.product(sizes, known.items()):
        plan = make_plan(descriptions, candidate, topology, size)
        if all(plan.buckets != other.buckets for other in plans.values()):
            plans[name, size] = plan
    forecast = _forecast(plans, _tunable_parts(policy), links, timeline, trial)
    return plan_of(forecast, descriptions, known[forecast.chosen.name], topology, notes)


def plan_of(
    forecast: Forecast,
    descriptions: Sequence[Description],
    candidate: Policy,
    topology: Topology,
    notes: Sequence[str],
) -> Plan:
    """Makes the plan of a forecast, which has chosen this candidate."""
    # Clear the sizes of structures (not of buckets) in the plan, because each step selects the
    # scheme from the actual sizes.
    unsized = [d.sized(None) for d in descriptions]
    plan = make_plan(unsized, candidate, topology, forecast.chosen.bucket_bytes, notes)
    return replace(plan, forecasts=(forecast,))


def _known(
    candidates: Mapping[str, Policy], descriptions: Sequence[Description], topology: Topology
) -> dict[str, Policy]:
    """Returns the candidates with known costs; the cost of a structure depends on its size."""
    unsized = [d for d in descriptions if d.structure and not d.structure.is_sized]
    schemes = {d: {one.choose(d, topology).scheme for one in candidates.values()} for d in unsized}
    # Ignore structures of unknown size that all candidates send with the same scheme.
    differing = [d for d, found in schemes.items() if len(candidates) == 1 or len(found) > 1]
    return {
        name: policy
        for name, policy in candidates.items()
        if not any(policy.choose(d, topology).scheme.reader for d in differing)
    }


def _forecast(
    plans: _Plans,
    parts: Sequence[Tunable],
    links: NetworkProfile,
    timeline: Timeline | None,
    trial: Trial | None,
) -> Forecast:
    """Predicts steps of all plans, corrects predictions by a timed trial, and chooses a plan."""
    predictions = _predicted(plans, links, timeline, {})
    if trial is not None and parts:
        slowdowns = _slowdowns(plans, predictions, links, trial)
        predictions = _predicted(plans, links, timeline, slowdowns)
    # Use the first candidate, with its best bucket size, unless another wins by the margin.
    default = min(
        (one for one in predictions if one.name == predictions[0].name), key=lambda one: one.step_s
    )
    best = min(predictions, key=lambda one: one.step_s)
    margin = max((part.margin for part in parts), default=0.0)
    return Forecast(
        chosen=best if best.step_s <= (1 - margin) * default.step_s else default,
        predictions=tuple(predictions),
        links=links,
        ranks=next(iter(plans.values())).topology.size,
        knows_computation=timeline is not None,
    )


def _predicted(
    plans: _Plans, links: NetworkProfile, timeline: Timeline | None, slowdowns: Mapping[str, float]
) -> list[Prediction]:
    # The slowdown of a scheme applies to all its bucket sizes. Candidates without a trial must not
    # win by a more optimistic prediction.
    of_others = max([1.0, *slowdowns.values()])
    return [
        Prediction(
            name=name,
            bucket_bytes=size,
            step_s=predict(plan, links, timeline, slowdowns.get(name, of_others)),
            compute_s=timeline.compute_s if timeline else 0.0,
            slowdown=slowdowns.get(name, 1.0),
        )
        for (name, size), plan in plans.items()
    ]


def _slowdowns(
    plans: _Plans, predictions: Sequence[Prediction], links: NetworkProfile, trial: Trial
) -> dict[str, float]:
    """Returns the ratio of timed to predicted seconds, by candidate; empty without a trial."""
    best: dict[str, Prediction] = {}
    for one in sorted(predictions, key=lambda one: one.step_s):
        best.setdefault(one.name, one)
    limit_s = (1 + max(CLOSE_WITHIN, links.uncertainty)) * min(one.step_s for one in predictions)
    close = [name for name, one in best.items() if one.step_s <= limit_s][:MOST_CLOSE]
    names = dict.fromkeys((*close, predictions[0].name))
    timed = [plans[name, best[name].bucket_bytes] for name in names]
    alone_s = [predict(plan, links) for plan in timed]
    # Skip trials of long exchanges, which are bandwidth-bound and accurately predicted.
    if len(close) == 1 or ROUNDS * sum(alone_s) > LONGEST_TRIAL_S:
        return {}
    times = zip(names, trial(timed), alone_s, strict=True)
    return {name: took_s / only_s if only_s else 1.0 for name, took_s, only_s in times}


def predict(
    plan: Plan, links: NetworkProfile, timeline: Timeline | None = None, slowdown: float = 1.0
) -> float:
    """Predicts the seconds of a step, the same on all ranks; `slowdown` scales its exchanges."""
    if timeline is None:
        # Without computation, all gradients are ready at once.
        timeline = Timeline(ready_s=(0.0,) * len(plan.descriptions), compute_s=0.0)
    chains, ready_s = [], []
    for bucket in plan.buckets:
        sizes = bucket.length, bucket.descriptions[0].itemsize, bucket.structures
        chains.append(
            [
                replace(one, latency_s=slowdown * one.latency_s, load_s=slowdown * one.load_s)
                for one in stage_times(bucket.scheme, *sizes, plan.topology, links)
            ]
        )
        ready_s.append(max(timeline.ready_s[member] for member in bucket.members))
    collective_s = slowdown * links.collective_s
    return simulate(chains, ready_s, timeline.compute_s, collective_s, fusion_bytes_of())


def timed_exchanges(plans: Sequence[Plan], wire: Wire) -> list[float]:
    """Returns median seconds of each plan's exchanges on the slowest rank; all must call this."""
    with tf.init_scope():
        zeros = Zeros()
        runs = [_exchange_of(plan, wire, zeros, f"tp.trial_{i}") for i, plan in enumerate(plans)]
        values = tf.random.stateless_normal([max(d.length for d in plans[0].descriptions)], [7, 1])
        rounds = []
        for turn in range(1 + ROUNDS):
            mine = []
            for index, run in enumerate(runs):
                # All ranks must start together, because waiting times must not be measured.
                exchange_objects(turn, wire, f"tp.trial.{index}.{turn}")
                begin_s = time.perf_counter()
                for tensor in run(values):
                    tensor.numpy()
                mine.append(time.perf_counter() - begin_s)
            rounds.append(mine)
        slowest = np.max(exchange_objects(rounds, wire, "tp.trial"), axis=0)
    # The first round traces the exchanges, so its time does not count.
    return np.median(slowest[1:], axis=0).tolist()


def _exchange_of(
    plan: Plan, wire: Wire, zeros: Zeros, prefix: str
) -> Callable[[tf.Tensor], list[tf.Tensor]]:
    """Returns a graph function that fills artificial gradients from a vector and exchanges them."""
    exchanger, reader = Exchanger(plan, wire, zeros), plan.reader
    exchanger.prefix = prefix

    def exchange(values: tf.Tensor) -> list[tf.Tensor]:
        gradients = [
            reader.artificial(d, values)
            if reader is not None and member in plan.structured
            else tf.reshape(tf.cast(values[: d.length], d.dtype), d.shape)
            for member, d in enumerate(plan.descriptions)
        ]
        means, states = exchanger.exchange(gradients, None)
        # Return an element of each tensor, because TensorFlow prunes unused tensors.
        kept = [*means, *itertools.chain(*states)]
        return [tf.reshape(tensor, [-1])[:1] for tensor in kept if tensor.shape.num_elements()]

    return tf.function(exchange, autograph=False)

"""Plans from the known network profile and step times: measured now, given, or from a snapshot.

The first plan depends on the network profile alone. Once steps have been timed, the planner can
plan again with their computation times.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import tensorflow as tf
from tensorflow.python.util import _pywrap_determinism  # There is no public API.

from tfposeidon.communication import runtime
from tfposeidon.communication.network_profile import NetworkProfile
from tfposeidon.communication.wire import Wire
from tfposeidon.exchange.race import Race
from tfposeidon.exchange.resumed import Resumed
from tfposeidon.exchange.step_times import Measured
from tfposeidon.gradients.description import Description
from tfposeidon.planning import measurement
from tfposeidon.planning.plan import Plan
from tfposeidon.planning.search import choose_plan
from tfposeidon.policies import Policy

Paths = tuple[str, ...]
"""Paths of a list of variables, which identify it in snapshots."""


class Planner:
    """Makes the plans of one optimizer.

    `spent_s` is the time spent on network measurements and timed trials so far. While `is_watched`
    is true, traced steps record the times that plans depend on. `has_decided` is true once plans
    were chosen by measured step times, or retained.
    """

    def __init__(
        self, policy: Policy, bucket_bytes: int, wire: Callable[[], Wire] = runtime.wire
    ) -> None:
        self._wire = wire
        self.policy = policy
        self.bucket_bytes = bucket_bytes
        self._measured: dict[Paths, Measured] = {}
        self._race, self._raced_over = Race(), runtime.links()
        self._resumed: dict[Paths, Resumed] = {}
        self.spent_s = 0.0
        self.is_watched = self.has_decided = False

    def change_policy(self, policy: Policy) -> None:
        """Uses another policy for later plans."""
        self.policy = policy
        self.forget_times()
        self._resumed.clear()

    @property
    def leaves_open(self) -> bool:
        """True if predictions choose plans, and may choose others once steps have run."""
        if is_deterministic():
            # A plan that depends on measured times would differ in the next run.
            return False
        knows_links = runtime.links() is not None or runtime.measures_links()
        return knows_links and self.policy.leaves_open

    @property
    def may_learn(self) -> bool:
        """True if plans depend on measured step times, and were not chosen by them yet."""
        return self.leaves_open and not self.has_decided

    def plan(
        self,
        descriptions: Sequence[Description],
        measured: Measured | None = None,
        *,
        together: bool = False,
    ) -> Plan:
        """Makes a plan, the same on every rank.

        `together` is true if all ranks call it together, so that it may time exchanges. `measured`
        defaults to the times passed to `keep`.
        """
        topology, links = self._wire().topology, runtime.links()
        notes = [] if topology.size > 1 else ["one rank: no data is sent"]
        if topology.size > 1 and is_deterministic() and self.policy.leaves_open:
            together = False
            notes = ["deterministic ops: the plan does not depend on measured times"]
        measured = measured or self._measured.get(paths_of(descriptions))
        if links != self._raced_over:
            # A timed trial on another network does not apply to this one.
            self._race, self._raced_over = Race(), links
        return choose_plan(
            descriptions if measured is None else measured.sized(descriptions),
            self.policy,
            topology,
            links,
            bucket_bytes=self.bucket_bytes,
            timeline=None if measured is None else measured.timeline,
            notes=notes,
            race=lambda plans: self._raced(plans, self._wire() if together else None),
        )

    def _raced(self, plans: Sequence[Plan], wire: Wire | None) -> Sequence[float]:
        with self._spending():
            return self._race.times(plans, wire)

    @contextlib.contextmanager
    def _spending(self) -> Iterator[None]:
        begin_s = time.perf_counter()
        yield
        self.spent_s += time.perf_counter() - begin_s

    def plan_before_first_step(self, descriptions: Sequence[Description]) -> Plan:
        """Makes a plan before the first step shows structures, or returns that of a snapshot."""
        resumed = self._resumed.get(paths_of(descriptions))
        return resumed.plan(descriptions) if resumed else self.plan(descriptions)

    def plan_first_step(self, descriptions: Sequence[Description]) -> Plan:
        """Makes the first step's plan, or a snapshot's; all ranks call it for timed trials."""
        plan = self.plan(descriptions, together=True)
        paths = paths_of(descriptions)
        resumed, measured = self._resumed.get(paths), self._measured.get(paths)
        if resumed is None:
            return plan
        # The earlier run may have retained a plan although another was predicted to be faster.
        if measured is None:
            return resumed.followed(plan, descriptions, None)
        return resumed.followed(plan, measured.sized(descriptions), measured.timeline)

    def measure_links(self) -> None:
        """Measures the network profile if it is needed and unknown; all ranks call it together."""
        if self.leaves_open and runtime.links() is None:
            with self._spending():
                _measure_links()

    def keep(self, measured: Mapping[Paths, Measured]) -> None:
        """Uses measured times, the same on all ranks, for later plans, also in resumed runs."""
        self._measured |= measured
        self._resumed.clear()
        self.decide()

    def decide(self) -> None:
        """Marks plans as final, so that later traced steps record no times."""
        self.is_watched, self.has_decided = False, True

    def forget_times(self) -> None:
        """Discards measured step times, so that steps are timed and planned again."""
        self._measured.clear()
        self.has_decided = False

    def to_dict(self, learnt: Mapping[Paths, Measured] | None = None) -> dict[str, Any]:
        """Returns network profile, step times and timed trials, for JSON."""
        links = runtime.links()
        measured = self._measured if learnt is None else learnt
        return {
            "policy": repr(self.policy),
            "bucket_bytes": self.bucket_bytes,
            "nodes": self._wire().topology.nodes,
            "links": links and links.to_json(),
            "measured": [{"paths": paths, **asdict(one)} for paths, one in measured.items()],
            "raced": self._race.known,
            "has_decided": self.has_decided or learnt is not None,
        }

    def resume(self, saved: dict[str, Any]) -> bool:
        """Uses the data behind an earlier run's plans, if this run is on the same nodes.

        If both runs measure the network on the same hosts, the earlier profile is used. Otherwise,
        plans are recomputed if profile or policy differ. All ranks call it together. It returns
        true if later plans may differ from the current ones.
        """
        wire = self._wire()
        nodes = [list(node) for node in wire.topology.nodes]
        if not self.leaves_open or saved["links"] is None or saved["nodes"] != nodes:
            return False
        if (saved["policy"], saved["bucket_bytes"]) != (repr(self.policy), self.bucket_bytes):
            runtime.say(
                "tfposeidon: `scheme` or `bucket_bytes` differs from the snapshot; the plans are "
                "computed again."
            )
            return False
        links = NetworkProfile.from_json(saved["links"], "the snapshot")
        if runtime.measures_links() and links.hosts == measurement.hosts_of(wire):
            runtime.keep_links(links)
        if runtime.links() != links:
            runtime.say(
                "tfposeidon: the network profile differs from the snapshot; the plans are "
                "computed again."
            )
            return False
        self._measured = {
            tuple(one["paths"]): Measured(
                one["first_s"], one["compute_s"], one["step_s"], tuple(one["sizes"])
            )
            for one in saved["measured"]
        }
        self._race, self._raced_over = Race(saved["raced"]), links
        self.has_decided = saved["has_decided"]
        plans = [Resumed.from_dict(one) for one in saved["plans"]]
        self._resumed = {plan.paths: plan for plan in plans}
        return True


def is_deterministic() -> bool:
    """Returns whether `tf.config.experimental.enable_op_determinism` was called."""
    return bool(_pywrap_determinism.is_enabled())


def paths_of(descriptions: Sequence[Description]) -> Paths:
    """Returns the paths of the described variables."""
    return tuple(description.path for description in descriptions)


def _measure_links() -> None:
    with tf.init_scope():
        runtime.keep_links(measurement.measure(runtime.wire()))
    runtime.say("tfposeidon: network: %s.", runtime.links())

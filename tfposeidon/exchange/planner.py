"""Plans by what is known of links and steps: measured now, given, or kept by a snapshot."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import tensorflow as tf
from tensorflow.python.util import _pywrap_determinism  # There is no public way to ask.

from tfposeidon.communication import runtime
from tfposeidon.communication.network_profile import NetworkProfile
from tfposeidon.communication.wire import Wire
from tfposeidon.exchange.measured import Measured
from tfposeidon.exchange.race import Race
from tfposeidon.exchange.resumed import Resumed
from tfposeidon.gradients.description import Description
from tfposeidon.planning import measurement
from tfposeidon.planning.plan import Plan
from tfposeidon.planning.search import choose_plan
from tfposeidon.policies import Policy

Paths = tuple[str, ...]
"""Paths of a list of variables, as snapshots name them."""


class Planner:
    """Makes the plans of one optimizer.

    Args:
      policy: Choice of the scheme by which a variable is exchanged.
      bucket_bytes: Bytes up to which small gradients are fused.
      wire: Function that returns the wire between the ranks that exchange.

    Attributes:
      policy: Choice of the scheme by which a variable is exchanged; `change_policy` replaces it.
      bucket_bytes: Bytes up to which small gradients are fused.
      spent_s: Seconds in which links were measured and exchanges raced so far.
      is_watched: True while steps that are traced have clocks, for plans to be chosen by.
      has_decided: True once plans were chosen by what steps have measured, or stay.
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
        """Plans by another policy from now on.

        Args:
          policy: Policy of later steps, the same on all ranks.
        """
        self.policy = policy
        self.forget_times()
        self._resumed.clear()

    @property
    def leaves_open(self) -> bool:
        """True if the predicted step decides, and may decide otherwise once steps have run."""
        if is_deterministic():
            # A plan that follows measured times is another one in the next run.
            return False
        knows_links = runtime.links() is not None or runtime.measures_links()
        return knows_links and self.policy.leaves_open

    @property
    def may_learn(self) -> bool:
        """True if plans depend on what steps measure, and were not chosen by that yet."""
        return self.leaves_open and not self.has_decided

    def plan(
        self,
        descriptions: Sequence[Description],
        measured: Measured | None = None,
        *,
        together: bool = False,
    ) -> Plan:
        """Makes a plan.

        Args:
          descriptions: Descriptions of the gradients, in the order of the variables.
          measured: What steps have measured; by default what was kept by `keep`, if anything.
          together: True if all ranks make it together, and may time exchanges for it.

        Returns:
          The plan, the same on every rank.
        """
        topology, links = self._wire().topology, runtime.links()
        notes = [] if topology.size > 1 else ["one rank: nothing is sent"]
        if topology.size > 1 and is_deterministic() and self.policy.leaves_open:
            together = False
            notes = ["deterministic ops: no plan follows measured times"]
        measured = measured or self._measured.get(paths_of(descriptions))
        if links != self._raced_over:
            # What a race took over other links tells nothing about these.
            self._race, self._raced_over = Race(), links
        return choose_plan(
            descriptions if measured is None else measured.with_rows(descriptions),
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
        """Makes a plan before the first step shows factors: that of a snapshot, if there is one.

        Args:
          descriptions: Descriptions of the gradients, in the order of the variables.
        """
        resumed = self._resumed.get(paths_of(descriptions))
        return resumed.plan(descriptions) if resumed else self.plan(descriptions)

    def plan_first_step(self, descriptions: Sequence[Description]) -> Plan:
        """Makes the plan of the first step: that of a snapshot, if there is one.

        All ranks make it together, and may time exchanges for it.

        Args:
          descriptions: Descriptions of the gradients, in the order of the variables, with their
            factors.
        """
        plan = self.plan(descriptions, together=True)
        paths = paths_of(descriptions)
        resumed, measured = self._resumed.get(paths), self._measured.get(paths)
        if resumed is None:
            return plan
        # Steps may have kept a plan although another was predicted to be faster.
        if measured is None:
            return resumed.followed(plan, descriptions, None)
        return resumed.followed(plan, measured.with_rows(descriptions), measured.timeline)

    def measure_links(self) -> None:
        """Measures links that are needed and not known yet; all ranks call it together."""
        if self.leaves_open and runtime.links() is None:
            with self._spending():
                _measure_links()

    def keep(self, measured: Mapping[Paths, Measured]) -> None:
        """Plans from now on by what steps have measured, in resumed runs too.

        Args:
          measured: What was measured, by the paths of a list of variables; the same on all ranks.
        """
        self._measured |= measured
        self._resumed.clear()
        self.decide()

    def decide(self) -> None:
        """Notes that plans are chosen, or stay: steps that are traced have no clocks."""
        self.is_watched, self.has_decided = False, True

    def forget_times(self) -> None:
        """Forgets what steps have measured, so that they are timed and planned by once more."""
        self._measured.clear()
        self.has_decided = False

    def to_dict(self, learnt: Mapping[Paths, Measured] | None = None) -> dict[str, Any]:
        """Returns what plans are made by, for JSON: links, and what steps and races measured.

        Args:
          learnt: What steps have measured; by default what was kept by `keep`.
        """
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
        """Plans by what the plans of an earlier run were made by, if this one is on the same nodes.

        Where both measure links, those of the earlier run are kept. Otherwise, if links are others
        than those of the earlier run, or the policy is, plans are made anew. All ranks call it
        together.

        Args:
          saved: Result of `to_dict` in the earlier run, with its "plans", from JSON.

        Returns:
          True if later plans may be others than those so far.
        """
        wire = self._wire()
        nodes = [list(node) for node in wire.topology.nodes]
        if not self.leaves_open or saved["links"] is None or saved["nodes"] != nodes:
            return False
        if (saved["policy"], saved["bucket_bytes"]) != (repr(self.policy), self.bucket_bytes):
            runtime.say("tfposeidon: the scheme is not that of the snapshot: plans are made anew.")
            return False
        links = NetworkProfile.from_json(saved["links"], "the snapshot")
        if runtime.measures_links() and links.hosts == measurement.hosts_of(wire):
            runtime.keep_links(links)
        if runtime.links() != links:
            runtime.say("tfposeidon: links are not those of the snapshot: plans are made anew.")
            return False
        self._measured = {
            tuple(one["paths"]): Measured(
                one["first_s"], one["compute_s"], one["step_s"], tuple(one["rows"])
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
    """Returns the paths of variables.

    Args:
      descriptions: Descriptions of their gradients.
    """
    return tuple(description.path for description in descriptions)


def _measure_links() -> None:
    with tf.init_scope():
        runtime.keep_links(measurement.measure(runtime.wire()))
    runtime.say("tfposeidon: links: %s.", runtime.links())

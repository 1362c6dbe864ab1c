"""What the lab saw: a table for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfposeidon.lab.cluster import Cluster
from tfposeidon.lab.network import Traffic, host_name
from tfposeidon.lab.ranks import Job
from tfposeidon.text import sparkline, table
from tfposeidon.units import readable_size

LONGEST_BARS = 40


@dataclass(frozen=True, kw_only=True)
class Report:
    """One run of a job.

    Attributes:
      wall_s: Seconds until the slowest rank had ended.
      ranks: Of each rank its node, exit status (negative for a signal) and seconds.
      traffic: What crossed each node's link, headers included.
      sent_over_time: Pairs of seconds since the start and the bytes that each node had sent by then.
    """

    cluster: Cluster
    command: Sequence[str]
    exit_status: int
    wall_s: float
    ranks: Sequence[dict[str, Any]]
    traffic: Sequence[Traffic]
    sent_over_time: Sequence[tuple[float, Sequence[int]]]

    @classmethod
    def of(
        cls, cluster: Cluster, command: Sequence[str], job: Job, traffic: Sequence[Traffic]
    ) -> Report:
        """What there is to say about a job that has ended."""
        return cls(
            cluster=cluster,
            command=command,
            exit_status=job.status,
            wall_s=job.wall_s,
            ranks=[
                {"rank": r.number, "node": r.node, "status": r.status, "wall_s": r.wall_s}
                for r in job.ranks
            ],
            traffic=traffic,
            sent_over_time=job.samples,
        )

    def used(self, node: int, size_bytes: int) -> float | None:
        """Part of what the link could have carried one way in that time; `None` if it has no limit."""
        rate = self.cluster.rate(node)
        return 8 * size_bytes / (rate * self.wall_s) if rate and self.wall_s else None

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        content = dataclasses.asdict(self)
        for node, row in enumerate(content["traffic"]):
            row["rate_bits_per_s"] = self.cluster.rate(node)
            row["sent_share"] = self.used(node, row["sent_bytes"])
            row["received_share"] = self.used(node, row["received_bytes"])
        return content

    def write(self, path: Path) -> None:
        """Writes JSON, beside and renamed."""
        beside = path.with_name(f".{path.name}.part")
        beside.write_text(json.dumps(self.to_dict(), indent=2) + "\n")
        beside.replace(path)

    def __str__(self) -> str:
        slowest = max(self.ranks, key=lambda rank: rank["wall_s"])["rank"]
        head = f"{self.cluster}: {shlex.join(self.command)}"
        tail = (
            f"{self.wall_s:.1f} s (the slowest was rank {slowest}), exit status {self.exit_status}"
        )
        header = (
            "link of",
            "sent",
            "packets",
            "used",
            "received",
            "packets",
            "used",
            "dropped",
            "sent over time",
        )
        rows = [self._row(node, traffic) for node, traffic in enumerate(self.traffic)]
        return "\n".join(["", head, tail, *table([header, *rows])])

    def _row(self, node: int, traffic: Traffic) -> tuple[str, ...]:
        return (
            host_name(node),
            readable_size(traffic.sent_bytes),
            str(traffic.sent_packets),
            _percent(self.used(node, traffic.sent_bytes)),
            readable_size(traffic.received_bytes),
            str(traffic.received_packets),
            _percent(self.used(node, traffic.received_bytes)),
            str(traffic.dropped_packets),
            sparkline(self._load(node)),
        )

    def _load(self, node: int) -> list[float]:
        """The use of the link over time, in parts of its rate or, without one, of the busiest moment."""
        points = [(at_s, counts[node]) for at_s, counts in self.sent_over_time]
        stride = -(-len(points) // LONGEST_BARS) or 1
        points = [*points[:-1:stride], *points[-1:]]
        rates = [
            8 * (after - before) / (b - a)
            for (a, before), (b, after) in itertools.pairwise(points)
            if b > a
        ]
        full = self.cluster.rate(node) or max([*rates, 1.0])
        return [rate / full for rate in rates]


def _percent(part: float | None) -> str:
    return "" if part is None else f"{part:.0%}"

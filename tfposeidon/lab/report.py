"""Reports of the lab: a table to read, and JSON for programs."""

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
    """Report of a job that has ended.

    `wall_s` is the seconds from the start of the job to the end of the slowest rank. The status in
    `ranks` is negative for a signal. `sent_over_time` holds pairs of the seconds since the start
    and the bytes that each node had sent by then.
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
        """Returns the report of a job that has ended, with the traffic at its end."""
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

    def link_share(self, node: int, size_bytes: int) -> float | None:
        """Returns bytes as a fraction of the link's capacity one way; `None` if it is unlimited."""
        rate = self.cluster.rate(node)
        return 8 * size_bytes / (rate * self.wall_s) if rate and self.wall_s else None

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields, and the rate and share of each link, for JSON."""
        content = dataclasses.asdict(self)
        for node, row in enumerate(content["traffic"]):
            row["rate_bits_per_s"] = self.cluster.rate(node)
            row["sent_share"] = self.link_share(node, row["sent_bytes"])
            row["received_share"] = self.link_share(node, row["received_bytes"])
        return content

    def write(self, path: Path) -> None:
        """Writes the report as JSON; the file appears once it is complete."""
        # The temporary file is in the same folder because a rename is atomic on one file system
        # only.
        temporary = path.with_name(f".{path.name}.part")
        temporary.write_text(json.dumps(self.to_dict(), indent=2) + "\n")
        temporary.replace(path)

    def __str__(self) -> str:
        slowest = max(self.ranks, key=lambda rank: rank["wall_s"])["rank"]
        what = f"{self.cluster}: {shlex.join(self.command)}"
        outcome = (
            f"{self.wall_s:.1f} s (the slowest was rank {slowest}), exit status {self.exit_status}"
        )
        header = (
            "node",
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
        return "\n".join(["", what, outcome, *table([header, *rows])])

    def _row(self, node: int, traffic: Traffic) -> tuple[str, ...]:
        return (
            host_name(node),
            readable_size(traffic.sent_bytes),
            str(traffic.sent_packets),
            _percent(self.link_share(node, traffic.sent_bytes)),
            readable_size(traffic.received_bytes),
            str(traffic.received_packets),
            _percent(self.link_share(node, traffic.received_bytes)),
            str(traffic.dropped_packets),
            sparkline(self.load(node)),
        )

    def load(self, node: int) -> list[float]:
        """Returns a link's load over time, as fractions of its rate, or else of the maximum."""
        # Use intervals of equal length, so that the bars fit on a line.
        points = [(at_s, counts[node]) for at_s, counts in self.sent_over_time]
        stride = -(-len(points) // LONGEST_BARS) or 1
        # Keep the last point whatever the stride: it is the end of the job.
        points = [*points[:-1:stride], *points[-1:]]
        rates = [
            8 * (after - before) / (b - a)
            for (a, before), (b, after) in itertools.pairwise(points)
            if b > a
        ]
        full = self.cluster.rate(node) or max([*rates, 1.0])
        return [rate / full for rate in rates]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"

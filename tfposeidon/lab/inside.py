"""Part of the lab that runs inside private namespaces: `python -m tfposeidon.lab.inside`.

It builds the network, runs the ranks, injects faults, counts the bytes that nodes send, and writes
the report: a table to read, and JSON for programs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tfposeidon import quiet
from tfposeidon.lab.cluster import Cluster, Fault
from tfposeidon.lab.command import Request, add_arguments, read_request
from tfposeidon.lab.network import INTERFACE, SWITCH_ADDRESS, Network, Traffic, host_name, network
from tfposeidon.lab.sandbox import ENDED, UnavailableError
from tfposeidon.peers.runner import Runner, Start
from tfposeidon.text import readable_size, sparkline, table

NAME = "tfposeidon lab"
SAMPLE_INTERVAL_S = 0.5
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT}

LONGEST_BARS = 40
"""Most bars of a node in the report."""


class Job(Runner):
    """Job whose ranks run on the nodes of a network.

    `samples` holds pairs of the seconds since the start and the bytes that each node had sent by
    then.
    """

    def __init__(self, network: Network, faults: list[Fault], show: set[int] | None) -> None:
        super().__init__(NAME, show=show)
        self._network = network
        self._faults = faults
        self.samples: list[tuple[float, list[int]]] = []

    async def run_on_nodes(self, command: list[str], environments: list[dict[str, str]]) -> None:
        """Runs one rank per environment, and returns when all have ended.

        Raises `CancelledError` if the task is cancelled or standard output is closed, and
        `UnavailableError` if the network fails, in both cases after ending all ranks.
        """
        per_node = self._network.cluster.per_node
        starts = [
            Start(
                number=number,
                node=number // per_node,
                command=[*self._network.entering(number // per_node), *command],
                environment=variables,
            )
            for number, variables in enumerate(environments)
        ]
        try:
            await self.run(
                starts, [*(partial(self._inject, fault) for fault in self._faults), self._sample]
            )
        finally:
            self._take_sample()

    async def _inject(self, fault: Fault) -> None:
        # Seconds count from the job's start: this task starts later, after all ranks.
        await asyncio.sleep(self._begin + fault.at_s - time.monotonic())
        say(str(fault))
        if fault.kind == "cut":
            self._network.cut(fault.target)
        else:
            self.ranks[fault.target].signal(SIGNALS[fault.kind])

    async def _sample(self) -> None:
        while True:
            self._take_sample()
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    def _take_sample(self) -> None:
        self.samples.append((time.monotonic() - self._begin, self._network.byte_counts()))


def say(text: str) -> None:
    """Writes a message of the lab to standard error, apart from the output of ranks."""
    print(f"{NAME}: {text}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------ report


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
        content = asdict(self)
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


def main(arguments: list[str]) -> int:
    """Builds the cluster, runs the job and reports; returns the job's exit status, or 2."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    # Ranks may write characters that this locale cannot encode, which must not end the job.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    return asyncio.run(_run(read_request(parser.parse_args(arguments))))


async def _run(request: Request) -> int:
    # Must come first, so that a request to end is not missed while the network is built.
    _cancel_at_end_of(sys.stdin.fileno())
    try:
        with network(request.cluster) as built, rendezvous(request.cluster) as environments:
            job = Job(built, request.faults, request.show)
            try:
                await job.run_on_nodes(request.command, environments)
            except asyncio.CancelledError:
                say("interrupted; ended all ranks")
                return ENDED
            # Read the counters inside the context: they disappear with the interfaces.
            found = Report.of(request.cluster, request.command, job, built.traffic())
    except subprocess.CalledProcessError as error:
        say(f"the kernel rejected a command: {' '.join(error.cmd)}\n  {error.stderr}")
        return 2
    except UnavailableError as error:
        say(str(error))
        return 2
    if request.report:
        found.write(request.report)
    print(found, file=sys.stderr)
    return job.status


def _cancel_at_end_of(descriptor: int) -> None:
    """Cancels the current task at the end of the descriptor, by which the sandbox ends a lab."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def cancel() -> None:
        loop.remove_reader(descriptor)
        task.cancel()

    loop.add_reader(descriptor, cancel)


@contextmanager
def rendezvous(cluster: Cluster) -> Iterator[list[dict[str, str]]]:
    """Runs Horovod's key-value store at the switch; yields the environment of each rank."""
    # These are internals of horovodrun, whose public interface reaches hosts by ssh only, not
    # network namespaces.
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    hosts = ",".join(f"{host_name(node)}:{cluster.per_node}" for node in range(cluster.nodes))
    slots = get_host_assignments(parse_hosts(hosts), cluster.size)
    server = RendezvousServer()
    store_port = server.start()
    server.init(slots)
    # User settings override our defaults, and Horovod's variables override both.
    common = (
        quiet.DEFAULTS
        | os.environ
        | create_run_env_vars(SWITCH_ADDRESS, [INTERFACE], str(store_port))
    )
    # Unbuffered, so that the lab shows lines as soon as ranks write them.
    common |= {"PYTHONUNBUFFERED": "1"}
    try:
        yield [common | create_slot_env_vars(slot) for slot in slots]
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

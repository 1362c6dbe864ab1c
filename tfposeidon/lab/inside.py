"""Runs a lab inside private namespaces, as `python -m tfposeidon.lab.inside`.

This program builds the network, runs the ranks, injects faults, counts the bytes that nodes send,
and writes the report: a table for readers, and JSON for programs.
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
from tfposeidon.lab.command import (
    ENDED,
    Cluster,
    Fault,
    UnavailableError,
    add_arguments,
    read_request,
)
from tfposeidon.lab.network import INTERFACE, SWITCH_ADDRESS, Network, Traffic, host_name, network
from tfposeidon.peers import rendezvous, store
from tfposeidon.peers.runner import Runner, Start
from tfposeidon.text import readable_size, sparkline, table

NAME = "tfposeidon lab"
SAMPLE_INTERVAL_S = 0.5
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT}
LONGEST_BARS = 40
"""Largest number of bars that the report draws for a node."""


class Job(Runner):
    """Runs the ranks of a job on the nodes of a network.

    `samples` holds pairs of the seconds since the start and the bytes sent by each node so far.
    """

    def __init__(self, network: Network, faults: list[Fault], show: set[int] | None) -> None:
        super().__init__(NAME, show=show)
        self._network = network
        self._faults = faults
        self.samples: list[tuple[float, list[int]]] = []

    async def run_on_nodes(self, command: list[str], environments: list[dict[str, str]]) -> None:
        """Runs one rank per environment, and returns when all have ended.

        Raises `CancelledError` if the task is cancelled or standard output is closed, or
        `UnavailableError` if the network fails, but always ends all ranks first.
        """
        per_node = self._network.cluster.per_node
        starts = [
            Start(number, node, [*self._network.entering(node), *command], variables)
            for number, variables in enumerate(environments)
            for node in (number // per_node,)
        ]
        faults = (partial(self._inject, fault) for fault in self._faults)
        try:
            await self.run(starts, [*faults, self._sample])
        finally:
            self._take_sample()

    async def _inject(self, fault: Fault) -> None:
        # `at_s` counts from the job's start, but this task starts later, after all ranks.
        await asyncio.sleep(self._begin + fault.at_s - time.monotonic())
        self.say(str(fault))
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

    def report(self, command: list[str]) -> Report:
        """Returns the report of the ended job; its network must still exist."""
        return Report(
            cluster=self._network.cluster,
            command=command,
            exit_status=self.status,
            wall_s=self.wall_s,
            ranks=[
                {"rank": r.number, "node": r.node, "status": r.status, "wall_s": r.wall_s}
                for r in self.ranks
            ],
            traffic=self._network.traffic(),
            sent_over_time=self.samples,
        )


# ------------------------------------------------------------------ report


@dataclass(frozen=True, kw_only=True)
class Report:
    """Report of a job that has ended.

    `wall_s` is the time in seconds from the start of the job to the end of the slowest rank. The
    status in `ranks` is negative for a signal. `sent_over_time` holds pairs of the seconds since
    the start and the bytes sent by each node so far.
    """

    cluster: Cluster
    command: Sequence[str]
    exit_status: int
    wall_s: float
    ranks: Sequence[dict[str, Any]]
    traffic: Sequence[Traffic]
    sent_over_time: Sequence[tuple[float, Sequence[int]]]

    def link_share(self, node: int, size_bytes: int) -> float | None:
        """Returns a size as a fraction of a link's capacity one way; `None` if it is unshaped."""
        rate = self.cluster.rate(node)
        return 8 * size_bytes / (rate * self.wall_s) if rate and self.wall_s else None

    def write(self, path: Path) -> None:
        """Writes all fields, and each link's rate and shares, as JSON in one atomic step."""
        content = asdict(self)
        for node, row in enumerate(content["traffic"]):
            row["rate_bits_per_s"] = self.cluster.rate(node)
            row["sent_share"] = self.link_share(node, row["sent_bytes"])
            row["received_share"] = self.link_share(node, row["received_bytes"])
        # The temporary file is in the same folder, because a rename is atomic only within one file
        # system.
        temporary = path.with_name(f".{path.name}.part")
        temporary.write_text(json.dumps(content, indent=2) + "\n")
        temporary.replace(path)

    def __str__(self) -> str:
        slowest = max(self.ranks, key=lambda rank: rank["wall_s"])["rank"]
        what = f"{self.cluster}: {shlex.join(self.command)}"
        outcome = (
            f"{self.wall_s:.1f} s (the slowest was rank {slowest}), exit status {self.exit_status}"
        )
        way = ("packets", "used")
        rows = [["node", "sent", *way, "received", *way, "dropped", "sent over time"]]
        for node, one in enumerate(self.traffic):
            sent = self._one_way(node, one.sent_bytes, one.sent_packets)
            received = self._one_way(node, one.received_bytes, one.received_packets)
            bars = sparkline(self.load(node))
            rows.append([host_name(node), *sent, *received, str(one.dropped_packets), bars])
        return "\n".join(["", what, outcome, *table(rows)])

    def _one_way(self, node: int, size_bytes: int, packets: int) -> tuple[str, str, str]:
        share = self.link_share(node, size_bytes)
        return readable_size(size_bytes), str(packets), "" if share is None else f"{share:.0%}"

    def load(self, node: int) -> list[float]:
        """Returns a link's load over time as fractions of its rate, or of its peak if unshaped."""
        # Merge intervals, so that the bars fit on a line.
        points = [(at_s, counts[node]) for at_s, counts in self.sent_over_time]
        stride = -(-len(points) // LONGEST_BARS) or 1
        # Keep the last point for any stride, because it is the end of the job.
        points = [*points[:-1:stride], *points[-1:]]
        rates = [
            8 * (after - before) / (b - a)
            for (a, before), (b, after) in itertools.pairwise(points)
            if b > a
        ]
        full = self.cluster.rate(node) or max([*rates, 1.0])
        return [rate / full for rate in rates]


def main(arguments: list[str]) -> int:
    """Builds the cluster, runs the job and prints a report; returns its status, or 2 on failure."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    # Replace characters that this locale cannot encode: output of ranks must not end the job.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        return asyncio.run(_run(parser.parse_args(arguments)))
    except subprocess.CalledProcessError as error:
        message = f"the kernel rejected a command: {' '.join(error.cmd)}\n  {error.stderr}"
    except UnavailableError as error:
        message = str(error)
    print(f"{NAME}: {message}", file=sys.stderr)
    return 2


async def _run(options: argparse.Namespace) -> int:
    # Watch standard input first, so that a request to end is not missed while the network is built.
    _cancel_at_end_of_input()
    cluster, faults, command = read_request(options)
    with network(cluster) as built, serving_store(cluster) as environments:
        job = Job(built, faults, show=None if options.show == "all" else {0})
        try:
            await job.run_on_nodes(command, environments)
        except asyncio.CancelledError:
            job.say("interrupted; ended all ranks")
            return ENDED
        # Read the counters inside the context, because they disappear with the interfaces.
        report = job.report(command)
    if options.report:
        report.write(options.report)
    print(report, file=sys.stderr)
    return job.status


def _cancel_at_end_of_input() -> None:
    """Cancels the current task when `command` closes standard input to end the lab."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def cancel() -> None:
        loop.remove_reader(sys.stdin)
        task.cancel()

    loop.add_reader(sys.stdin, cancel)


@contextmanager
def serving_store(cluster: Cluster) -> Iterator[list[dict[str, str]]]:
    """Runs the job's key-value store at the switch; yields the environment of each rank."""
    server = store.listen(SWITCH_ADDRESS, (0,), NAME, None)
    client = rendezvous.Client(SWITCH_ADDRESS, server.server_address[1], server.prefix)
    hosts = [host_name(node) for node in range(cluster.nodes) for _ in range(cluster.per_node)]
    entries = [rendezvous.Entry(host, "") for host in hosts]
    # The user's variables override these defaults, and Horovod's variables override both. Output is
    # not buffered, so that the lab shows lines as soon as ranks write them.
    common = quiet.DEFAULTS | os.environ | {"PYTHONUNBUFFERED": "1"}
    common |= {rendezvous.INTERFACE: INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}
    with server.serving():
        yield [
            common
            | rendezvous.horovod_variables(entries, rank, client)
            | {"HOROVOD_HOSTNAME": host}
            for rank, host in enumerate(hosts)
        ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Runs a lab inside private namespaces, as `python -m tfposeidon.lab.inside`.

This program builds the network, runs the ranks, injects faults, counts the bytes that nodes send,
and writes the report: a table for readers, and JSON for programs.
"""

from __future__ import annotations

import argparse
import asyncio
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
from tfposeidon.peers.runner import Rank, Runner
from tfposeidon.text import readable_size, table

NAME = "tfposeidon lab"
WATCH_INTERVAL_S = 0.5
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT}


class Job(Runner):
    """Runs the ranks of a job on the nodes of a network."""

    def __init__(self, network: Network, show: set[int] | None) -> None:
        super().__init__(NAME, show=show)
        self._network = network

    async def run_on_nodes(
        self, command: list[str], environments: list[dict[str, str]], faults: list[Fault]
    ) -> None:
        """Runs one rank per environment; raises `UnavailableError` if the network fails."""
        per_node = self._network.cluster.per_node
        ranks = [
            Rank(number, node, [*self._network.entering(node), *command], variables)
            for number, variables in enumerate(environments)
            for node in (number // per_node,)
        ]
        injections = (partial(self._inject, fault) for fault in faults)
        await self.run(ranks, *injections, self._watch_network)

    async def _inject(self, fault: Fault) -> None:
        # `at_s` counts from the job's start, but this task starts later, after all ranks.
        await asyncio.sleep(self._begin + fault.at_s - time.monotonic())
        self.say(str(fault))
        if fault.kind == "cut":
            self._network.cut(fault.target)
        else:
            self.ranks[fault.target].signal(SIGNALS[fault.kind])

    async def _watch_network(self) -> None:
        line = self._network.line
        while line is None or line.poll() is None:
            await asyncio.sleep(WATCH_INTERVAL_S)
        raise UnavailableError(
            "the process that delays packets must run until the job ends. Received: exit status "
            f"{line.returncode}. Run the lab again, or omit --rtt, --jitter and --loss."
        )

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
            traffic=self._network.traffic(self.wall_s),
        )


@dataclass(frozen=True, kw_only=True)
class Report:
    """Report of a job that has ended.

    `wall_s` is the time in seconds from the start of the job to the end of the slowest rank. In
    `ranks`, `status` is a rank's exit status, or the negative number of the signal that ended it.
    """

    cluster: Cluster
    command: Sequence[str]
    exit_status: int
    wall_s: float
    ranks: Sequence[dict[str, Any]]
    traffic: Sequence[Traffic]

    def __str__(self) -> str:
        slowest = max(self.ranks, key=lambda rank: rank["wall_s"])["rank"]
        what = f"{self.cluster}: {shlex.join(self.command)}"
        outcome = (
            f"{self.wall_s:.1f} s (the slowest was rank {slowest}), exit status {self.exit_status}"
        )
        way = ("packets", "used")
        rows = [("node", "sent", *way, "received", *way, "dropped")]
        for node, one in enumerate(self.traffic):
            sent = _one_way(one.sent_bytes, one.sent_packets, one.sent_share)
            received = _one_way(one.received_bytes, one.received_packets, one.received_share)
            rows.append((host_name(node), *sent, *received, str(one.dropped_packets)))
        return "\n".join(["", what, outcome, *table(rows)])


def _one_way(size_bytes: int, packets: int, share: float | None) -> tuple[str, str, str]:
    return readable_size(size_bytes), str(packets), "" if share is None else f"{share:.0%}"


def main(arguments: list[str]) -> int:
    """Builds the cluster, runs the job and prints a report; returns its status, or 2 on failure."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
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
        job = Job(built, show=None if options.show == "all" else {0})
        try:
            await job.run_on_nodes(command, environments, faults)
        except asyncio.CancelledError:
            job.say("interrupted; ended all ranks")
            return ENDED
        # Read the counters inside the context, because they disappear with the interfaces.
        report = job.report(command)
    if options.report:
        beside = options.report.with_name(f".{options.report.name}.part")
        beside.write_text(json.dumps(asdict(report), indent=2) + "\n")
        beside.replace(options.report)
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

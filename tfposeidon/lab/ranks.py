"""Runs the ranks of a lab: injects faults, and counts the bytes that nodes send."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from functools import partial

from tfposeidon.lab.cluster import Fault
from tfposeidon.lab.network import Network
from tfposeidon.peers.runner import Runner, Start

NAME = "tfposeidon lab"
SAMPLE_INTERVAL_S = 0.5
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT}


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

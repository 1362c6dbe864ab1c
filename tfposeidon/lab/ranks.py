"""Starts the ranks of a job, passes their output on, lets faults happen, and ends all when one fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import IO

from tfposeidon.lab.faults import Fault
from tfposeidon.lab.network import Network
from tfposeidon.quiet import is_startup_message

LAST_WORDS_S = 10.0
TERMINATION_S = 3.0
SAMPLE_S = 0.5
LOOK_S = 0.02
DRAIN_S = 1.0
KEPT_LINES = 30
CHUNK_BYTES = 65536
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT}
# Progress bars go back to the start of their line.
LINE_ENDS = re.compile(rb"\r\n|\n|\r(?!$)")


@dataclass(kw_only=True)
class Rank:
    """One process of the job. `status` is `None` while it runs, negative for a signal."""

    number: int
    node: int
    process: asyncio.subprocess.Process
    status: int | None = None
    wall_s: float = 0.0
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))

    def signal(self, number: int) -> None:
        """Reaches the rank and what it has started."""
        # It may have ended, with all that belongs to it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def __str__(self) -> str:
        if self.status is None:
            return f"rank {self.number} runs"
        if self.status < 0:
            return f"rank {self.number} was ended by {signal.Signals(-self.status).name} after {self.wall_s:.1f} s"
        return f"rank {self.number} ended with exit status {self.status} after {self.wall_s:.1f} s"


class Job:
    """The ranks of one job.

    Args:
      network: Where they run.
      faults: What happens on the way.
      show: Ranks whose output is shown, `None` for all. The first to fail is always heard.
    """

    def __init__(self, network: Network, faults: list[Fault], show: set[int] | None) -> None:
        self._network = network
        self._faults = faults
        self._show = show
        self._ending: asyncio.Task[None] | None = None
        self._ended = False
        self._task: asyncio.Task[None] | None = None
        self.ranks: list[Rank] = []
        self.first_failed: Rank | None = None
        self.samples: list[tuple[float, list[int]]] = []

    @property
    def wall_s(self) -> float:
        """Seconds until the slowest rank had ended."""
        return max((rank.wall_s for rank in self.ranks), default=0.0)

    @property
    def status(self) -> int:
        """The job's exit status: 0, or that of the rank that failed first, as a shell gives it."""
        status = self.first_failed.status if self.first_failed else 0
        assert status is not None
        return status if status >= 0 else 128 - status

    async def run(self, command: list[str], environments: list[dict[str, str]]) -> None:
        """Runs `command` once per environment, and returns when every rank has ended.

        Raises:
          asyncio.CancelledError: After all ranks were ended, when the task is cancelled or nobody reads our output.
          UnavailableError: After all ranks were ended, when the network has failed.
        """
        self._begin = time.monotonic()
        self._task = asyncio.current_task()
        watched: list[asyncio.Task[None]] = []
        beside: set[asyncio.Task[None]] = set()
        try:
            for number, variables in enumerate(environments):
                self.ranks.append(await self._start(number, command, variables))
            watched = [asyncio.create_task(self._watch(rank)) for rank in self.ranks]
            beside = {asyncio.create_task(self._happen(fault)) for fault in self._faults}
            beside.add(asyncio.create_task(self._sample()))
            await _all_of(watched, beside)
        finally:
            self._ended = True
            for task in beside:
                task.cancel()
            await self._end(0.0)
            await asyncio.gather(*watched)
            self._take_sample()

    async def _start(self, number: int, command: list[str], variables: dict[str, str]) -> Rank:
        node = number // self._network.cluster.per_node
        process = await asyncio.create_subprocess_exec(
            *self._network.entering(node),
            *command,
            env=variables,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        return Rank(number=number, node=node, process=process)

    async def _watch(self, rank: Rank) -> None:
        streams = ((rank.process.stdout, sys.stdout), (rank.process.stderr, sys.stderr))
        output = [
            asyncio.create_task(self._pass_on(rank, source, sink)) for source, sink in streams
        ]
        # Process.wait() would also wait for the pipes, which what the rank has started may hold open.
        while (status := rank.process.returncode) is None:
            await asyncio.sleep(LOOK_S)
        rank.status, rank.wall_s = status, time.monotonic() - self._begin
        failed_first = status != 0 and self.first_failed is None and not self._ended
        if failed_first:
            self.first_failed = rank
        _, open_still = await asyncio.wait(output, timeout=DRAIN_S)
        for task in open_still:
            task.cancel()
        rank.signal(signal.SIGKILL)
        if failed_first:
            self._fail(rank)

    async def _pass_on(
        self, rank: Rank, source: asyncio.StreamReader | None, sink: IO[str]
    ) -> None:
        assert source is not None
        rest = b""
        while chunk := await source.read(CHUNK_BYTES):
            *lines, rest = LINE_ENDS.split(rest + chunk)
            for line in lines:
                self._print(rank, line, sink)
        if rest:
            self._print(rank, rest, sink)

    def _print(self, rank: Rank, line: bytes, sink: IO[str]) -> None:
        text = line.decode(errors="replace")
        if is_startup_message(text):
            return
        rank.last_lines.append(text)
        if self._show is not None and rank.number not in self._show:
            return
        try:
            print(f"[{rank.number}] {text}", file=sink, flush=True)
        except BrokenPipeError:
            # As in `lab ... | head`: nobody listens, so the job ends. What is still buffered must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sink.fileno())
            assert self._task is not None
            self._task.cancel()

    def _fail(self, rank: Rank) -> None:
        if self._show is not None and rank.number not in self._show:
            for line in rank.last_lines:
                print(f"[{rank.number}] {line}", file=sys.stderr)
        say(str(rank))
        self._ending = asyncio.create_task(self._end(LAST_WORDS_S))

    async def _end(self, last_words_s: float) -> None:
        """Ends what still runs: after some time for last words by SIGTERM, then by SIGKILL."""
        for number, wait_s in (
            (None, last_words_s),
            (signal.SIGTERM, TERMINATION_S),
            (signal.SIGKILL, 0.0),
        ):
            for rank in self.ranks:
                if number is not None:
                    rank.signal(number)
            deadline = time.monotonic() + wait_s
            while (
                any(rank.process.returncode is None for rank in self.ranks)
                and time.monotonic() < deadline
            ):
                await asyncio.sleep(0.05)

    async def _happen(self, fault: Fault) -> None:
        await asyncio.sleep(self._begin + fault.at_s - time.monotonic())
        say(str(fault))
        if fault.kind == "cut":
            self._network.cut(fault.target)
        else:
            self.ranks[fault.target].signal(SIGNALS[fault.kind])

    async def _sample(self) -> None:
        while True:
            self._take_sample()
            await asyncio.sleep(SAMPLE_S)

    def _take_sample(self) -> None:
        self.samples.append((time.monotonic() - self._begin, self._network.byte_counts()))


async def _all_of(watched: list[asyncio.Task[None]], beside: set[asyncio.Task[None]]) -> None:
    """Waits for all that are watched; what fails beside them, fails here."""
    waiting = set(watched)
    while waiting:
        done, _ = await asyncio.wait(waiting | beside, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        waiting, beside = waiting - done, beside - done


def say(text: str) -> None:
    """A line of the lab's own, apart from the ranks' output."""
    print(f"tfposeidon lab: {text}", file=sys.stderr, flush=True)

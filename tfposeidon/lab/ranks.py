"""Runs the ranks of a job: forwards their output, injects faults, and ends all when one fails."""

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

GRACE_S = 10.0
"""Time for the other ranks to end and report after one has failed."""
TERMINATION_S = 3.0
"""Time between SIGTERM and SIGKILL."""
SAMPLE_INTERVAL_S = 0.5
POLL_INTERVAL_S = 0.02
DRAIN_S = 1.0
"""Time to read on after a rank has ended: its child processes may keep the pipe open."""
KEPT_LINES = 30
CHUNK_BYTES = 65536
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT}
# Progress bars end in "\r". One at the end of a chunk does not count: "\n" may follow.
LINE_ENDS = re.compile(rb"\r\n|\n|\r(?!$)")


@dataclass(kw_only=True)
class Rank:
    """Process of a job, which leads a session of its own.

    `status` is negative for a signal and `None` while the rank runs. `wall_s` counts from the start
    of the job to the end of the rank.
    """

    number: int
    node: int
    process: asyncio.subprocess.Process
    status: int | None = None
    wall_s: float = 0.0
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))

    def signal(self, number: int) -> None:
        """Sends a signal to the rank and its child processes."""
        # The whole process group may have ended.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def __str__(self) -> str:
        if self.status is None:
            return f"rank {self.number} runs"
        if self.status < 0:
            name = signal.Signals(-self.status).name
            return f"rank {self.number} was ended by {name} after {self.wall_s:.1f} s"
        return f"rank {self.number} ended with exit status {self.status} after {self.wall_s:.1f} s"


class Job:
    """Job whose ranks run on the nodes of a network.

    Only the output of the ranks in `show` is printed, `None` for all, but the last lines of the
    rank that fails first always are. `samples` holds pairs of the seconds since the start and the
    bytes that each node had sent by then.
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
        """Seconds from the start of the job to the end of its slowest rank."""
        return max((rank.wall_s for rank in self.ranks), default=0.0)

    @property
    def status(self) -> int:
        """Exit status of the job: 0, or that of the first failed rank in the form of a shell."""
        status = self.first_failed.status if self.first_failed else 0
        assert status is not None
        return status if status >= 0 else 128 - status

    async def run(self, command: list[str], environments: list[dict[str, str]]) -> None:
        """Runs one rank per environment, and returns when all have ended.

        Raises `CancelledError` if the task is cancelled or standard output is closed, and
        `UnavailableError` if the network fails, in both cases after ending all ranks.
        """
        self._begin = time.monotonic()
        # `_print` cancels it from another task.
        self._task = asyncio.current_task()
        watchers: list[asyncio.Task[None]] = []
        background: set[asyncio.Task[None]] = set()
        try:
            for number, variables in enumerate(environments):
                self.ranks.append(await self._start(number, command, variables))
            watchers = [asyncio.create_task(self._watch(rank)) for rank in self.ranks]
            background = {asyncio.create_task(self._inject(fault)) for fault in self._faults}
            background.add(asyncio.create_task(self._sample()))
            await _wait_for(watchers, background)
        finally:
            # Ranks that are terminated from here on have not failed.
            self._ended = True
            for task in background:
                task.cancel()
            await self._end(0.0)
            await asyncio.gather(*watchers)
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
            # A process group of its own, so that signals reach the rank's child processes.
            start_new_session=True,
        )
        return Rank(number=number, node=node, process=process)

    async def _watch(self, rank: Rank) -> None:
        streams = ((rank.process.stdout, sys.stdout), (rank.process.stderr, sys.stderr))
        output = [
            asyncio.create_task(self._pass_on(rank, source, sink)) for source, sink in streams
        ]
        # Process.wait() would also wait for the pipes, which children of the rank may hold open.
        while (status := rank.process.returncode) is None:
            await asyncio.sleep(POLL_INTERVAL_S)
        rank.status, rank.wall_s = status, time.monotonic() - self._begin
        # Decide now and report later: the pipe may still hold the last lines, which are shown, and
        # another rank may fail in the meantime.
        failed_first = status != 0 and self.first_failed is None and not self._ended
        if failed_first:
            self.first_failed = rank
        _, still_open = await asyncio.wait(output, timeout=DRAIN_S)
        for task in still_open:
            task.cancel()
        # End the child processes that the rank has left behind.
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
            # The output is closed, as in `lab ... | head`, so end the job. Redirect the stream, so
            # that Python does not fail again when it flushes the buffer.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sink.fileno())
            assert self._task is not None
            self._task.cancel()

    def _fail(self, rank: Rank) -> None:
        if self._show is not None and rank.number not in self._show:
            for line in rank.last_lines:
                print(f"[{rank.number}] {line}", file=sys.stderr)
        say(str(rank))
        # Hold a reference, because asyncio only has weak references to tasks.
        self._ending = asyncio.create_task(self._end(GRACE_S))

    async def _end(self, grace_s: float) -> None:
        """Ends the running ranks: after a grace period by SIGTERM, then by SIGKILL."""
        # A stopped rank does not react to SIGTERM, but SIGKILL ends it.
        for number, wait_s in (
            (None, grace_s),
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


async def _wait_for(
    watchers: list[asyncio.Task[None]], background: set[asyncio.Task[None]]
) -> None:
    """Waits for all watchers; raises the error of any task at once."""
    waiting = set(watchers)
    while waiting:
        done, _ = await asyncio.wait(waiting | background, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        waiting, background = waiting - done, background - done


def say(text: str) -> None:
    """Writes a message of the lab to standard error, apart from the output of ranks."""
    print(f"tfposeidon lab: {text}", file=sys.stderr, flush=True)

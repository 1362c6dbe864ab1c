"""Runs ranks of a job on this machine, forwards their output, and ends all ranks when one fails.

`python -m tfposeidon run` and the lab start ranks with this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from tfposeidon.quiet import is_startup_message

GRACE_S = 10.0
"""Time for the other ranks to report and end after a rank has failed."""
TERMINATION_S = 3.0
POLL_INTERVAL_S = 0.02
DRAIN_S = 1.0
"""Time for reading output after a rank has ended: its child processes may hold the pipe open."""
KEPT_LINES = 30
CHUNK_BYTES = 65536
# Progress bars end lines with "\r". A "\r" at the end of a chunk does not count, because "\n" may
# follow.
LINE_ENDS = re.compile(rb"\r\n|\n|\r(?!$)")


@dataclass
class Rank:
    """Process of a job. `status` is its exit status, or the negated number of a fatal signal."""

    number: int
    node: int
    command: list[str]
    environment: dict[str, str]
    process: asyncio.subprocess.Process = field(init=False)
    status: int = field(init=False)
    wall_s: float = field(init=False)
    """Seconds from the start of the job to the end of the rank."""
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))

    def signal(self, number: int) -> None:
        """Sends a signal to the rank and its child processes."""
        # The whole process group may have ended.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def __str__(self) -> str:
        if self.status < 0:
            name = signal.Signals(-self.status).name
            return f"rank {self.number} was ended by {name} after {self.wall_s:.1f} s"
        return f"rank {self.number} ended with exit status {self.status} after {self.wall_s:.1f} s"


class Runner:
    """Runs ranks of a job on this machine, from their start to their end.

    The output of ranks is printed with the rank's number before each line, or written to one file
    per rank in `folder`. Without `folder`, only the output of ranks in `show` (`None`: all) is
    printed. The last lines of the rank that fails first are always printed. The runner's own
    messages begin with `name`, and `termination_s` is the time between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        name: str,
        *,
        show: set[int] | None = None,
        folder: Path | None = None,
        termination_s: float = TERMINATION_S,
    ) -> None:
        self.name = name
        self.ranks: list[Rank] = []
        self.status = 0
        """Exit status of the first failed rank (128 + number for a signal), or 0."""
        self._show = show
        self._folder = folder
        self._termination_s = termination_s
        self._task: asyncio.Task[None] | None = None
        """Task that executes `run`; `None` once `run` ends the ranks."""

    @property
    def wall_s(self) -> float:
        """Seconds from the start of the job to the end of its slowest rank."""
        return max(rank.wall_s for rank in self.ranks)

    async def run(
        self, ranks: Sequence[Rank], *background: Callable[[], Coroutine[None, None, None]]
    ) -> None:
        """Runs all ranks, concurrently with `background`, and returns when the ranks have ended.

        Raises `CancelledError` if the task is cancelled or output cannot be written, or the error
        of a background task, but always ends all ranks first.
        """
        # The terminal's encoding may not have all characters that ranks write.
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
        self._begin = time.monotonic()
        self._task = asyncio.current_task()
        watchers: set[asyncio.Task[None]] = set()
        tasks: set[asyncio.Task[None]] = set()
        starting = asyncio.create_task(self._start(ranks))
        try:
            # Shield the start, because a cancelled start would leave processes that nothing ends.
            await asyncio.shield(starting)
            tasks = {asyncio.create_task(one()) for one in background}
            watchers = {asyncio.create_task(self._watch(rank)) for rank in ranks}
            waiting = watchers | tasks
            while waiting & watchers:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            # Ranks that the runner terminates have not failed, and `cancel` must not interrupt the
            # end.
            self._task = None
            for task in tasks:
                task.cancel()
            await asyncio.wait([starting])
            watchers = watchers or {asyncio.create_task(self._watch(rank)) for rank in self.ranks}
            await self.end(0.0)
            await asyncio.gather(*watchers)

    async def _start(self, ranks: Sequence[Rank]) -> None:
        for rank in ranks:
            rank.process = await asyncio.create_subprocess_exec(
                *rank.command,
                env=rank.environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                # Start a new process group, so that signals reach the rank's child processes.
                start_new_session=True,
            )
            self.ranks.append(rank)

    def cancel(self) -> None:
        """Makes `run`, in another task, end all ranks unless they are already ending."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _watch(self, rank: Rank) -> None:
        log = None
        if self._folder:
            path = self._folder / f"rank-{rank.number}.log"
            log = path.open("w", encoding="utf-8", errors="replace")
        streams = ((rank.process.stdout, sys.stdout), (rank.process.stderr, sys.stderr))
        output = [asyncio.create_task(self._pass_on(rank, s, log or sink)) for s, sink in streams]
        # Poll, because Process.wait() would also wait for the pipes, which child processes of the
        # rank may hold open.
        while (status := rank.process.returncode) is None:
            await asyncio.sleep(POLL_INTERVAL_S)
        rank.status, rank.wall_s = status, time.monotonic() - self._begin
        # Decide now which rank failed first, because another rank may fail in the meantime. Report
        # the failure later, because the pipe may still contain the last lines, which the report
        # shows.
        failed_first = status != 0 and self.status == 0 and self._task is not None
        if failed_first:
            self.status = status if status > 0 else 128 - status
        _, still_open = await asyncio.wait(output, timeout=DRAIN_S)
        for task in still_open:
            task.cancel()
        if log:
            log.close()
        # End child processes that outlive the rank.
        rank.signal(signal.SIGKILL)
        if failed_first:
            self._fail(rank)
            await self.end(GRACE_S)

    async def _pass_on(self, rank: Rank, source: asyncio.StreamReader | None, sink: TextIO) -> None:
        assert source is not None
        rest = b""
        while chunk := await source.read(CHUNK_BYTES):
            *lines, rest = LINE_ENDS.split(rest + chunk)
            for line in lines:
                self._print(rank, line, sink)
        if rest:
            self._print(rank, rest, sink)

    def _print(self, rank: Rank, line: bytes, sink: TextIO) -> None:
        text = line.decode(errors="replace")
        if is_startup_message(text):
            return
        rank.last_lines.append(text)
        if self._shows(rank):
            text = f"[{rank.number}] {text}"
        elif not self._folder:
            return
        if error := _write(text, sink):
            # End the job if its output is closed, as in `lab ... | head`, or if the disk is full.
            if not isinstance(error, BrokenPipeError):
                self.say(f"the job ends, because output could not be written: {error}.")
            self.cancel()

    def _shows(self, rank: Rank) -> bool:
        return not self._folder and (self._show is None or rank.number in self._show)

    def _fail(self, rank: Rank) -> None:
        if not self._shows(rank):
            for line in rank.last_lines:
                _write(f"[{rank.number}] {line}", sys.stderr)
        self.say(str(rank))

    def say(self, text: str) -> None:
        """Writes a message of the runner to standard error, apart from the output of ranks."""
        _write(f"{self.name}: {text}", sys.stderr)

    def signal(self, number: int) -> None:
        """Sends a signal to all ranks and their child processes."""
        for rank in self.ranks:
            rank.signal(number)

    async def end(self, grace_s: float) -> None:
        """Ends the running ranks: after a grace period by SIGTERM, then by SIGKILL."""
        # A stopped rank does not react to SIGTERM, but SIGKILL ends it. Signal 0 has no effect.
        steps = ((0, grace_s), (signal.SIGTERM, self._termination_s), (signal.SIGKILL, 0.0))
        for number, wait_s in steps:
            self.signal(number)
            deadline = time.monotonic() + wait_s
            while time.monotonic() < deadline and any(
                r.process.returncode is None for r in self.ranks
            ):
                await asyncio.sleep(0.05)


def _write(text: str, sink: TextIO) -> OSError | None:
    """Writes a line, or returns the error and redirects the stream to /dev/null."""
    try:
        print(text, file=sink, flush=True)
    except OSError as error:
        # Python must be able to flush the stream's buffer without another error.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sink.fileno())
        os.close(null)
        return error
    return None

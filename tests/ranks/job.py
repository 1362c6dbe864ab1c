"""Starts a job of ranks that run tests, follows the files of the ranks, and ends the job."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests import launch
from tests.ranks.worker import FOLDER

POLL_S = 0.1
START_S = 600
"""Limit for ranks that do not start, or do not reach the next test."""
GRACE_S = 30
"""Limit for the other ranks after one rank failed the test, because they may wait for that rank."""
STACKS_S = 5
"""Time to write stacks, in addition to the limit of a test."""
END_S = 300
"""Limit for the end of the job after its last test."""
LAST_CHARACTERS = 6000
FRAMEWORK = re.compile(r"/(_pytest|pluggy|pytest)/|<frozen runpy>").search
"""Matches lines of stacks that do not belong to a test."""


class _Rank:
    """The messages that one rank has written so far."""

    def __init__(self, path):
        self._path, self._read = path, 0
        self.reports, self.broken = {}, []
        # Test -> when it began, when this rank finished it, and when all ranks finished it.
        self.begun, self.left, self.ended = {}, {}, {}

    def update(self):
        if not self._path.exists():
            return
        with self._path.open() as stream:
            stream.seek(self._read)
            while (line := stream.readline()).endswith("\n"):
                self._read = stream.tell()
                self._take(json.loads(line))

    def _take(self, event):
        now = time.monotonic()
        if "report" in event:
            self.reports.setdefault(event["report"]["nodeid"], []).append(event["report"])
        elif "broken" in event:
            self.broken.append(event["broken"])
        else:
            ((what, nodeid),) = event.items()
            getattr(self, what)[nodeid] = now

    def has_failed(self, nodeid):
        """Returns whether this rank has finished the test with a failure."""
        found = self.reports.get(nodeid, ())
        return nodeid in self.left and any(report["outcome"] == "failed" for report in found)


class Job:
    """Ranks that run tests of one world in turn.

    Args:
      nodeids: Names of the tests, which must all require `world`.
      options: Options of pytest on each rank.
    """

    def __init__(self, world, nodeids, options):
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        start = {"processors": world.processors, "init": world.arguments_of_init}
        (self._folder / "start").write_text(json.dumps(start))
        (self._folder / "tests").write_text("\n".join(nodeids))
        self._ranks = [_Rank(self._folder / f"rank-{rank}") for rank in range(world.size)]
        program = [sys.executable, "-m", "pytest", f"@{self._folder / 'tests'}", *options]
        self._begun = time.monotonic()
        with (self._folder / "output").open("w") as output:
            self._process = launch.start(
                world.command(*program),
                # Temporary files of tests are in the job's folder, so that they are removed with
                # it.
                {
                    **dict(world.environment),
                    FOLDER: str(self._folder),
                    "TMPDIR": str(self._folder),
                    "PYTEST_ADDOPTS": "",
                },
                output=output,
                label=f"{world}: {len(nodeids)} tests",
            )

    @property
    def has_started(self):
        """Returns whether any rank has started its first test."""
        return any(rank.begun for rank in self._ranks)

    @property
    def has_ended(self):
        """Returns whether the process of the job has ended, with any exit code."""
        return self._process.poll() is not None

    def wait(self, nodeid, limit_s):
        """Waits for a test; returns each rank's reports, and the reason if the test did not end."""
        while True:
            over = self._process.poll() is not None
            for rank in self._ranks:
                rank.update()
            reports = [rank.reports.get(nodeid, []) for rank in self._ranks]
            waiting = [n for n, rank in enumerate(self._ranks) if nodeid not in rank.ended]
            if not waiting:
                return reports, None
            trouble = self._late(nodeid, limit_s)
            if over:
                trouble = f"the job ended {self._exit_code()} during this test on rank(s) {waiting}"
            if trouble:
                return reports, f"{trouble}\n{self._words()}"
            time.sleep(POLL_S)

    def _late(self, nodeid, limit_s):
        now = time.monotonic()
        begun = [rank.begun[nodeid] for rank in self._ranks if nodeid in rank.begun]
        if not begun:
            before = [at for rank in self._ranks for at in rank.ended.values()]
            late = now - max(before, default=self._begun) > START_S
            return f"no rank began the test within {START_S} s" if late else None
        failed = [rank.left[nodeid] for rank in self._ranks if rank.has_failed(nodeid)]
        waiting = [number for number, rank in enumerate(self._ranks) if nodeid not in rank.left]
        if failed and now - min(failed) > GRACE_S:
            return f"rank(s) {waiting} did not end within {GRACE_S} s of the failure"
        if now - max(begun) > limit_s + STACKS_S:
            return f"rank(s) {waiting} did not end within {limit_s} s; stacks are below"
        return None

    def _exit_code(self):
        return f"with exit code {self._process.poll()}"

    def _words(self):
        """Returns the stacks of ranks that hang, and the last output of the job."""
        parts = [
            f"--- rank {n} could not collect tests ---\n{text}"
            for n, rank in enumerate(self._ranks)
            for text in rank.broken
        ]
        for path in sorted(self._folder.glob("stacks-*")):
            stacks = [line for line in path.read_text().splitlines() if not FRAMEWORK(line)]
            if stacks:
                parts.append(
                    f"--- stacks of {path.name.replace('stacks-', 'rank ')} ---\n"
                    + "\n".join(stacks)
                )
        output = (self._folder / "output").read_text(errors="replace")[-LAST_CHARACTERS:]
        return "\n".join([*parts, "--- last lines of the job ---", output])

    def end(self):
        """Waits for the end of the job after its last test; returns its error, or `None`."""
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            trouble = f"the job did not end within {END_S} s of its last test"
        else:
            trouble = f"the job ended {self._exit_code()}" if self._process.returncode else None
        words = trouble and f"{trouble}\n{self._words()}"
        self.kill()
        return words

    def kill(self):
        """Kills the job if it still runs, and removes its files."""
        if self._process.poll() is None:
            launch.kill(self._process)
        launch.finish(self._process)
        shutil.rmtree(self._folder, ignore_errors=True)

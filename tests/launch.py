"""Starts real ranks under horovodrun or in the lab, with a time limit, and leaves none behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def horovodrun(size, *command, environment=None, hosts=None, timeout_s=300, background=False):
    """Runs `python command` on `size` ranks.

    Returns:
      The finished process with stdout and stderr together in `stdout`; with `background` the running one.
    """
    launcher = [
        str(Path(sys.executable).with_name("horovodrun")),
        "--gloo",
        "-np",
        str(size),
        *(["-H", hosts] if hosts else []),
        sys.executable,
        *map(str, command),
    ]
    process = _start(launcher, {"HOROVOD_TIMELINE": "DYNAMIC", **(environment or {})})
    return process if background else finish(process, timeout_s)


def lab(options, *command, environment=None, timeout_s=120, background=False):
    """Runs `command` in the lab; `options` is a string. Returns as `horovodrun` does."""
    launcher = [sys.executable, "-m", "tfposeidon", "lab", *options.split(), "--", *map(str, command)]
    process = _start(launcher, environment or {})
    return process if background else finish(process, timeout_s)


def _start(command, environment):
    variables = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **variables, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process, timeout_s):
    """Waits for a launched job; kills it with all its ranks when its time is up."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        kill(process)
        output, _ = process.communicate()
        raise AssertionError(f"the job did not end within {timeout_s} s:\n{output[-4000:]}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def kill(process):
    """Ends the launcher and the ranks, which are in sessions of their own."""
    for pid in descendants(process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def descendants(pid):
    """`pid` and every process below it, deepest first."""
    below = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            below += descendants(int(entry.parent.name))
    return [*below, pid]

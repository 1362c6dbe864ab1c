"""Starts ranks under horovodrun or in the lab, with a time limit, and ends all their processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 1800
"""Time limit in seconds for jobs that hang: over ten times the longest job on two idle cores."""

WITH_SKLEARN = {"PYTHONPATH": str(ROOT)}
"""Variables of jobs that use scikit-learn's digits. `tests/without` hides from other jobs the
packages that TensorFlow and Keras import only because they are installed."""

durations = []
"""Label and seconds of every finished job."""
_running = {}


def ahead(job):
    """Marks a test whose job may run in parallel with the fast tests.

    Such a job mostly waits, and measures nothing.

    Args:
      job: Function of the test's parameters, which is called on a thread when the session starts.
        The fixture `outcome` returns its result to the test.
    """
    return pytest.mark.ahead.with_args(job)


def horovodrun(size, *command, environment=None, hosts=None, timeout_s=LIMIT_S, background=False):
    """Runs `python command` on `size` ranks.

    Returns:
      The finished process with stdout and stderr together in `stdout`; with `background`, the
      running process.
    """
    options = ["-H", hosts] if hosts else []
    launcher = horovodrun_command(size, *options, sys.executable, *map(str, command))
    process = start(launcher, environment)
    return process if background else finish(process, timeout_s)


def lab(options, *command, environment=None, timeout_s=LIMIT_S, background=False):
    """Runs `command` in the lab with a string of options; returns the same as `horovodrun`."""
    process = start(lab_command(options, *map(str, command)), environment)
    return process if background else finish(process, timeout_s)


def horovodrun_command(size, *rest):
    """Returns the command that starts `size` ranks; `rest` contains options and the program."""
    launcher = [sys.executable, str(ROOT / "tests" / "horovodrun.py")]
    return [*launcher, "--gloo", "-np", str(size), *rest]


def lab_command(options, *program):
    """Returns the command that starts a program on each rank of the lab with these options."""
    return [sys.executable, "-m", "tfposeidon", "lab", *options.split(), "--", *program]


def start(command, environment=None, output=subprocess.PIPE, label=None, cwd=ROOT):
    """Starts a command in the project's folder; `finish` waits for it.

    An environment variable with the value `None` is removed.
    """
    path = os.pathsep.join([str(ROOT / "tests" / "without"), str(ROOT)])
    variables = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": path, "COLUMNS": "200"}
    # Bytecode is cached, because compiling the project's modules takes a second per process.
    variables["PYTHONDONTWRITEBYTECODE"] = ""
    # With Horovod's default of 1 ms, each waiting rank would use a tenth of a core for polling.
    variables["HOROVOD_CYCLE_TIME"] = "5"
    merged = {**os.environ, **variables, **(environment or {})}
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={name: value for name, value in merged.items() if value is not None},
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    _running[process] = label or _label(command), time.monotonic()
    return process


def _label(command):
    """Returns the command without its folders and without Python."""
    words = [word.rpartition("/")[2] for word in map(str, command)]
    return " ".join(word for word in words if not word.startswith("python"))[:110]


def finish(process, timeout_s=LIMIT_S):
    """Waits for a launched job, and kills all its ranks if it exceeds the time limit."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        kill(process)
        output, _ = process.communicate()
        raise AssertionError(
            f"the job did not end within {timeout_s} s:\n{output[-4000:]}"
        ) from None
    finally:
        label, begin = _running.pop(process, (_label(process.args), time.monotonic()))
        durations.append((label, time.monotonic() - begin))
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def kill_all():
    """Ends the jobs that `finish` has not waited for, such as those of an interrupted session."""
    for process in list(_running):
        if process.poll() is None:
            kill(process)


def kill(process):
    """Ends the launcher and the ranks, which are in separate sessions."""
    for pid in descendants(process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def descendants(pid):
    """Returns `pid` and all its descendants, deepest first."""
    below = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            below += descendants(int(entry.parent.name))
    return [*below, pid]

"""Keeps TensorFlow's start-up messages out of our commands and of the ranks that they start."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping

LEVEL = "TF_CPP_MIN_LOG_LEVEL"
DEFAULTS = {LEVEL: "2"}
"""Environment variables that silence TensorFlow, for those which the user has not set."""

# TensorFlow logs these while it is loaded, before it reads LEVEL. What would turn the second off is
# TF_ENABLE_ONEDNN_OPTS=0, but it turns oneDNN off too, and with it changes speed and rounding.
STARTUP_MESSAGE = re.compile(
    "All log messages before absl::InitializeLog|oneDNN custom operations are on|"
    "This TensorFlow binary is optimized to use available CPU instructions|"
    "To enable the following instructions: "
)


LONGEST_WAIT_S = 5.0
FILTER = """
import re, sys
for line in sys.stdin.buffer:
    if not re.search(sys.argv[1], line.decode(errors="replace")):
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
"""
"""Program that passes on its input but for lines that match its argument."""


def is_startup_message(line: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether a line is to be left out, as TensorFlow logs it whenever it is loaded.

    >>> is_startup_message("I0000 port.cc:153] oneDNN custom operations are on. You may", DEFAULTS)
    True
    >>> is_startup_message("E0000 no such device", DEFAULTS)
    False

    Args:
      line: Text that a process wrote to standard error.
      environment: Variables of that process; with `TF_CPP_MIN_LOG_LEVEL=0` nothing is left out.
    """
    return environment.get(LEVEL, DEFAULTS[LEVEL]) != "0" and bool(STARTUP_MESSAGE.search(line))


def import_tensorflow() -> None:
    """Imports TensorFlow without its start-up messages; everything else it writes is passed on.

    Raises:
      ImportError: If TensorFlow is missing or cannot be loaded.
    """
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    with _startup_messages_left_out():
        importlib.import_module("tensorflow")


@contextlib.contextmanager
def _startup_messages_left_out() -> Iterator[None]:
    """Sends standard error, that of native code too, through a process that leaves the noise out.

    It is a process and not a thread, so that the last words of native code that aborts (TensorFlow
    on a CPU without AVX) still arrive.
    """
    if os.environ[LEVEL] == "0":
        yield
        return
    # In a session of its own an interrupt from the keyboard does not reach it: it ends with us.
    command = [sys.executable, "-I", "-S", "-c", FILTER, STARTUP_MESSAGE.pattern]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    # The descriptor is redirected, as native code does not write through `sys.stderr`.
    sys.stderr.flush()
    descriptor = os.dup(2)
    os.dup2(process.stdin.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(descriptor, 2)
        os.close(descriptor)
        process.stdin.close()
        # It ends once it has passed on everything; something started in the meantime may have
        # inherited the pipe, and nobody waits for that.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LONGEST_WAIT_S)

"""Suppresses TensorFlow's start-up messages in commands and in the ranks that they start."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping

LEVEL = "TF_CPP_MIN_LOG_LEVEL"
DEFAULTS = {LEVEL: "2"}
"""Environment variables that silence TensorFlow, unless the user has set them."""

# TensorFlow logs these messages when it is loaded, before it reads LEVEL. TF_ENABLE_ONEDNN_OPTS=0
# would disable the second message, but also oneDNN, which affects speed and rounding.
STARTUP_MESSAGE = re.compile(
    "All log messages before absl::InitializeLog|oneDNN custom operations are on|"
    "This TensorFlow binary is optimized to use available CPU instructions|"
    "To enable the following instructions: "
)
LONGEST_WAIT_S = 5.0


def is_startup_message(line: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether to suppress a line: a start-up message, unless the log level is 0."""
    return environment.get(LEVEL) != "0" and bool(STARTUP_MESSAGE.search(line))


def import_tensorflow() -> None:
    """Imports TensorFlow without its start-up messages, and forwards all other output."""
    os.environ.setdefault(LEVEL, DEFAULTS[LEVEL])
    filters = os.environ[LEVEL] != "0" and shutil.which("grep") is not None
    with _without_startup_messages() if filters else contextlib.nullcontext():
        importlib.import_module("tensorflow")


@contextlib.contextmanager
def _without_startup_messages() -> Iterator[None]:
    """Passes standard error, including the output of native code, through a filter process."""
    # Use a process, not a thread, so that the last output of native code that aborts (TensorFlow on
    # a CPU without AVX) still arrives. Start a new session, so that a keyboard interrupt does not
    # end the filter before this process.
    command = ["grep", "--text", "--line-buffered", "-vE", STARTUP_MESSAGE.pattern]
    sys.stderr.flush()
    descriptor = os.dup(2)
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=descriptor, start_new_session=True
    )
    assert process.stdin is not None
    # Redirect the descriptor, because native code does not write through `sys.stderr`.
    os.dup2(process.stdin.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(descriptor, 2)
        os.close(descriptor)
        process.stdin.close()
        # The filter exits after it has copied everything. Limit the wait, because a process that
        # was started in the meantime may have inherited the pipe and hold it open.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LONGEST_WAIT_S)

"""Keeps TensorFlow's start-up messages out of our commands and of the ranks that they start."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import tempfile
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


def is_startup_message(line: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Tells whether a line is one that TensorFlow logs as it is loaded, and is to be left out.

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
    with _standard_error_held():
        importlib.import_module("tensorflow")


@contextlib.contextmanager
def _standard_error_held() -> Iterator[None]:
    """Holds standard error back, that of native code too, and then passes on what is no noise."""
    # The descriptor is redirected, as native code does not write through `sys.stderr`.
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held:
        descriptor = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(descriptor, 2)
            os.close(descriptor)
            held.seek(0)
            kept = [line for line in held if not is_startup_message(line.decode(errors="replace"))]
            os.write(2, b"".join(kept))

"""Checks of errors, of log lines and of the peak memory."""

import logging
import re


class Raises:
    """Like `pytest.raises`, but for tests on ranks: checks class and text of an error."""

    def __init__(self, kind, pattern):
        self.kind, self.pattern = kind, pattern

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        assert error is not None, f"nothing was raised; expected {self.pattern!r}"
        assert issubclass(kind, self.kind), f"expected {self.kind.__name__}, got {error!r}"
        assert re.search(self.pattern, str(error), re.DOTALL), f"{self.pattern!r} is not in {error}"
        return True


class LogLines(logging.Handler):
    """Records the log lines of the project within a `with` block."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("tfposeidon").addHandler(self)
        return self.lines

    def __exit__(self, *_):
        logging.getLogger("tfposeidon").removeHandler(self)


def reset_peak():
    """Resets the peak memory of this process in the kernel."""
    with open("/proc/self/clear_refs", "w") as stream:
        stream.write("5")

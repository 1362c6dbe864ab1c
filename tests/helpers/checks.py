"""What tests look at: errors, lines of the log, and the peak of memory."""

import logging
import re


class Raises:
    """As pytest's, on ranks: the error, and a pattern in its text."""

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
    """What the project's log says within a `with` block."""

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
    """Lets the kernel count this process's peak of memory anew."""
    with open("/proc/self/clear_refs", "w") as stream:
        stream.write("5")

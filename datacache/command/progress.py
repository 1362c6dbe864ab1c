"""How far a command has come."""

from __future__ import annotations

import sys
import time

ON_A_TERMINAL_S, IN_A_LOG_S = 0.2, 30.0
WIDTH = 30


class Progress:
    """A bar on a terminal, a line now and then in a log.

    Args:
      total: How many there are to do.
      what: What they are, for people.
    """

    def __init__(self, total: int, what: str) -> None:
        self._total, self._what, self._done = total, what, 0
        self._terminal = sys.stderr.isatty()
        self._begin = self._said = time.monotonic()

    def add(self, count: int) -> None:
        """So many more are done."""
        self._done += count
        now = time.monotonic()
        if now - self._said >= (ON_A_TERMINAL_S if self._terminal else IN_A_LOG_S):
            self._said = now
            self._write(f"\r{self._line()}\x1b[K" if self._terminal else f"{self._line()}\n")

    def close(self) -> None:
        """Takes the bar away."""
        if self._terminal:
            self._write("\r\x1b[K")

    def _line(self) -> str:
        share = self._done / self._total
        rate = self._done / (time.monotonic() - self._begin)
        bar = "█" * int(WIDTH * share)
        left_s = (self._total - self._done) / rate if rate else 0.0
        return f"{bar:░<{WIDTH}} {share:4.0%}  {self._done} of {self._total} {self._what}, {left_s:.0f} s left"

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

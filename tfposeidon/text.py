"""Tables, sparklines and progress bars on terminals and in logs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

LEVELS = "▁▂▃▄▅▆▇█"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns lines with columns as wide as their widest cell; rows have equal lengths.

    >>> table([("scheme", "ms"), ("hitopk", "239")])
    ['scheme  ms', 'hitopk  239']
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def sparkline(values: Sequence[float]) -> str:
    """Returns one bar per value from 0 to 1; larger values are drawn as 1.

    >>> sparkline([0, 0.5, 1])
    '▁▅█'
    """
    return "".join(LEVELS[min(len(LEVELS) - 1, int(value * len(LEVELS)))] for value in values)


class ProgressBar:
    """A progress bar on a terminal, and occasional lines in a log.

    >>> progress = ProgressBar(1000, "samples", stream=sys.stdout)
    >>> progress.add(256)
    >>> progress.close()
    """

    WIDTH = 30
    TERMINAL_INTERVAL_S = 0.2
    LOG_INTERVAL_S = 30.0

    def __init__(
        self,
        total: int,
        unit: str,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._unit, self._done = total, unit, 0
        self._stream, self._clock = stream or sys.stderr, clock
        # A log would contain every state of the bar, with control characters between them.
        self._on_terminal = self._stream.isatty()
        self._begin_s = self._written_s = clock()

    def add(self, count: int) -> None:
        """Counts items as done, and writes if the interval since the last output has passed."""
        self._done += count
        now_s = self._clock()
        interval_s = self.TERMINAL_INTERVAL_S if self._on_terminal else self.LOG_INTERVAL_S
        if now_s - self._written_s >= interval_s:
            self._written_s = now_s
            line = self._line(now_s - self._begin_s)
            self._write(f"\r{line}\x1b[K" if self._on_terminal else f"{line}\n")

    def close(self) -> None:
        """Removes the bar from a terminal."""
        if self._on_terminal:
            self._write("\r\x1b[K")

    def _line(self, elapsed_s: float) -> str:
        share = self._done / self._total
        left_s = elapsed_s * (self._total - self._done) / self._done if self._done else 0.0
        bar = "█" * int(self.WIDTH * share)
        return (
            f"{bar:░<{self.WIDTH}} {share:4.0%}  {self._done} of {self._total} {self._unit}, "
            f"{left_s:.0f} s left"
        )

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

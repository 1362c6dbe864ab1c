"""Parses and formats sizes, rates and durations; draws tables and progress bars.

As in Linux's `tc`, prefixes may be in upper or lower case. k, M, G and T are powers of ten; Ki, Mi,
Gi and Ti are powers of two. "1.5gb" is 1.5e9 bytes, for example, and "1.5GiB" is 1.5 x 2^30 bytes.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence

PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
PREFIXES |= {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
SIZES = {"": 1.0} | {f"{prefix}b": factor for prefix, factor in PREFIXES.items()}
# As in `tc`, "bps" means bytes per second.
RATES = {"": 1.0} | {f"{prefix}bit": factor for prefix, factor in PREFIXES.items()}
RATES |= {f"{prefix}bps": 8 * factor for prefix, factor in PREFIXES.items()}
SECONDS = {"": 1.0, "m": 1e-3, "u": 1e-6}
DURATIONS = {f"{p}{unit}": SECONDS[p] for p in SECONDS for unit in ("s", "sec", "secs")}
SLOWEST_RATE, FASTEST_RATE = 8e3, 1e12
NUMBER_AND_UNIT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*|%)", re.IGNORECASE)


def parse_size(text: str) -> float:
    """Parses a size and returns it in bytes; a number without a unit is in bytes."""
    examples = "400MB, 1.5GB (powers of ten) or 1.5GiB (powers of two)"
    return _parse(text, SIZES, "A size", examples)


def parse_rate(text: str) -> float:
    """Parses a rate and returns it in bits per second; `tc` supports 8 kbit/s to 1 Tbit/s."""
    examples = "200mbit, 1gbit or 25gbit (powers of ten; mbps are megabytes per second, as in tc)"
    bits_per_s = _parse(text, RATES, "A rate", examples)
    if not SLOWEST_RATE <= bits_per_s <= FASTEST_RATE:
        raise ValueError(f"A rate must be between 8kbit and 1tbit. Received: {text!r}")
    return bits_per_s


def parse_duration(text: str) -> float:
    """Parses a duration and returns it in seconds."""
    return _parse(text, DURATIONS, "A duration", "1ms, 500us or 2s")


def parse_share(text: str) -> float:
    """Parses a percentage and returns it as a fraction, at most 1."""
    share = _parse(text, {"%": 0.01}, "A percentage", "0.1%")
    if share > 1:
        raise ValueError(f"A percentage must be at most 100%. Received: {text!r}")
    return share


def readable_size(size_bytes: float) -> str:
    """Formats a size in bytes, in powers of ten."""
    value, prefix = _scaled(size_bytes)
    return f"{value:.{2 if prefix else 0}f} {prefix}B"


def readable_rate(bits_per_s: float | None) -> str:
    """Formats a rate in bits per second; `None` means no limit.

    >>> readable_rate(2e8), readable_rate(None)
    ('200 Mb/s', 'unshaped')
    """
    if bits_per_s is None:
        return "unshaped"
    value, prefix = _scaled(bits_per_s)
    return f"{value:g} {prefix}b/s"


def _scaled(value: float) -> tuple[float, str]:
    """Returns a value scaled to the largest prefix, up to G, that it reaches, and the prefix."""
    for prefix, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return value / factor, prefix
    return value, ""


def _parse(text: str, units: Mapping[str, float], what: str, examples: str) -> float:
    found = NUMBER_AND_UNIT.fullmatch(text.strip())
    if not found or found[2].lower() not in units:
        raise ValueError(
            f"{what} must be a number with a unit, such as {examples}. Received: {text!r}"
        )
    return float(found[1]) * units[found[2].lower()]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Formats rows of equal lengths as lines, with columns as wide as their widest cell.

    >>> table([("scheme", "ms"), ("hitopk", "239")])
    ['scheme  ms', 'hitopk  239']
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


class ProgressBar:
    """Progress bar on a terminal, or a line every 30 s in a log."""

    WIDTH = 30
    TERMINAL_INTERVAL_S = 0.2
    LOG_INTERVAL_S = 30.0

    def __init__(self, total: int, unit: str) -> None:
        self._total, self._unit, self._done = total, unit, 0
        # A log gets fewer lines, and no control characters.
        self._on_terminal = sys.stderr.isatty()
        self._begin_s = self._written_s = time.monotonic()

    def add(self, count: int) -> None:
        """Counts items as done, and shows the progress if the last output is old enough."""
        self._done += count
        now_s = time.monotonic()
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
        sys.stderr.write(text)
        sys.stderr.flush()

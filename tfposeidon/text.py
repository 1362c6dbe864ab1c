"""Figures and tables as people read them."""

from __future__ import annotations

from collections.abc import Sequence


def readable(size_bytes: float) -> str:
    """Bytes, in powers of ten.

    >>> readable(1.5e6)
    '1.50 MB'
    """
    for unit, power in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= power:
            return f"{size_bytes / power:.2f} {unit}"
    return f"{size_bytes:.0f} B"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns as wide as their widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def bars(values: Sequence[float]) -> str:
    """Values from 0 to 1 as a line of bars.

    >>> bars([0, 0.5, 1])
    '▁▅█'
    """
    levels = "▁▂▃▄▅▆▇█"
    return "".join(levels[min(len(levels) - 1, int(value * len(levels)))] for value in values)

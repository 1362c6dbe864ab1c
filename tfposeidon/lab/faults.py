"""Faults on request: what happens to which rank or node, and when."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that happens to a rank or a node while the job runs.

    Args:
      kind: "kill", "stop" and "continue" a rank, or "cut" a node's link.
      target: The rank or the node.
      at_s: Seconds after the ranks were started.
    """

    kind: str
    target: int
    at_s: float

    def __str__(self) -> str:
        what = f"node {self.target}'s link" if self.kind == "cut" else f"rank {self.target}"
        return f"{self.kind} {what} after {self.at_s:g} s"


def kill(text: str) -> list[Fault]:
    """Reads `RANK@SECONDS`."""
    rank, at_s = _numbers(r"(\d+)@([\d.]+)", text, "RANK@SECONDS, like 1@30")
    return [Fault(kind="kill", target=int(rank), at_s=at_s)]


def stop(text: str) -> list[Fault]:
    """Reads `RANK@SECONDS+SECONDS`: when it is stopped, and for how long.

    >>> [str(fault) for fault in stop("1@30+5")]
    ['stop rank 1 after 30 s', 'continue rank 1 after 35 s']
    """
    rank, at_s, for_s = _numbers(
        r"(\d+)@([\d.]+)\+([\d.]+)", text, "RANK@SECONDS+SECONDS, like 1@30+5"
    )
    return [
        Fault(kind="stop", target=int(rank), at_s=at_s),
        Fault(kind="continue", target=int(rank), at_s=at_s + for_s),
    ]


def cut(text: str) -> list[Fault]:
    """Reads `NODE@SECONDS`."""
    node, at_s = _numbers(r"(\d+)@([\d.]+)", text, "NODE@SECONDS, like 1@30")
    return [Fault(kind="cut", target=int(node), at_s=at_s)]


def _numbers(pattern: str, text: str, form: str) -> tuple[float, ...]:
    found = re.fullmatch(pattern, text.strip())
    try:
        return tuple(float(part) for part in found.groups())  # type: ignore[union-attr]
    except (AttributeError, ValueError):
        raise ValueError(f"A fault reads {form}. Received: {text!r}") from None

"""Faults to inject into a job: killed or stopped ranks, and cut links."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Fault of a rank or a node, `at_s` seconds after the start of the ranks.

    >>> str(Fault(kind="cut", target=1, at_s=30.0))
    "cut node 1's link after 30 s"

    `kind` is "kill", "stop" or "continue" for a rank, and "cut" for a node's link.
    """

    kind: str
    target: int
    at_s: float

    def __str__(self) -> str:
        what = f"node {self.target}'s link" if self.kind == "cut" else f"rank {self.target}"
        return f"{self.kind} {what} after {self.at_s:g} s"


def kill(text: str) -> list[Fault]:
    """Parses the value of `--kill`, `RANK@SECONDS`."""
    rank, at_s = _numbers(r"(\d+)@([\d.]+)", text, "RANK@SECONDS, such as 1@30")
    return [Fault(kind="kill", target=int(rank), at_s=at_s)]


def stop(text: str) -> list[Fault]:
    """Parses the value of `--stop`, `RANK@SECONDS+SECONDS`, into its start and its end.

    >>> [str(fault) for fault in stop("1@30+5")]
    ['stop rank 1 after 30 s', 'continue rank 1 after 35 s']
    """
    rank, at_s, for_s = _numbers(
        r"(\d+)@([\d.]+)\+([\d.]+)", text, "RANK@SECONDS+SECONDS, such as 1@30+5"
    )
    return [
        Fault(kind="stop", target=int(rank), at_s=at_s),
        Fault(kind="continue", target=int(rank), at_s=at_s + for_s),
    ]


def cut(text: str) -> list[Fault]:
    """Parses the value of `--cut`, `NODE@SECONDS`."""
    node, at_s = _numbers(r"(\d+)@([\d.]+)", text, "NODE@SECONDS, such as 1@30")
    return [Fault(kind="cut", target=int(node), at_s=at_s)]


def _numbers(pattern: str, text: str, form: str) -> tuple[float, ...]:
    found = re.fullmatch(pattern, text.strip())
    try:
        return tuple(float(part) for part in found.groups())  # type: ignore[union-attr]
    except (AttributeError, ValueError):
        # The pattern did not match, or a number is malformed, such as "1.2.3".
        raise ValueError(f"A fault must have the form {form}. Received: {text!r}") from None

"""Faults on request: ranks are killed or stopped, links are cut."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Fault of a rank or a node while the job runs.

    >>> str(Fault(kind="cut", target=1, at_s=30.0))
    "cut node 1's link after 30 s"

    Args:
      kind: Kind of fault: "kill", "stop" or "continue" for a rank, "cut" for a node's link.
      target: Index of the rank or the node.
      at_s: Seconds after the start of the ranks.
    """

    kind: str
    target: int
    at_s: float

    def __str__(self) -> str:
        what = f"node {self.target}'s link" if self.kind == "cut" else f"rank {self.target}"
        return f"{self.kind} {what} after {self.at_s:g} s"


def kill(text: str) -> list[Fault]:
    """Reads what `--kill` asks for.

    Args:
      text: Value of the option, `RANK@SECONDS`.

    Returns:
      One fault, in a list.

    Raises:
      ValueError: If `text` has another form.
    """
    rank, at_s = _numbers(r"(\d+)@([\d.]+)", text, "RANK@SECONDS, like 1@30")
    return [Fault(kind="kill", target=int(rank), at_s=at_s)]


def stop(text: str) -> list[Fault]:
    """Reads what `--stop` asks for.

    >>> [str(fault) for fault in stop("1@30+5")]
    ['stop rank 1 after 30 s', 'continue rank 1 after 35 s']

    Args:
      text: Value of the option, `RANK@SECONDS+SECONDS`: when the rank is stopped, and for how long.

    Returns:
      Two faults: the stop, and the end of it.

    Raises:
      ValueError: If `text` has another form.
    """
    rank, at_s, for_s = _numbers(
        r"(\d+)@([\d.]+)\+([\d.]+)", text, "RANK@SECONDS+SECONDS, like 1@30+5"
    )
    return [
        Fault(kind="stop", target=int(rank), at_s=at_s),
        Fault(kind="continue", target=int(rank), at_s=at_s + for_s),
    ]


def cut(text: str) -> list[Fault]:
    """Reads what `--cut` asks for.

    Args:
      text: Value of the option, `NODE@SECONDS`.

    Returns:
      One fault, in a list.

    Raises:
      ValueError: If `text` has another form.
    """
    node, at_s = _numbers(r"(\d+)@([\d.]+)", text, "NODE@SECONDS, like 1@30")
    return [Fault(kind="cut", target=int(node), at_s=at_s)]


def _numbers(pattern: str, text: str, form: str) -> tuple[float, ...]:
    found = re.fullmatch(pattern, text.strip())
    try:
        return tuple(float(part) for part in found.groups())  # type: ignore[union-attr]
    except (AttributeError, ValueError):
        # No match, or a number such as "1.2.3".
        raise ValueError(f"A fault reads {form}. Received: {text!r}") from None

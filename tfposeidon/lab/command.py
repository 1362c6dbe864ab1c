"""Runs an unchanged training script on emulated nodes, with links of a chosen speed between them.

  python -m tfposeidon lab --nodes 2 --per-node 2 --inter 200mbit -- python train.py

Nodes are network namespaces on this machine, joined by a switch. Ranks get the environment
variables of horovodrun. At the end, a table shows the traffic over each node's link, read from its
queues. The exit status is that of the job. Needs Linux with iproute2, as root or with user
namespaces.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfposeidon.lab import sandbox
from tfposeidon.lab.cluster import Cluster, Fault
from tfposeidon.memory import available_memory
from tfposeidon.peers.run import read_command
from tfposeidon.text import parse_duration, parse_rate, parse_share, parse_size, readable_size

RANK_BYTES = 4e8
"""Memory that TensorFlow alone takes in each rank."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Checked request of the command line.

    `show` is the ranks whose output is shown, `None` for all. `report` is the path of the JSON
    report, `None` for none.
    """

    cluster: Cluster
    command: list[str]
    faults: list[Fault]
    show: set[int] | None
    report: Path | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `python -m tfposeidon lab`."""
    rate, time = _type(parse_rate), _type(parse_duration)
    # `inside` has the same arguments, because it parses the same command line again.
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--nodes", type=int, required=True, metavar="M", help="number of nodes")
    cluster.add_argument(
        "--per-node", type=int, default=1, metavar="N", help="ranks on each node (default: 1)"
    )
    cluster.add_argument(
        "--inter",
        type=rate,
        metavar="RATE",
        help="rate of each node's link in each direction, such as 200mbit (default: not limited)",
    )
    cluster.add_argument(
        "--intra",
        type=rate,
        metavar="RATE",
        help="rate that the ranks of a node share, both directions together, such as 10gbit "
        "(default: not limited)",
    )
    cluster.add_argument(
        "--rtt",
        type=time,
        default=0.0,
        metavar="TIME",
        help="time added to each round trip, such as 1ms (default: 0)",
    )
    cluster.add_argument(
        "--jitter",
        type=time,
        default=0.0,
        metavar="TIME",
        help="variation of the delay one way, at most half of --rtt, such as 100us (default: 0)",
    )
    cluster.add_argument(
        "--loss",
        type=_type(_loss),
        default=0.0,
        metavar="SHARE",
        help="share of lost packets, such as 0.1%% (default: 0)",
    )
    cluster.add_argument(
        "--slow",
        type=_type(_slow),
        action="append",
        default=[],
        metavar="NODE=RATE",
        help="rate of the link of one node, such as 1=50mbit; may be repeated",
    )
    cluster.add_argument(
        "--flow",
        type=rate,
        metavar="RATE",
        help="limit of each TCP connection between nodes, such as 5gbit (default: none)",
    )
    trouble = parser.add_argument_group(
        "faults (may be repeated; seconds count from the start of the ranks)"
    )
    for name, reader, syntax, help_text in (
        ("--kill", _kill, "RANK@SECONDS", "kill a rank"),
        ("--stop", _stop, "RANK@SECONDS+SECONDS", "stop a rank (SIGSTOP) for some time"),
        ("--cut", _cut, "NODE@SECONDS", "cut a node's link permanently"),
    ):
        trouble.add_argument(
            name,
            dest="faults",
            type=_type(reader),
            action="extend",
            default=[],
            metavar=syntax,
            help=help_text,
        )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--show",
        choices=("all", "first"),
        default="all",
        help="ranks whose output is shown: all, or rank 0 only (default: all)",
    )
    output.add_argument("--report", type=Path, metavar="FILE", help="also write the report as JSON")
    output.add_argument(
        "--rank-memory",
        type=_type(parse_size),
        default=RANK_BYTES,
        metavar="SIZE",
        help="memory that each rank requires, such as 1.5GB (default: 400MB)",
    )
    parser.add_argument(
        "command_line", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="command of each rank"
    )


def main(options: argparse.Namespace) -> int:
    """Runs the command; returns the job's exit status, or 2 if nothing was started."""
    try:
        # Check everything before anything is created. `inside` parses `options.arguments` again.
        request = read_request(options)
        _check_report(request.report)
        check_machine(request.cluster, options.rank_memory)
        return sandbox.run("tfposeidon.lab.inside", options.arguments)
    except (ValueError, sandbox.UnavailableError) as error:
        print(f"tfposeidon lab: {error}", file=sys.stderr)
        return 2


def read_request(options: argparse.Namespace) -> Request:
    """Checks the options and returns the request."""
    cluster = Cluster(
        nodes=options.nodes,
        per_node=options.per_node,
        inter=options.inter,
        intra=options.intra,
        rtt=options.rtt,
        jitter=options.jitter,
        loss=options.loss,
        slow=tuple(options.slow),
        flow=options.flow,
    )
    for fault in options.faults:
        cluster.check(f"--{fault.kind}", "node" if fault.kind == "cut" else "rank", fault.target)
    command = read_command(options.command_line)
    show = None if options.show == "all" else {0}
    return Request(
        cluster=cluster, command=command, faults=options.faults, show=show, report=options.report
    )


def check_machine(cluster: Cluster, rank_bytes: float) -> None:
    """Raises `ValueError` if this machine lacks Horovod, or memory for all ranks."""
    if not importlib.util.find_spec("horovod"):
        raise ValueError(
            "The lab requires Horovod, whose rendezvous server connects the ranks. Run: "
            "python -m tfposeidon install"
        )
    # The kernel would kill ranks that do not fit, one by one and minutes later.
    free_bytes = available_memory()
    if cluster.size * rank_bytes > free_bytes:
        raise ValueError(
            f"All ranks must fit into memory. Received: {cluster.size} ranks of "
            f"{readable_size(rank_bytes)} (by default, the memory that TensorFlow alone uses), "
            f"{readable_size(free_bytes)} free. "
            "Start fewer ranks, or lower --rank-memory if they need less."
        )


def _check_report(path: Path | None) -> None:
    if path and (path.is_dir() or not os.access(path.resolve().parent, os.W_OK)):
        raise ValueError(f"`--report` must name a file in a writable directory. Received: {path}")


def _kill(text: str) -> list[Fault]:
    """Parses the value of `--kill`, `RANK@SECONDS`."""
    rank, at_s = _numbers(r"(\d+)@([\d.]+)", text, "RANK@SECONDS, such as 1@30")
    return [Fault(kind="kill", target=int(rank), at_s=at_s)]


def _stop(text: str) -> list[Fault]:
    """Parses the value of `--stop`, `RANK@SECONDS+SECONDS`, into its start and its end.

    >>> [str(fault) for fault in _stop("1@30+5")]
    ['stop rank 1 after 30 s', 'continue rank 1 after 35 s']
    """
    rank, at_s, for_s = _numbers(
        r"(\d+)@([\d.]+)\+([\d.]+)", text, "RANK@SECONDS+SECONDS, such as 1@30+5"
    )
    return [
        Fault(kind="stop", target=int(rank), at_s=at_s),
        Fault(kind="continue", target=int(rank), at_s=at_s + for_s),
    ]


def _cut(text: str) -> list[Fault]:
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


def _slow(text: str) -> tuple[int, float]:
    node, equals, rate = text.partition("=")
    if not equals or not node.isdigit():
        raise ValueError(
            f"`--slow` must have the form NODE=RATE, such as 1=50mbit. Received: {text!r}"
        )
    return int(node), parse_rate(rate)


def _loss(text: str) -> float:
    share = parse_share(text)
    if share == 1:
        raise ValueError(
            f"`--loss` must be below 100%. Received: {text!r}. At 100% no packet arrives."
        )
    return share


def _type(reader: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns a `type` for argparse that shows the error message of `reader`."""

    def read(text: str) -> Any:
        try:
            return reader(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read

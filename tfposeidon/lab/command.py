"""Runs an unchanged training script on emulated nodes, with links of a chosen speed between them.

  python -m tfposeidon lab --nodes 2 --per-node 2 --inter 200mbit -- python train.py

Nodes are network namespaces on this machine, joined by a switch. Ranks get the environment
variables that horovodrun sets. At the end, a table shows the traffic over each node's link, as
counted by its queues. The exit status is the job's. The lab requires Linux with iproute2, as root
or with user namespaces.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tfposeidon import checks
from tfposeidon.memory import available_memory
from tfposeidon.peers.run import read_command
from tfposeidon.text import (
    parse_duration,
    parse_rate,
    parse_share,
    parse_size,
    readable_rate,
    readable_size,
)

MOST_NODES = 250
"""Largest number of nodes, with addresses 10.99.0.1 to 10.99.0.250; the switch has 10.99.0.254."""
RANK_MEMORY = "400MB"
"""Memory that TensorFlow alone uses in each rank."""
TOOLS = {
    **dict.fromkeys(("ip", "tc"), "iproute2"),
    "hostname": "hostname",
    **dict.fromkeys(("unshare", "nsenter", "setpriv", "mount"), "util-linux"),
}
"""Programs that the lab needs, and their packages."""
NAMESPACES = ("unshare", "--fork", "--kill-child", "--pid", "--mount-proc", "--mount", "--net")
AS_USER = ("--user", "--map-root-user")
# This command tests the kernel features that a lab needs, before anything is started.
PROBE = """ip link add name switch type bridge && ip link add name a type veth peer name b &&
tc qdisc add dev a root tbf rate 1mbit burst 3200 limit 100000"""
ENDED = 128 + signal.SIGTERM
"""Exit status of a lab that the user interrupted."""


class UnavailableError(Exception):
    """Raised if this machine cannot run a lab; the message names the missing component."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Emulated machines and the links between them.

    >>> cluster = Cluster(nodes=2, per_node=2, inter=2e8, slow={1: 5e7})
    >>> print(cluster)
    2 x 2 ranks, 200 Mb/s between nodes, 50 Mb/s for node 1
    >>> cluster.rate(0), cluster.rate(1)
    (200000000.0, 50000000.0)

    Each node has one link to a switch, which has no limit, and the ranks of a node communicate over
    its loopback. Rates are in bits per second, and `None` is unshaped: `inter` and `slow` limit
    each direction of a link, `flow` each TCP connection between nodes, and `intra` all traffic of a
    node's loopback. Times are in seconds: `rtt` is added to each round trip, and `jitter` bounds
    the variation of one direction's delay. `loss` is the fraction of packets lost on the way to the
    switch.
    """

    nodes: int
    per_node: int = 1
    inter: float | None = None
    intra: float | None = None
    rtt: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    slow: Mapping[int, float] = field(default_factory=dict)
    flow: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MOST_NODES:
            raise ValueError(f"`--nodes` must be in 1..{MOST_NODES}. Received: {self.nodes}")
        checks.check_integer("--per-node", self.per_node, 1)
        if self.jitter > self.rtt / 2:
            raise ValueError(
                "`--jitter` must not exceed half of `--rtt`, the time of one direction. Received: "
                f"jitter {self.jitter * 1e3:g} ms, rtt {self.rtt * 1e3:g} ms. Increase `--rtt`."
            )
        checks.check_number("--loss", self.loss, checks.BELOW_1, "Use less than 100%.")
        for node in self.slow:
            self.check("--slow", "node", node)

    @property
    def size(self) -> int:
        return self.nodes * self.per_node

    def rate(self, node: int) -> float | None:
        """Returns the rate of a node's link in bits per second, or `None` if it is unshaped."""
        return self.slow.get(node, self.inter)

    def check(self, option: str, what: str, number: int) -> None:
        """Raises `ValueError` if an option names a "node" or a "rank" that does not exist."""
        count = self.nodes if what == "node" else self.size
        if not 0 <= number < count:
            raise ValueError(
                f"`{option}` must name a {what} in 0..{count - 1}. Received: {what} {number}. "
                "Pass another number, or increase `--nodes` or `--per-node`."
            )

    def __str__(self) -> str:
        parts = [f"{self.nodes} x {self.per_node} ranks"]
        parts += [f"{readable_rate(self.inter)} between nodes"]
        parts += [f"{readable_rate(self.intra)} within"] if self.intra else []
        parts += [f"{readable_rate(rate)} for node {node}" for node, rate in self.slow.items()]
        parts += [f"{readable_rate(self.flow)} per connection"] if self.flow else []
        parts += [f"{1e3 * self.rtt:g} ms round trip"] if self.rtt else []
        parts += [f"{1e3 * self.jitter:g} ms jitter"] if self.jitter else []
        parts += [f"{self.loss:.2%} lost"] if self.loss else []
        return ", ".join(parts)


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


def _slow(texts: list[str]) -> dict[int, float]:
    found = {}
    for text in texts:
        node, equals, rate = text.partition("=")
        if not equals or not node.isdigit():
            raise ValueError(
                f"`--slow` must have the form NODE=RATE, such as 1=50mbit. Received: {text!r}"
            )
        found[int(node)] = parse_rate(rate)
    return found


def _faults(kind: str, text: str) -> Iterator[Fault]:
    """Yields the fault that an option describes; "stop" also yields the end of the stop.

    >>> [str(fault) for fault in _faults("stop", "1@30+5")]
    ['stop rank 1 after 30 s', 'continue rank 1 after 35 s']
    """
    found = re.fullmatch(r"(\d+)@(\d*\.?\d+)(?:\+(\d*\.?\d+))?", text)
    if not found or (found[3] is None) == (kind == "stop"):
        example = "1@30+5" if kind == "stop" else "1@30"
        raise ValueError(
            f"`--{kind}` must have the form {FAULTS[kind][0]}, such as {example}. "
            f"Received: {text!r}"
        )
    target, at_s = int(found[1]), float(found[2])
    yield Fault(kind=kind, target=target, at_s=at_s)
    if kind == "stop":
        yield Fault(kind="continue", target=target, at_s=at_s + float(found[3]))


OPTIONS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "inter": (parse_rate, "RATE", "rate of each node's link per direction, such as 200mbit"),
    "intra": (parse_rate, "RATE", "rate of all traffic within a node, such as 10gbit"),
    "flow": (parse_rate, "RATE", "limit of each TCP connection between nodes, such as 5gbit"),
    "rtt": (parse_duration, "TIME", "time added to each round trip, such as 1ms"),
    "jitter": (parse_duration, "TIME", "variation of one-way delay, up to --rtt/2, such as 100us"),
    "loss": (parse_share, "SHARE", "share of lost packets, such as 0.1%%"),
    "slow": (_slow, "NODE=RATE", "rate of one node's link, such as 1=50mbit; repeatable"),
}
"""Parsers, value formats and help texts of options that set fields of `Cluster`."""
FAULTS = {
    "kill": ("RANK@SECONDS", "kill a rank"),
    "stop": ("RANK@SECONDS+SECONDS", "stop a rank (SIGSTOP) for some time"),
    "cut": ("NODE@SECONDS", "cut a node's link permanently"),
}
"""Value formats and help texts of options that cause faults."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # `inside` calls this function as well, to parse the same command line.
    cluster = parser.add_argument_group("cluster (default: links without limits and delays)")
    cluster.add_argument("--nodes", type=int, required=True, metavar="M", help="number of nodes")
    cluster.add_argument(
        "--per-node", type=int, default=1, metavar="N", help="ranks on each node (default: 1)"
    )
    for name, (_, form, text) in OPTIONS.items():
        action = "append" if name == "slow" else "store"
        cluster.add_argument(f"--{name}", action=action, metavar=form, help=text)
    faults = parser.add_argument_group(
        "faults (may be repeated; seconds count from the start of the ranks)"
    )
    for kind, (form, text) in FAULTS.items():
        faults.add_argument(f"--{kind}", action="append", default=[], metavar=form, help=text)
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
        default=RANK_MEMORY,
        metavar="SIZE",
        help="memory that each rank requires, such as 1.5GB (default: %(default)s)",
    )
    parser.add_argument(
        "command_line", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="command of each rank"
    )


def main(options: argparse.Namespace) -> int:
    """Returns the job's exit status, or 2 if the lab could not start."""
    try:
        # Check all options before creating anything. `inside` parses `options.arguments` again.
        cluster, *_ = read_request(options)
        path = options.report
        if path and (path.is_dir() or not os.access(path.resolve().parent, os.W_OK)):
            raise ValueError(
                f"`--report` must name a file in a writable directory. Received: {path}. Pass "
                "the path of a file in another directory, or create the directory."
            )
        check_machine(cluster, options.rank_memory)
        return run_inside(options.arguments)
    except (ValueError, UnavailableError) as error:
        print(f"tfposeidon lab: {error}", file=sys.stderr)
        return 2


def read_request(options: argparse.Namespace) -> tuple[Cluster, list[Fault], list[str]]:
    """Checks the options; returns the cluster, the faults, and the command of each rank."""
    values = {}
    for name, (reader, *_) in OPTIONS.items():
        if (text := getattr(options, name)) is not None:
            try:
                values[name] = reader(text)
            except ValueError as error:
                raise ValueError(f"{error} for --{name}") from None
    cluster = Cluster(nodes=options.nodes, per_node=options.per_node, **values)
    faults = [
        fault for kind in FAULTS for text in getattr(options, kind) for fault in _faults(kind, text)
    ]
    for fault in faults:
        cluster.check(f"--{fault.kind}", "node" if fault.kind == "cut" else "rank", fault.target)
    return cluster, faults, read_command(options.command_line)


def check_machine(cluster: Cluster, rank_memory: str = RANK_MEMORY) -> None:
    """Raises `ValueError` if this machine has too little memory for all ranks."""
    # Check the memory now, because the kernel would kill single ranks minutes later.
    rank_bytes, free_bytes = parse_size(rank_memory), available_memory()
    if cluster.size * rank_bytes > free_bytes:
        raise ValueError(
            f"All ranks must fit into memory. Received: {cluster.size} ranks of "
            f"{readable_size(rank_bytes)} (by default, the memory that TensorFlow alone uses), "
            f"{readable_size(free_bytes)} free. "
            "Start fewer ranks, or lower --rank-memory if they need less."
        )


# ------------------------------------------------------------------ namespaces


def python(module: str) -> list[str]:
    """Returns the command that runs a module, with `-P` if this process was started with it."""
    # Without `-P`, sources in the current folder would hide the installed package.
    return [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", module]


def run_inside(arguments: list[str]) -> int:
    """Runs `inside` in new namespaces; returns its exit status, or 128 + number for a signal."""
    # With setpriv, the kernel kills the processes inside if this process is killed.
    command = ["setpriv", "--pdeathsig", "KILL", *namespaces(), *python("tfposeidon.lab.inside")]
    # On the first Ctrl-C, SIGTERM or SIGHUP, this process closes its end of the pipe. The standard
    # input of `inside` then ends, and `inside` ends its ranks. Do not forward the signal: it would
    # also reach processes that `inside` has just started, and that `inside` must end. A second
    # signal kills everything. Child processes do not inherit Python's pipes, so no copy of
    # the end stays open.
    standard_input, end_request = os.pipe()
    signals: list[int] = []
    inside: subprocess.Popen[bytes] | None = None

    def end(number: int, frame: FrameType | None) -> None:
        if not signals:
            os.close(end_request)
        elif inside is not None:
            os.killpg(inside.pid, signal.SIGKILL)
        signals.append(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Under nohup, SIGHUP is ignored and must remain ignored.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
    # Start a new session, because Ctrl-C in a terminal would otherwise reach `inside` directly.
    inside = subprocess.Popen([*command, *arguments], start_new_session=True, stdin=standard_input)
    status = inside.wait()
    status = status if status >= 0 else 128 - status
    return 128 + signals[0] if signals and status in (ENDED, 128 + signal.SIGKILL) else status


def namespaces() -> tuple[str, ...]:
    """Returns the command that creates the namespaces, as root or through a user namespace."""
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        packages = sorted({TOOLS[tool] for tool in missing})
        raise UnavailableError(
            f"the lab needs {', '.join(missing)}. Run: apt-get install {' '.join(packages)}"
        )
    errors = []
    # Root in a container may create namespaces only within a user namespace, so try both.
    for rights in ((), AS_USER) if os.geteuid() == 0 else (AS_USER,):
        command = (*NAMESPACES, *rights)
        probe = subprocess.run(
            [*command, "sh", "-c", PROBE], capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        if probe.returncode == 0:
            return command
        errors.append(f"  {shlex.join(command)}: {' '.join(probe.stderr.split())}\n")
    raise UnavailableError(
        "the lab needs network namespaces, as root or through user namespaces. Tried:\n"
        f"{''.join(errors)}"
        "Run the lab with sudo, or allow user namespaces (sysctl "
        "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0); a "
        "container needs --privileged. The kernel needs veth, bridge and sch_tbf."
    )

"""Runs Python inside private namespaces, which the kernel removes with the last process in them.

Nothing of the lab has a name outside: several labs run side by side, and whatever way one ends, no
process, interface or file of it stays.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from types import FrameType

TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "hostname": "hostname",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "mount": "util-linux",
}
NAMESPACES = ("unshare", "--fork", "--kill-child", "--pid", "--mount-proc", "--mount", "--net")
AS_USER = ("--user", "--map-root-user")
# The parts that a lab is made of, tried out before anything is started.
PROBE = """ip link add name switch type bridge && ip link add name a type veth peer name b &&
tc qdisc add dev a root tbf rate 1mbit burst 3200 limit 100000"""
# Exit status of a module that was asked to end, and did.
ENDED = 128 + signal.SIGTERM


class UnavailableError(Exception):
    """Raised where the machine cannot run a lab; the message says what is missing."""


def run(module: str, arguments: list[str]) -> int:
    """Runs a Python module in namespaces of its own.

    At a signal that ends a job (Ctrl-C, SIGTERM, SIGHUP) the standard input of the module ends, and
    the module takes the time it needs to end; at a second signal everything is killed. The signal
    is not passed on, because it would also reach what the module has just started and is to end.

    Args:
      module: Name of the module, as for `python -m`.
      arguments: Arguments of the module.

    Returns:
      The exit status of the module; 128 plus the number of the signal if one ended it.

    Raises:
      UnavailableError: If tools or rights are missing.
    """
    # setpriv: should this process be killed, the kernel kills what is inside with it.
    command = [
        "setpriv",
        "--pdeathsig",
        "KILL",
        *namespaces(),
        sys.executable,
        "-m",
        module,
        *arguments,
    ]
    # The module reads one end as its standard input, and ends when this process closes the other.
    # Python's pipes are not inherited, so no copy of the other end stays open inside.
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
        signal.signal(number, end)
    # A session of its own: Ctrl-C in a terminal would reach it past this process.
    inside = subprocess.Popen(command, start_new_session=True, stdin=standard_input)
    status = inside.wait()
    status = status if status >= 0 else 128 - status
    return 128 + signals[0] if signals and status in (ENDED, 128 + signal.SIGKILL) else status


def namespaces() -> tuple[str, ...]:
    """Returns the command that makes the namespaces: as root, else through a user namespace.

    It is tried out, in a tenth of a second.

    Raises:
      UnavailableError: If tools or rights are missing.
    """
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        packages = sorted({TOOLS[tool] for tool in missing})
        raise UnavailableError(
            f"{', '.join(missing)} not found. Install: apt-get install {' '.join(packages)}"
        )
    errors = []
    # Root in a container may lack the right that the first needs, and still make user namespaces.
    for rights in ((), AS_USER) if os.geteuid() == 0 else (AS_USER,):
        command = (*NAMESPACES, *rights)
        probe = subprocess.run(
            [*command, "sh", "-c", PROBE], capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        if probe.returncode == 0:
            return command
        errors.append(f"  {shlex.join(command)}: {' '.join(probe.stderr.split())}")
    raise UnavailableError(
        "the lab needs network namespaces, as root or through user namespaces. Tried:\n"
        + "\n".join(errors)
        + "\n"
        "Run it with sudo, or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
        "kernel.apparmor_restrict_unprivileged_userns=0); a container needs --privileged. The "
        "kernel needs veth, bridge and sch_tbf."
    )

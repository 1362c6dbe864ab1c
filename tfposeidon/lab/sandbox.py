"""Runs Python inside private namespaces, which the kernel removes with the last process in them.

Nothing of a lab is visible outside. Several labs can run at the same time, and however one ends, no
process, interface or file of it remains.
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
# The components of a lab, tried out before anything is started.
PROBE = """ip link add name switch type bridge && ip link add name a type veth peer name b &&
tc qdisc add dev a root tbf rate 1mbit burst 3200 limit 100000"""
# Exit status of a module that ended on request.
ENDED = 128 + signal.SIGTERM


class UnavailableError(Exception):
    """Error of a machine that cannot run a lab; the message names the missing component."""


def python(module: str) -> list[str]:
    """Returns the command that runs a module, with `-P` if this process was started with it."""
    # Without it, sources in the current folder would hide the installed package.
    return [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", module]


def run(module: str, arguments: list[str]) -> int:
    """Runs a Python module in new namespaces; returns its status, 128 + number for a signal."""
    # If this process is killed, setpriv makes the kernel kill the processes inside.
    command = ["setpriv", "--pdeathsig", "KILL", *namespaces(), *python(module), *arguments]
    # On the first Ctrl-C, SIGTERM or SIGHUP, this process closes its end of the pipe, so that the
    # module's standard input ends and the module ends its ranks in order. A second signal kills
    # everything. The signal is not passed on, because it would also reach processes that the module
    # has just started and has to end. Python's pipes are not inherited, so no copy of the end
    # remains open inside.
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
        # nohup ignores SIGHUP.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
    # A session of its own, because Ctrl-C in a terminal would reach the module directly.
    inside = subprocess.Popen(command, start_new_session=True, stdin=standard_input)
    status = inside.wait()
    status = status if status >= 0 else 128 - status
    return 128 + signals[0] if signals and status in (ENDED, 128 + signal.SIGKILL) else status


def namespaces() -> tuple[str, ...]:
    """Returns the command that creates the namespaces, as root or through a user namespace."""
    # Each command is tried out, which takes a tenth of a second.
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        packages = sorted({TOOLS[tool] for tool in missing})
        raise UnavailableError(
            f"{', '.join(missing)} not found. Install: apt-get install {' '.join(packages)}"
        )
    errors = []
    # Root in a container may lack the privilege for the first, but may create user namespaces.
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

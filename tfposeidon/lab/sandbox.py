"""Runs Python inside private namespaces, which the kernel clears away with the last process in them.

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
# What a lab is made of, tried out before anything is started.
PROBE = """ip link add name switch type bridge && ip link add name a type veth peer name b &&
tc qdisc add dev a root tbf rate 1mbit burst 3200 limit 100000"""


INTERRUPTED = (128 + signal.SIGTERM, 128 + signal.SIGKILL)


class UnavailableError(Exception):
    """The machine cannot hold a lab; the message says what is missing."""


def run(module: str, arguments: list[str]) -> int:
    """Runs `python -m module` with `arguments` in namespaces of its own; returns its exit status.

    Signals that end a job (Ctrl-C, SIGTERM, SIGHUP) are passed on, and ending takes as long as it takes
    inside; at a second one everything is killed.

    Raises:
      UnavailableError: If tools or rights are missing.
    """
    # setpriv: should this process be killed, the kernel kills what is inside with it.
    command = ["setpriv", "--pdeathsig", "KILL", *_namespaces(), sys.executable, "-m", module, *arguments]
    # Blocked until the inside is ready for it: there it is the first process, which loses what it does not handle.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    inside = subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL)
    asked: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        os.killpg(inside.pid, signal.SIGKILL if asked else signal.SIGTERM)
        asked.append(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    status = inside.wait()
    status = status if status >= 0 else 128 - status
    return 128 + asked[0] if asked and status in INTERRUPTED else status


def _namespaces() -> tuple[str, ...]:
    """The command that makes the namespaces: as root, else through a user namespace."""
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        packages = sorted({TOOLS[tool] for tool in missing})
        raise UnavailableError(f"{', '.join(missing)} not found. Install: apt-get install {' '.join(packages)}")
    errors = []
    for rights in ((), AS_USER) if os.geteuid() == 0 else (AS_USER,):
        command = (*NAMESPACES, *rights)
        probe = subprocess.run([*command, "sh", "-c", PROBE], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if probe.returncode == 0:
            return command
        errors.append(f"  {shlex.join(command)}: {' '.join(probe.stderr.split())}")
    raise UnavailableError(
        "the lab needs network namespaces, as root or through user namespaces. Tried:\n" + "\n".join(errors) + "\n"
        "Run it with sudo, or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
        "kernel.apparmor_restrict_unprivileged_userns=0); a container needs --privileged. The kernel needs veth, "
        "bridge and sch_tbf."
    )

"""Holds packets back between nodes and switch, or drops them: delay, jitter and loss.

The kernels of many clouds and containers come without `netem`, so a process of our own stands in
the links, between two TAP devices each: `eth0` in the node and the bridge's port. Segmentation
offload is left on where nothing is dropped, so a frame is up to 64 kB and costs some 20 us of one
core: good for links of a few Gb/s.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tfposeidon.lab.sandbox import UnavailableError

TUN_DEVICE = "/dev/net/tun"
# From linux/if_tun.h.
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
OFFLOAD_CHECKSUM, OFFLOAD_TSO4 = 0x01, 0x02
LARGEST_FRAME = 2**16 + 256


@dataclass(order=True)
class _HeldFrame:
    # Frames that are due at one moment leave in the order in which they came.
    due_s: float
    number: int
    target: int = field(compare=False)
    frame: bytes = field(compare=False)


@dataclass(kw_only=True)
class DelayLine:
    """Frames on their way from nodes to the switch.

    >>> line = DelayLine(delay_s=0.5, jitter_s=0.0, loss=0.0)
    >>> line.take(b"frame", target=5, now_s=1.0)
    >>> line.due(1.0), line.until_next(1.0), line.due(1.5)
    ([], 0.5, [(5, b'frame')])

    Args:
      delay_s: Seconds that a frame takes.
      jitter_s: Seconds by which the delay varies, up or down, uniformly; frames to one target never
        overtake one another.
      loss: Fraction of the frames that is dropped.
      seed: Seed of jitter and loss.
    """

    delay_s: float
    jitter_s: float
    loss: float
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._held: list[_HeldFrame] = []
        self._last_due: dict[int, float] = {}
        self._count = 0

    def take(self, frame: bytes, target: int, now_s: float) -> None:
        """Takes a frame, to drop it or to hold it until it is due.

        Args:
          frame: Bytes of the Ethernet frame.
          target: Descriptor of the TAP device that it goes to.
          now_s: Time of arrival, in seconds since some moment.
        """
        if self._random.random() < self.loss:
            return
        due = now_s + self.delay_s + self._random.uniform(-self.jitter_s, self.jitter_s)
        # Frames that overtake one another would look like losses to TCP.
        due = max(due, self._last_due.get(target, 0.0))
        self._last_due[target] = due
        self._count += 1
        heapq.heappush(self._held, _HeldFrame(due, self._count, target, frame))

    def due(self, now_s: float) -> list[tuple[int, bytes]]:
        """Returns the frames whose time has come, and no longer holds them.

        Args:
          now_s: Present time, in seconds since the moment that `take` counts from.

        Returns:
          Pairs of a target and a frame, in the order in which they are due.
        """
        ready = []
        while self._held and self._held[0].due_s <= now_s:
            held = heapq.heappop(self._held)
            ready.append((held.target, held.frame))
        return ready

    def until_next(self, now_s: float) -> float | None:
        """Returns the seconds until a frame is due, `None` if none is held.

        Args:
          now_s: Present time, in seconds since the moment that `take` counts from.
        """
        return max(0.0, self._held[0].due_s - now_s) if self._held else None


def start(
    node_devices: Sequence[str], switch_devices: Sequence[str], line: DelayLine
) -> subprocess.Popen[str]:
    """Makes TAP devices in this network namespace, and a process that passes frames between them.

    The devices stay connected when they are moved to other namespaces.

    Args:
      node_devices: Names of the devices at the nodes' ends of the links.
      switch_devices: Names of the devices at the switch's ends, in the same order.
      line: Delays and losses of frames on their way to the switch.

    Returns:
      The process, which works until it is killed.

    Raises:
      UnavailableError: If the machine has no TAP devices, with the remedy.
    """
    options = {
        "delay_s": line.delay_s,
        "jitter_s": line.jitter_s,
        "loss": line.loss,
        "seed": line.seed,
    }
    argument = json.dumps({"nodes": node_devices, "switch": switch_devices, "line": options})
    command = [sys.executable, "-m", "tfposeidon.lab.delay_line", argument]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    # Devices can be moved only once they exist, and only the process can say that they do.
    answer = process.stdout.readline().strip()
    if answer != "ready":
        process.wait()
        raise UnavailableError(
            f"Delay, jitter and loss need TAP devices. Received: {answer or 'no answer'}. Load the "
            f"kernel module `tun` (modprobe tun), let containers see {TUN_DEVICE}, or leave --rtt, "
            "--jitter and --loss out."
        )
    return process


def _tap(name: str, offload: bool) -> int:
    # Large frames need IFF_VNET_HDR: their header tells the other end how to cut them into packets.
    device = os.open(TUN_DEVICE, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(
        device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR)
    )
    fcntl.ioctl(device, TUNSETOFFLOAD, OFFLOAD_CHECKSUM | OFFLOAD_TSO4 if offload else 0)
    return device


def _pass_frames(to_switch: dict[int, int], to_nodes: dict[int, int], line: DelayLine) -> None:
    """Passes frames until it is killed: to the switch through the line, to the nodes at once."""
    devices = [*to_switch, *to_nodes]
    while True:
        # select() waits for microseconds, epoll for whole milliseconds.
        readable, _, _ = select.select(devices, [], [], line.until_next(time.monotonic()))
        for device in readable:
            for frame in _read(device):
                if device in to_switch:
                    line.take(frame, to_switch[device], time.monotonic())
                else:
                    _write(to_nodes[device], frame)
        for target, frame in line.due(time.monotonic()):
            _write(target, frame)


def _read(device: int) -> list[bytes]:
    """Returns the frames that are there, but not so many that other devices starve."""
    frames = []
    for _ in range(16):
        try:
            frames.append(os.read(device, LARGEST_FRAME))
        except BlockingIOError:
            break
    return frames


def _write(device: int, frame: bytes) -> None:
    try:
        os.write(device, frame)
    except OSError as error:
        # The interface at the other end is down: not up yet, or its cable was cut.
        if error.errno != errno.EIO:
            raise


def main() -> None:
    """Makes the devices, writes "ready" or the error to standard output, and passes frames."""
    request = json.loads(sys.argv[1])
    line = DelayLine(**request["line"])
    # With offload one frame stands for up to 44 packets: loss would hit all of them together.
    offload = line.loss == 0
    # To be on time on a loaded machine; root of a user namespace may not.
    with contextlib.suppress(PermissionError):
        os.nice(-20)
    try:
        nodes = [_tap(name, offload) for name in request["nodes"]]
        switch = [_tap(name, offload) for name in request["switch"]]
    except OSError as error:
        print(error, flush=True)
        sys.exit(1)
    print("ready", flush=True)
    _pass_frames(dict(zip(nodes, switch, strict=True)), dict(zip(switch, nodes, strict=True)), line)


if __name__ == "__main__":
    main()

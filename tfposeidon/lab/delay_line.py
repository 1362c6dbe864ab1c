"""Delays and drops packets on their way from nodes to the switch.

Many kernels of clouds and containers have no `netem`, so a process forwards the frames of each link
between two TAP devices: `eth0` in the node and the bridge's port. Without loss, segmentation
offload stays on, so a frame has up to 64 kB and costs about 20 us of one core, which is fast enough
for links of a few Gb/s.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tfposeidon.lab.command import UnavailableError, python

TUN_DEVICE = "/dev/net/tun"
# These constants are from linux/if_tun.h.
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
OFFLOAD_CHECKSUM, OFFLOAD_TSO4 = 0x01, 0x02
LARGEST_FRAME = 2**16 + 256


@dataclass(kw_only=True)
class DelayLine:
    """Frames on their way from nodes to the switch.

    >>> line = DelayLine(delay_s=0.5, jitter_s=0.0, loss=0.0)
    >>> line.take(b"frame", target=5, now_s=1.0)
    >>> line.due(1.0), line.until_next(1.0), line.due(1.5)
    ([], 0.5, [(5, b'frame')])

    The jitter is uniform, up or down, and frames to one target never overtake one another. `loss`
    is the fraction of frames that is dropped.
    """

    delay_s: float
    jitter_s: float
    loss: float

    def __post_init__(self) -> None:
        self._random = random.Random(0)
        self._held: dict[int, deque[tuple[float, bytes]]] = {}

    def take(self, frame: bytes, target: int, now_s: float) -> None:
        """Drops a frame, or holds it until it is due; `target` is a descriptor of a TAP device."""
        if self._random.random() < self.loss:
            return
        due_s = now_s + self.delay_s + self._random.uniform(-self.jitter_s, self.jitter_s)
        # Keep the order of frames, because TCP would mistake reordered frames for losses.
        self._held.setdefault(target, deque()).append((due_s, frame))

    def due(self, now_s: float) -> list[tuple[int, bytes]]:
        """Removes and returns the frames that are due, as (target, frame) pairs."""
        ready = []
        for target, frames in self._held.items():
            while frames and frames[0][0] <= now_s:
                ready.append((target, frames.popleft()[1]))
        return ready

    def until_next(self, now_s: float) -> float | None:
        """Returns the seconds until the next frame is due, or `None` if no frame is held."""
        waits_s = [frames[0][0] - now_s for frames in self._held.values() if frames]
        return max(0.0, min(waits_s)) if waits_s else None


def start(
    node_devices: Sequence[str], switch_devices: Sequence[str], line: DelayLine
) -> subprocess.Popen[str]:
    """Starts a process that creates TAP devices in this namespace, and forwards frames forever."""
    argument = json.dumps({"nodes": node_devices, "switch": switch_devices, "line": asdict(line)})
    command = [*python("tfposeidon.lab.delay_line"), argument]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    # Wait until the process has created the devices, because the caller moves them.
    answer = process.stdout.readline().strip()
    if answer != "ready":
        process.wait()
        raise UnavailableError(
            f"Delay, jitter and loss require TAP devices. Received: {answer or 'no answer'}. Load "
            f"the kernel module `tun` (modprobe tun), pass {TUN_DEVICE} to the container, or omit "
            "--rtt, --jitter and --loss."
        )
    return process


def _tap(name: str, offload: bool) -> int:
    # Large frames need IFF_VNET_HDR, whose header describes how to segment them into packets.
    device = os.open(TUN_DEVICE, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(
        device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR)
    )
    fcntl.ioctl(device, TUNSETOFFLOAD, OFFLOAD_CHECKSUM | OFFLOAD_TSO4 if offload else 0)
    return device


def _pass_frames(to_switch: dict[int, int], to_nodes: dict[int, int], line: DelayLine) -> None:
    """Forwards frames until the process is killed: to nodes immediately, to the switch delayed."""
    devices = [*to_switch, *to_nodes]
    while True:
        # Use select(), whose timeout has a resolution of microseconds; epoll's has milliseconds.
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
    """Returns the available frames, at most 16 so that other devices do not starve."""
    frames: list[bytes] = []
    with contextlib.suppress(BlockingIOError):
        while len(frames) < 16:
            frames.append(os.read(device, LARGEST_FRAME))
    return frames


def _write(device: int, frame: bytes) -> None:
    try:
        os.write(device, frame)
    except OSError as error:
        # Drop the frame if the interface at the other end is not up yet or its link was cut.
        if error.errno != errno.EIO:
            raise


def main() -> None:
    """Creates the devices, prints "ready" or the error, and forwards frames."""
    request = json.loads(sys.argv[1])
    line = DelayLine(**request["line"])
    # With offload, a loss would drop a frame of up to 44 packets instead of one packet.
    offload = line.loss == 0
    # A high priority keeps delays accurate on a loaded machine, but root of a user namespace cannot
    # set it.
    with contextlib.suppress(PermissionError):
        os.nice(-20)
    try:
        nodes, switch = (
            [_tap(name, offload) for name in request[end]] for end in ("nodes", "switch")
        )
    except OSError as error:
        print(error, flush=True)
        sys.exit(1)
    print("ready", flush=True)
    _pass_frames(dict(zip(nodes, switch, strict=True)), dict(zip(switch, nodes, strict=True)), line)


if __name__ == "__main__":
    main()

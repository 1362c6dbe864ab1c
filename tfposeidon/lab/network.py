"""Builds nodes and links: namespaces joined by a bridge, shaped by `tc` in both directions.

A node is a process that holds a network, a host-name and a mount namespace, with its own
`/dev/shm`. Its link is a pair of interfaces: `eth0` in the node and `portN` on the bridge. The
bridge lies in the lab's own namespace, where the rendezvous server listens. Packets from a node
queue at its `eth0`, and packets to a node queue at its port.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tfposeidon.lab import delay_line
from tfposeidon.lab.command import Cluster
from tfposeidon.lab.delay_line import DelayLine

SWITCH_ADDRESS = "10.99.0.254"
INTERFACE = "eth0"
# The interface counts these headers of each packet: Ethernet, IP, and TCP with time stamps.
HEADER_BYTES = 66
BURST_S = 0.001
# The smallest burst holds two Ethernet frames, because a token bucket smaller than one frame would
# block all packets.
SMALLEST_BURST_BYTES = 3200
QUEUE_S = 0.05
SMALLEST_QUEUE_BYTES = 2**24
FLOW_CLASSES = 1024
"""Number of classes for limited connections. Two connections in one class share its rate: with 8
busy connections per node, this happens in 3 of 100 networks. Creating these classes takes 0.1 s per
node, but 4096 classes would take 3 s."""
LONGEST_WITHOUT_DATA = 100
"""Largest size in bytes of an IP packet without data: headers with time stamps and three selective
acknowledgements."""
# This is classic BPF, which every version of `tc` accepts. For an IPv4 packet without options, it
# returns class 2:(1 + low bits of source port xor destination port). It uses both ports, because
# PyTorch listens on one port for all ranks, and Gloo listens on one port per pair of ranks.
CLASS_OF_CONNECTION = ",".join(
    [
        "7",
        f"40 0 0 {2**32 - 2**20 + 20}",  # A = source port; -2^20 is where the IP header begins
        "7 0 0 0",  # X = A
        f"40 0 0 {2**32 - 2**20 + 22}",  # A = destination port
        "172 0 0 0",  # A = A xor X
        f"84 0 0 {FLOW_CLASSES - 1}",  # A = A and mask
        f"4 0 0 {0x20001}",  # A = A + 2:1
        "22 0 0 0",  # return A
    ]
)
# Packets without data, such as acknowledgements, go to class 1:2, and all others go to 1:3.
CLASS_OF_PACKET = ",".join(
    [
        "4",
        f"40 0 0 {2**32 - 2**20 + 2}",  # A = total length of the IPv4 packet
        f"37 0 1 {LONGEST_WITHOUT_DATA}",  # if A <= limit, skip the next instruction
        f"6 0 0 {0x10003}",  # return 1:3
        f"6 0 0 {0x10002}",  # return 1:2
    ]
)
# Mount sysfs again, because `payload_bytes` reads it and it shows the interfaces of the namespace
# that mounted it. Keep /sys/fs/cgroup, where `available_memory` finds the limits of containers.
# Mount a separate /dev/shm, because data caches share a store there that other machines would not
# see. Select Reno, the only congestion control that every kernel allows in a namespace: defaults
# differ, and BBR, for example, leaves up to half of a link idle when both directions are busy.
HOLD_NODE = """
hostname "$0" && ip link set dev lo up &&
mount --rbind /sys/fs/cgroup /mnt && mount -t sysfs none /sys &&
mount --rbind /mnt /sys/fs/cgroup && umount -l /mnt && mount -t tmpfs none /dev/shm &&
echo reno > /proc/sys/net/ipv4/tcp_congestion_control && echo ready && exec sleep infinity
"""
# Write to a tmpfs over /mnt in the lab's mount namespace, so that no file outside changes.
REPLACE_HOSTS = (
    "mount -t tmpfs none /mnt && cat > /mnt/hosts && "
    "mount --bind /mnt/hosts /etc/hosts && umount -l /mnt"
)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Traffic over one node's link, headers included, as seen from the node.

    With delay or jitter, each frame of up to 64 kB that arrives at a node counts as one packet.
    Shares are fractions of the link's capacity in a direction, or `None` if it is unshaped.
    `dropped_packets` counts packets that full queues dropped in either direction, and packets that
    the delaying process did not read in time.
    """

    rate_bits_per_s: float | None
    sent_bytes: int
    sent_packets: int
    sent_share: float | None
    received_bytes: int
    received_packets: int
    received_share: float | None
    dropped_packets: int


@dataclass(frozen=True)
class Network:
    """Nodes and links of a running cluster, which `network()` creates.

    `holders` are the processes that hold the nodes' namespaces, by node. `line` is the process that
    delays packets, or `None` without delays.
    """

    cluster: Cluster
    holders: list[subprocess.Popen[str]]
    line: subprocess.Popen[str] | None

    def entering(self, node: int) -> list[str]:
        """Returns a prefix for commands, which runs them on a node in the current directory."""
        enter = ["nsenter", "--target", str(self.holders[node].pid), "--net", "--uts", "--mount"]
        # Set the directory, because a process that enters a mount namespace starts in its root.
        return [*enter, "env", "--chdir", str(Path.cwd())]

    def cut(self, node: int) -> None:
        """Cuts a node's link permanently, at the switch."""
        _call("ip", "link", "set", "dev", port(node), "down")

    def traffic(self, wall_s: float) -> list[Traffic]:
        """Returns the traffic over each node's link so far, counted by the queues at its ends."""
        ports, found = _queues("tc"), []
        for node in range(self.cluster.nodes):
            sent, received = _queues(*self.entering(node), "tc")[INTERFACE], ports[port(node)]
            rate = self.cluster.rate(node)
            shares = [
                8 * one["bytes"] / (rate * wall_s) if rate else None for one in (sent, received)
            ]
            found.append(
                Traffic(
                    rate_bits_per_s=rate,
                    sent_bytes=sent["bytes"],
                    sent_packets=sent["packets"],
                    sent_share=shares[0],
                    received_bytes=received["bytes"],
                    received_packets=received["packets"],
                    received_share=shares[1],
                    dropped_packets=sent["drops"] + received["drops"] + self._unread_packets(node),
                )
            )
        return found

    def _unread_packets(self, node: int) -> int:
        """Returns how many packets of a node's link the delaying process did not read in time."""
        if self.line is None:
            return 0
        # A TAP device drops these packets behind its queue, which has counted them as sent.
        show = ("ip", "-s", "-j", "link", "show", "dev")
        both = (_call(*show, port(node)), _call(*self.entering(node), *show, INTERFACE))
        return sum(json.loads(text)[0]["stats64"]["tx"]["dropped"] for text in both)


def host_name(node: int) -> str:
    return f"node{node}"


def address(node: int) -> str:
    return f"10.99.0.{node + 1}"


def port(node: int) -> str:
    """Returns the name of the bridge's interface to a node."""
    return f"port{node}"


def payload_bytes(interface: str = INTERFACE, direction: Literal["tx", "rx"] = "tx") -> int:
    """Returns how many bytes without headers this node has sent or received over an interface.

    Ranks call this function. Outside the lab, where the interface does not exist, it returns 0.
    """
    folder = Path("/sys/class/net") / interface / "statistics"
    if not folder.exists():
        return 0
    names = (f"{direction}_bytes", f"{direction}_packets")
    carried, packets = (int((folder / name).read_text()) for name in names)
    return carried - HEADER_BYTES * packets


@contextmanager
def network(cluster: Cluster) -> Iterator[Network]:
    """Builds the nodes and their links in the lab's namespaces; they exist during the context."""
    names = [host_name(node) for node in range(cluster.nodes)]
    lines = [[address(node), name] for node, name in enumerate(names)]
    # Remove the nodes' names from the lines of this machine, which may define another node0. Keep
    # all other names, such as localhost.
    others = Path("/etc/hosts").read_text().splitlines()
    lines += [[word for word in line.split() if word not in names] for line in others]
    hosts = "".join(f"{' '.join(line)}\n" for line in lines if len(line) > 1)
    # Replace the hosts file before creating nodes, whose mount namespaces are copies of this one.
    _call("sh", "-c", REPLACE_HOSTS, text=hosts)
    _call("ip", "link", "set", "dev", "lo", "up")
    _call("ip", "link", "add", "name", "switch", "type", "bridge")
    _call("ip", "addr", "add", f"{SWITCH_ADDRESS}/24", "dev", "switch")
    _call("ip", "link", "set", "dev", "switch", "up")
    holders = [_hold(name) for name in names]
    line = None
    # End only the processes, because the kernel removes a namespace with its last process, and
    # interfaces with their namespace.
    try:
        # Token buckets cannot delay or drop packets.
        if cluster.rtt or cluster.loss:
            ports = [port(node) for node in range(cluster.nodes)]
            # Delay only frames to the switch. Each direction of a round trip crosses one such link,
            # so each link adds half of the delay.
            delay = DelayLine(delay_s=cluster.rtt / 2, jitter_s=cluster.jitter, loss=cluster.loss)
            line = delay_line.start(names, ports, delay)
        built = Network(cluster, holders, line)
        for node in range(cluster.nodes):
            _connect(built, node)
        yield built
    finally:
        for process in filter(None, (line, *holders)):
            process.kill()
            process.wait()


def _hold(name: str) -> subprocess.Popen[str]:
    command = ["unshare", "--net", "--uts", "--mount", "sh", "-c", HOLD_NODE, name]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stderr is not None
    # Wait until the namespace exists, because the caller moves interfaces into it.
    if holder.stdout.readline() != "ready\n":
        raise subprocess.CalledProcessError(holder.wait(), command, stderr=holder.stderr.read())
    return holder


def _connect(built: Network, node: int) -> None:
    inside, namespace = built.entering(node), ("netns", str(built.holders[node].pid))
    if built.line is None:
        peer = ("type", "veth", "peer", "name", INTERFACE, *namespace)
        _call("ip", "link", "add", "name", port(node), *peer)
    else:
        _call("ip", "link", "set", "dev", host_name(node), *namespace, "name", INTERFACE)
    _call("ip", "link", "set", "dev", port(node), "master", "switch", "up")
    _call(*inside, "ip", "addr", "add", f"{address(node)}/24", "dev", INTERFACE)
    _call(*inside, "ip", "link", "set", "dev", INTERFACE, "up")
    # Both ends need a queue, because a queue shapes only packets that leave an interface.
    rate = built.cluster.rate(node)
    _shape(_shaped_link(port(node), rate))
    flow = built.cluster.flow
    if flow is None:
        _shape(_shaped_link(INTERFACE, rate), *inside)
        if rate is not None:
            # Segments must be smaller than the burst of the link, but by default have up to 64 kB.
            size = str(min(burst_bytes(rate), 65536))
            _call(*inside, "ip", "link", "set", "dev", INTERFACE, "gso_max_size", size)
    else:
        # Limit connections at the sending node only: its queue is the first that they share.
        _shape(_limited_connections(rate, flow), *inside)
    if built.cluster.intra is not None:
        # Reduce the MTU, because packets of a loopback's default MTU, 64 kB, would not fit into the
        # token bucket.
        _call(*inside, "ip", "link", "set", "dev", "lo", "mtu", "1500")
        _shape(_shaped_link("lo", built.cluster.intra), *inside)


def _shape(commands: Iterator[str], *entering: str) -> None:
    _call(*entering, "tc", "-batch", "-", text="\n".join(commands))


def burst_bytes(rate: float) -> int:
    """Returns the largest burst of a link in bytes: 1 ms of its rate, at least two frames."""
    # On the development machines, smaller bursts lost throughput under load, and larger ones made
    # short exchanges faster than the link.
    return max(round(rate / 8 * BURST_S), SMALLEST_BURST_BYTES)


def queue_bytes(rate: float) -> int:
    """Returns the capacity of a link's queue in bytes: 50 ms of its rate, at least 16 MiB."""
    # Queues are deep, as in some switches, so that benchmarks measure schemes and not the recovery
    # of this kernel's TCP from losses.
    return max(round(rate / 8 * QUEUE_S), SMALLEST_QUEUE_BYTES)


def _shaped_link(device: str, rate: float | None) -> Iterator[str]:
    """Yields commands for `tc`: a link that serves acknowledgements before data.

    In one queue, acknowledgements would wait behind the data of the other direction. A link that is
    busy in both directions would then stall at times, unlike a network with fair queues. With
    `rate=None`, the link is unshaped, and the queue only counts packets.
    """
    if rate is None:
        yield f"qdisc add dev {device} root pfifo limit 10000"
        return
    burst = burst_bytes(rate)
    # The quantum, which matters between classes of equal priority, only prevents a warning.
    both = f"ceil {rate:.0f}bit burst {burst} cburst {burst} quantum 60000"
    yield f"qdisc add dev {device} root handle 1: htb default 3"
    yield f"class add dev {device} parent 1: classid 1:1 htb rate {rate:.0f}bit {both}"
    # Each class may use the whole link; the shares are guaranteed minima.
    for number, share in ((2, 0.1), (3, 0.9)):
        yield (
            f"class add dev {device} parent 1:1 classid 1:{number} htb rate {share * rate:.0f}bit "
            f"prio {number} {both}"
        )
        yield f"qdisc add dev {device} parent 1:{number} bfifo limit {queue_bytes(rate)}"
    bytecode = f'bytecode "{CLASS_OF_PACKET}"'
    yield f"filter add dev {device} parent 1: protocol ip prio 1 bpf {bytecode} classid 1:3"


def _limited_connections(rate: float | None, flow: float) -> Iterator[str]:
    """Yields commands for `tc`: one class per connection, below the token bucket of the link."""
    parent = "root"
    if rate is not None:
        bucket = f"rate {rate:.0f}bit burst {burst_bytes(rate)} limit {queue_bytes(rate)}"
        yield f"qdisc add dev {INTERFACE} root handle 1: tbf {bucket}"
        parent = "parent 1:1"
    yield f"qdisc add dev {INTERFACE} {parent} handle 2: htb default 1"
    burst = burst_bytes(flow)
    # The quantum, which matters between classes that borrow bandwidth, only prevents a warning.
    limits = f"rate {flow:.0f}bit ceil {flow:.0f}bit burst {burst} cburst {burst} quantum 60000"
    for number in range(1, FLOW_CLASSES + 1):
        yield f"class add dev {INTERFACE} parent 2: classid 2:{number:x} htb {limits}"
    bytecode = f'bytecode "{CLASS_OF_CONNECTION}"'
    yield f"filter add dev {INTERFACE} parent 2: protocol ip prio 1 bpf {bytecode} classid 2:1"


def _queues(*tc: str) -> dict[str, dict[str, int]]:
    """Returns the counters of every root queue, by interface."""
    queues = json.loads(_call(*tc, "-s", "-j", "qdisc", "show"))
    return {queue["dev"]: queue for queue in queues if "root" in queue}


def _call(*command: str, text: str | None = None) -> str:
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout

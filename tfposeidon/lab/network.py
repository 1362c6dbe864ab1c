"""Nodes and links: namespaces joined by a bridge, shaped by `tc` in both directions.

A node is a process that holds a network, a host-name and a mount namespace, with a `/dev/shm` of
its own. Its link is a pair of interfaces: `eth0` in the node, `portN` on the bridge, which lies in
the lab's own namespace, where the rendezvous server listens. What a node sends queues at `eth0`,
what it receives at its port.
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
from tfposeidon.lab.cluster import Cluster, burst_bytes, queue_bytes
from tfposeidon.lab.delay_line import DelayLine
from tfposeidon.lab.sandbox import UnavailableError

SWITCH_ADDRESS = "10.99.0.254"
INTERFACE = "eth0"
# Headers of every packet as the interface counts it: Ethernet, IP, and TCP with time stamps.
HEADER_BYTES = 66
FLOW_CLASSES = 1024
"""Classes of limited connections. Two that fall into one share its rate: of 8 busy connections of a
node, some do in 3 of 100 networks. To make 4096 takes 3 s a node, these take 0.1 s."""
LONGEST_WITHOUT_DATA = 100
"""Bytes of an IP packet without data, at most: headers with time stamps and three selective
acknowledgements."""
# Classic BPF, which every `tc` takes: source port xor destination port of an IPv4 packet without
# options, its low bits, and 2: before them. Both ports, as PyTorch listens on one for all ranks,
# and Gloo on one for each pair.
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
# Packets without data, acknowledgements among them, go to the first class, all else to the second.
CLASS_OF_PACKET = ",".join(
    [
        "4",
        f"40 0 0 {2**32 - 2**20 + 2}",  # A = total length of the IPv4 packet
        f"37 0 1 {LONGEST_WITHOUT_DATA}",  # if A > limit go on, else skip one
        f"6 0 0 {0x10003}",  # return 1:3
        f"6 0 0 {0x10002}",  # return 1:2
    ]
)
# sysfs shows the interfaces of the namespace that mounted it, and `payload_bytes` reads them there.
# Data caches share a pool in /dev/shm, which no other machine would see.
# Reno is the one congestion control that every kernel allows in a namespace. The defaults of
# kernels differ, and BBR, for one, leaves up to half of a link idle when both directions are full.
HOLD_NODE = """
hostname "$0" && ip link set dev lo up &&
mount -t sysfs none /sys && mount -t tmpfs none /dev/shm &&
echo reno > /proc/sys/net/ipv4/tcp_congestion_control && echo ready && exec sleep infinity
"""
# By way of a tmpfs over /mnt in our mount namespace, so that no file is written outside.
REPLACE_HOSTS = (
    "mount -t tmpfs none /mnt && cat > /mnt/hosts && "
    "mount --bind /mnt/hosts /etc/hosts && umount -l /mnt"
)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Traffic over one node's link, headers included.

    With delay or jitter, frames of up to 64 kB that arrive at a node count as one packet.

    Attributes:
      sent_bytes: Bytes from the node to the switch.
      sent_packets: Packets from the node to the switch.
      received_bytes: Bytes from the switch to the node.
      received_packets: Packets from the switch to the node.
      dropped_packets: Packets lost in full queues, in either direction.
    """

    sent_bytes: int
    sent_packets: int
    received_bytes: int
    received_packets: int
    dropped_packets: int


class Network:
    """Nodes and links of a cluster, while they exist; made by `network()`.

    Args:
      cluster: The nodes and links that were asked for.
      holders: Process ids of the processes that hold the namespaces of the nodes, by node.
      line: The process that delays packets, if there is one.
    """

    def __init__(
        self, cluster: Cluster, holders: list[int], line: subprocess.Popen[str] | None
    ) -> None:
        self.cluster = cluster
        self._holders = holders
        self._line = line

    def entering(self, node: int) -> list[str]:
        """Returns the words to put before a command so that it runs on a node.

        The command runs in the current directory.

        Args:
          node: Index of the node.
        """
        target = str(self._holders[node])
        # Who enters a mount namespace finds itself at its root.
        return [
            "nsenter",
            "--target",
            target,
            "--net",
            "--uts",
            "--mount",
            "env",
            "--chdir",
            str(Path.cwd()),
        ]

    def cut(self, node: int) -> None:
        """Cuts a node's link for good, at the switch.

        Args:
          node: Index of the node.
        """
        _call("ip", "link", "set", "dev", port(node), "down")

    def traffic(self) -> list[Traffic]:
        """Returns the traffic over each node's link so far, counted by the queues at its ends."""
        ports = _queues("tc")
        return [self._traffic_of(node, ports) for node in range(self.cluster.nodes)]

    def _traffic_of(self, node: int, ports: dict[str, dict[str, int]]) -> Traffic:
        sent = _queues(*self.entering(node), "tc")[INTERFACE]
        received = ports[port(node)]
        return Traffic(
            sent_bytes=sent["bytes"],
            sent_packets=sent["packets"],
            received_bytes=received["bytes"],
            received_packets=received["packets"],
            dropped_packets=sent["drops"] + received["drops"],
        )

    def byte_counts(self) -> list[int]:
        """Returns the bytes that each node has sent so far.

        Cheaper than `traffic`, but without the headers that segmentation adds later.

        Raises:
          UnavailableError: If the links are dead, because the delay line is.
        """
        if self._line is not None and self._line.poll() is not None:
            raise UnavailableError(
                f"the process that delays packets has ended, with status {self._line.returncode}"
            )
        lines = (
            line.split(":", 1)
            for line in Path("/proc/self/net/dev").read_text().splitlines()
            if ":" in line
        )
        # Received bytes come first: what a node sends is what its port receives.
        counters = {name.strip(): int(values.split()[0]) for name, values in lines}
        return [counters[port(node)] for node in range(self.cluster.nodes)]


def host_name(node: int) -> str:
    """Returns the host name of a node.

    Args:
      node: Index of the node.
    """
    return f"node{node}"


def address(node: int) -> str:
    """Returns a node's address on the network of the lab.

    Args:
      node: Index of the node.
    """
    return f"10.99.0.{node + 1}"


def port(node: int) -> str:
    """Returns the name of the interface at the bridge's end of a node's link.

    Args:
      node: Index of the node.
    """
    return f"port{node}"


def payload_bytes(interface: str = INTERFACE, direction: Literal["tx", "rx"] = "tx") -> int:
    """Returns what this node has carried over an interface so far, in bytes without headers.

    To be called on a rank. Where the interface is missing, as outside the lab, it is 0.

    Args:
      interface: Name of the interface; that of the node's link by default.
      direction: "tx" for what was sent, "rx" for what was received.
    """
    folder = Path("/sys/class/net") / interface / "statistics"
    if not folder.exists():
        return 0
    carried, packets = (
        int((folder / f"{direction}_{what}").read_text()) for what in ("bytes", "packets")
    )
    return carried - HEADER_BYTES * packets


@contextmanager
def network(cluster: Cluster) -> Iterator[Network]:
    """Builds the nodes and their links; to be called inside the sandbox.

    Args:
      cluster: Cluster to build.

    Yields:
      The network, which ends with the context.

    Raises:
      subprocess.CalledProcessError: If the kernel refuses, with its message.
      UnavailableError: If delays are asked for and the machine has no TAP devices.
    """
    hosts = Path("/etc/hosts").read_text() + "".join(
        f"{address(node)} {host_name(node)}\n" for node in range(cluster.nodes)
    )
    # Before the nodes are made, whose mount namespaces are copies of this one.
    _call("sh", "-c", REPLACE_HOSTS, text=hosts)
    _call("ip", "link", "set", "dev", "lo", "up")
    _call("ip", "link", "add", "name", "switch", "type", "bridge")
    _call("ip", "addr", "add", f"{SWITCH_ADDRESS}/24", "dev", "switch")
    _call("ip", "link", "set", "dev", "switch", "up")
    holders = [_hold(host_name(node)) for node in range(cluster.nodes)]
    line = None
    # Namespaces go with their last process, and interfaces with their namespace: nothing else has
    # to be cleared away.
    try:
        if cluster.delays:
            line = _plug_delayed(cluster, holders)
        else:
            for node, holder in enumerate(holders):
                peer = ("peer", "name", INTERFACE, "netns", str(holder.pid))
                _call("ip", "link", "add", "name", port(node), "type", "veth", *peer)
        built = Network(cluster, [holder.pid for holder in holders], line)
        for node in range(cluster.nodes):
            _connect(built, node)
        yield built
    finally:
        for process in (*([line] if line else []), *holders):
            process.kill()
            process.wait()


def _hold(name: str) -> subprocess.Popen[str]:
    command = ["unshare", "--net", "--uts", "--mount", "sh", "-c", HOLD_NODE, name]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stderr is not None
    # Interfaces can be moved into a namespace only once it exists.
    if holder.stdout.readline() != "ready\n":
        raise subprocess.CalledProcessError(holder.wait(), command, stderr=holder.stderr.read())
    return holder


def _plug_delayed(cluster: Cluster, holders: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    ends = [f"node{node}" for node in range(cluster.nodes)]
    # What goes to the switch waits, what comes from there does not: half of a round trip each time.
    line = DelayLine(delay_s=cluster.rtt / 2, jitter_s=cluster.jitter, loss=cluster.loss)
    process = delay_line.start(ends, [port(node) for node in range(cluster.nodes)], line)
    for end, holder in zip(ends, holders, strict=True):
        _call("ip", "link", "set", "dev", end, "netns", str(holder.pid), "name", INTERFACE)
    return process


def _connect(built: Network, node: int) -> None:
    inside = built.entering(node)
    _call("ip", "link", "set", "dev", port(node), "master", "switch", "up")
    _call(*inside, "ip", "addr", "add", f"{address(node)}/24", "dev", INTERFACE)
    _call(*inside, "ip", "link", "set", "dev", INTERFACE, "up")
    # At both ends, as a queue shapes only what leaves an interface.
    rate = built.cluster.rate(node)
    _call("tc", "-batch", "-", text="\n".join(_shaped_link(port(node), rate)))
    flow = built.cluster.flow
    if flow is None:
        _call(*inside, "tc", "-batch", "-", text="\n".join(_shaped_link(INTERFACE, rate)))
        if rate is not None:
            # Smaller than what the link lets through at once; by default up to 64 kB go as one.
            size = str(min(burst_bytes(rate), 65536))
            _call(*inside, "ip", "link", "set", "dev", INTERFACE, "gso_max_size", size)
    else:
        # Where they leave their node is enough: connections share nothing before that.
        _call(*inside, "tc", "-batch", "-", text="\n".join(_limited_connections(rate, flow)))
    if built.cluster.intra is not None:
        # With its usual 64 kB, single packets would not fit into the bucket.
        _call(*inside, "ip", "link", "set", "dev", "lo", "mtu", "1500")
        _call(*inside, "tc", "-batch", "-", text="\n".join(_shaped_link("lo", built.cluster.intra)))


def _shaped_link(device: str, rate: float | None) -> Iterator[str]:
    """Yields commands for `tc`: a link on which acknowledgements need not wait behind data.

    In one queue they would wait for what the other direction has in it, and a link that is busy in
    both directions would stand still at times, as no network with fair queues does.

    Args:
      device: Interface whose packets are shaped as they leave it.
      rate: Bits per second; `None` for a plain queue that counts.
    """
    if rate is None:
        yield f"qdisc add dev {device} root pfifo limit 10000"
        return
    burst = burst_bytes(rate)
    # The quantum only matters between classes of one priority; the default warns.
    both = f"ceil {rate:.0f}bit burst {burst} cburst {burst} quantum 60000"
    yield f"qdisc add dev {device} root handle 1: htb default 3"
    yield f"class add dev {device} parent 1: classid 1:1 htb rate {rate:.0f}bit {both}"
    # Each may have all of the link; the shares only say what nobody takes from the other.
    for number, share in ((2, 0.1), (3, 0.9)):
        yield (
            f"class add dev {device} parent 1:1 classid 1:{number} htb rate {share * rate:.0f}bit "
            f"prio {number} {both}"
        )
        yield f"qdisc add dev {device} parent 1:{number} bfifo limit {queue_bytes(rate)}"
    bytecode = f'bytecode "{CLASS_OF_PACKET}"'
    yield f"filter add dev {device} parent 1: protocol ip prio 1 bpf {bytecode} classid 1:3"


def _limited_connections(rate: float | None, flow: float) -> Iterator[str]:
    """Yields commands for `tc`: a class per connection, below the token bucket of the link."""
    parent = "root"
    if rate is not None:
        bucket = f"rate {rate:.0f}bit burst {burst_bytes(rate)} limit {queue_bytes(rate)}"
        yield f"qdisc add dev {INTERFACE} root handle 1: tbf {bucket}"
        parent = "parent 1:1"
    yield f"qdisc add dev {INTERFACE} {parent} handle 2: htb default 1"
    burst = burst_bytes(flow)
    # The quantum only matters between classes that borrow, which these do not; the default warns.
    limits = f"rate {flow:.0f}bit ceil {flow:.0f}bit burst {burst} cburst {burst} quantum 60000"
    for number in range(1, FLOW_CLASSES + 1):
        yield f"class add dev {INTERFACE} parent 2: classid 2:{number:x} htb {limits}"
    bytecode = f'bytecode "{CLASS_OF_CONNECTION}"'
    yield f"filter add dev {INTERFACE} parent 2: protocol ip prio 1 bpf {bytecode} classid 2:1"


def _queues(*tc: str) -> dict[str, dict[str, int]]:
    """Returns the counters of every root queue, by interface."""
    return {
        queue["dev"]: queue
        for queue in json.loads(_call(*tc, "-s", "-j", "qdisc", "show"))
        if "root" in queue
    }


def _call(*command: str, text: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done.stdout

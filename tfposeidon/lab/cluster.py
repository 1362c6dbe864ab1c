"""Description of the emulated cluster: nodes, the links between them, and faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tfposeidon import checks
from tfposeidon.text import readable_rate

# Nodes have the addresses 10.99.0.1 to 10.99.0.250, and the switch has 10.99.0.254.
MOST_NODES = 250
BURST_S = 0.001
# Two Ethernet frames. A token bucket smaller than one frame would block all packets.
SMALLEST_BURST_BYTES = 3200
QUEUE_S = 0.05
SMALLEST_QUEUE_BYTES = 2**24


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Emulated machines and the links between them.

    >>> cluster = Cluster(nodes=2, per_node=2, inter=2e8, slow=((1, 5e7),))
    >>> print(cluster)
    2 x 2 ranks, 200 Mb/s between nodes, 50 Mb/s for node 1
    >>> cluster.rate(0), cluster.rate(1)
    (200000000.0, 50000000.0)

    Each node has one link to a switch without a limit of its own, and its ranks communicate over
    its loopback. Rates are in bits per second, and `None` is unshaped: `inter` and `slow` for each
    direction of a link, `flow` for each TCP connection between nodes, and `intra` for all traffic
    of a node's loopback. Times are in seconds: `rtt` is added to each round trip, `jitter` bounds
    the variation of one direction's delay, and `loss` is the fraction of packets lost on the way to
    the switch.
    """

    nodes: int
    per_node: int = 1
    inter: float | None = None
    intra: float | None = None
    rtt: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    slow: Sequence[tuple[int, float]] = ()
    flow: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MOST_NODES:
            raise ValueError(f"`--nodes` must be in 1..{MOST_NODES}. Received: {self.nodes}")
        checks.check_integer("--per-node", self.per_node, 1)
        if self.jitter > self.rtt / 2:
            raise ValueError(
                "`--jitter` must not exceed half of `--rtt`, the time of one direction. Received: "
                f"jitter {self.jitter * 1e3:g} ms, rtt {self.rtt * 1e3:g} ms"
            )
        for node, _ in self.slow:
            self.check("--slow", "node", node)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.per_node

    def rate(self, node: int) -> float | None:
        """Returns the bits per second of a node's link, or `None` if it is unshaped."""
        return dict(self.slow).get(node, self.inter)

    @property
    def delays(self) -> bool:
        """True if packets have to be delayed or dropped, which token buckets cannot do."""
        return self.rtt > 0 or self.loss > 0

    def check(self, option: str, what: str, number: int) -> None:
        """Raises `ValueError` if an option names a "node" or a "rank" that does not exist."""
        count = self.nodes if what == "node" else self.size
        if not 0 <= number < count:
            raise ValueError(
                f"`{option}` must name a {what} in 0..{count - 1}. Received: {what} {number}"
            )

    def __str__(self) -> str:
        parts = [f"{self.nodes} x {self.per_node} ranks"]
        parts += [f"{readable_rate(self.inter)} between nodes"]
        parts += [f"{readable_rate(self.intra)} within"] if self.intra else []
        parts += [f"{readable_rate(rate)} for node {node}" for node, rate in self.slow]
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


def burst_bytes(rate: float) -> int:
    """Returns the largest burst of a link, in bytes: those of one millisecond."""
    # On the development machines, smaller bursts lost throughput under load, and larger ones made
    # short exchanges faster than the link.
    return max(round(rate / 8 * BURST_S), SMALLEST_BURST_BYTES)


def queue_bytes(rate: float) -> int:
    """Returns the capacity of a link's queue in bytes: 50 ms, at least 16 MiB."""
    # Buffers are deep, as in some switches, so that benchmarks measure schemes and not how this
    # kernel's TCP recovers from losses.
    return max(round(rate / 8 * QUEUE_S), SMALLEST_QUEUE_BYTES)

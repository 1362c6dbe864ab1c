"""What is asked of the lab: nodes, links and faults. Pure, checked at construction."""

from __future__ import annotations

from dataclasses import dataclass

from tfposeidon.units import readable_rate

MOST_NODES = 250
BURST_S = 0.001
SMALLEST_BURST_BYTES = 3200
QUEUE_S = 0.05
SMALLEST_QUEUE_BYTES = 2**24


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The emulated machines and the links between them.

    Args:
      nodes: Machines, each with one link to a switch that has no limit of its own.
      per_node: Ranks on each; they talk over the loopback.
      inter: Bits per second of a node's link, in each direction; `None` leaves it unshaped.
      intra: Bits per second of the loopback of a node; `None` leaves it unshaped.
      rtt: Seconds that a packet takes to another node and back, besides the machine's own time.
      jitter: Seconds by which the time of one direction varies, at most, up or down.
      loss: Part of the packets that get lost on their way to the switch.
      slow: Bits per second of single nodes' links, in place of `inter`.

    Raises:
      ValueError: If a value makes no sense.
    """

    nodes: int
    per_node: int = 1
    inter: float | None = None
    intra: float | None = None
    rtt: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    slow: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MOST_NODES:
            raise ValueError(f"`--nodes` must be in 1..{MOST_NODES}. Received: {self.nodes}")
        if self.per_node < 1:
            raise ValueError(f"`--per-node` must be at least 1. Received: {self.per_node}")
        if self.jitter > self.rtt / 2:
            raise ValueError(
                f"`--jitter` must not exceed half of `--rtt`, the time of one direction. Received: jitter "
                f"{self.jitter * 1e3:g} ms, rtt {self.rtt * 1e3:g} ms"
            )
        for node, _ in self.slow:
            self.check_node("--slow", node)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.per_node

    def rate(self, node: int) -> float | None:
        """Bits per second of a node's link."""
        return dict(self.slow).get(node, self.inter)

    @property
    def delays(self) -> bool:
        """True if packets have to be held back or dropped, which shaping alone does not do."""
        return self.rtt > 0 or self.loss > 0

    def check_node(self, option: str, node: int) -> None:
        """Refuses a node that is not there, naming the option that asked for it."""
        if not 0 <= node < self.nodes:
            raise ValueError(
                f"`{option}` names one of the nodes 0..{self.nodes - 1}. Received: node {node}"
            )

    def check_rank(self, option: str, rank: int) -> None:
        """Refuses a rank that is not there, naming the option that asked for it."""
        if not 0 <= rank < self.size:
            raise ValueError(
                f"`{option}` names one of the ranks 0..{self.size - 1}. Received: rank {rank}"
            )

    def __str__(self) -> str:
        parts = [
            f"{self.nodes} x {self.per_node} ranks",
            f"{readable_rate(self.inter)} between nodes",
        ]
        parts += [f"{readable_rate(self.intra)} within"] if self.intra else []
        parts += [f"{readable_rate(rate)} for node {node}" for node, rate in self.slow]
        parts += [f"{1e3 * self.rtt:g} ms round trip"] if self.rtt else []
        parts += [f"{1e3 * self.jitter:g} ms jitter"] if self.jitter else []
        parts += [f"{self.loss:.2%} lost"] if self.loss else []
        return ", ".join(parts)


def burst_bytes(rate: float) -> int:
    """What a link lets through at once: one millisecond, so that timings hardly see it.

    On the development machines smaller bursts lose rate under load, and larger ones flatter short exchanges.
    """
    return max(round(rate / 8 * BURST_S), SMALLEST_BURST_BYTES)


def queue_bytes(rate: float) -> int:
    """What waits before a link until packets are dropped: 50 ms, and 16 MiB at least, as in deep-buffered switches.

    So that schemes are measured, and not how this kernel's TCP recovers from losses.
    """
    return max(round(rate / 8 * QUEUE_S), SMALLEST_QUEUE_BYTES)

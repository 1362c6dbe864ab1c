"""What an exchange costs, as each scheme predicts it."""

from __future__ import annotations

from dataclasses import dataclass

from tfposeidon.communication.topology import Group, Topology


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Prediction for one rank and one exchange.

    Attributes:
      steps: Messages that follow one another on the longest path.
      node_bytes: Payload bytes this rank sends to ranks of its own node.
      cross_bytes: Payload bytes this rank sends to ranks of other nodes.
      flops: Floating-point additions this rank makes, other than inside Horovod.
    """

    steps: int = 0
    node_bytes: float = 0.0
    cross_bytes: float = 0.0
    flops: float = 0.0

    @property
    def bytes(self) -> float:
        return self.node_bytes + self.cross_bytes

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            steps=self.steps + other.steps,
            node_bytes=self.node_bytes + other.node_bytes,
            cross_bytes=self.cross_bytes + other.cross_bytes,
            flops=self.flops + other.flops,
        )


def sent(topology: Topology, messages: dict[int, float], *, steps: int, flops: float = 0.0) -> Cost:
    """Sums messages (receiver -> bytes) by the kind of link that they take from this rank."""
    me = topology.rank
    node = sum(
        size for peer, size in messages.items() if peer != me and topology.same_node(me, peer)
    )
    cross = sum(size for peer, size in messages.items() if not topology.same_node(me, peer))
    return Cost(steps=steps, node_bytes=node, cross_bytes=cross, flops=flops)


def ring_all_reduce(topology: Topology, group: Group, size_bytes: float) -> Cost:
    """Horovod's ring: all bytes of a rank go to one neighbour (in Gloo, the one before it).

    Cost: 2 (P - 1) steps, 2 n (P - 1) / P bytes sent per rank.
    Source: Patarasuk and Yuan 2009.
    """
    p = group.size
    neighbour = group.ranks[(group.index(topology.rank) - 1) % p]
    return sent(topology, {neighbour: 2 * size_bytes * (p - 1) / p}, steps=2 * (p - 1))


def all_to_all(
    topology: Topology, group: Group, split_bytes: list[float], flops: float = 0.0
) -> Cost:
    """Part `i` goes straight to the group's rank `i`. P - 1 steps, all that is not one's own is sent."""
    messages = dict(zip(group.ranks, split_bytes, strict=True))
    return sent(topology, messages, steps=group.size - 1, flops=flops)


def ring_all_gather(topology: Topology, group: Group, parts_bytes: list[float]) -> Cost:
    """Horovod's ring over Gloo: each rank passes on every part but the one its successor owns.

    Cost: P - 1 steps, n (P - 1) / P bytes sent per rank where the parts are equal.
    """
    p = group.size
    successor = (group.index(topology.rank) + 1) % p
    passed_on = sum(parts_bytes) - parts_bytes[successor]
    return sent(topology, {group.ranks[successor]: passed_on}, steps=p - 1)


def tree_broadcast(topology: Topology, root: int, size_bytes: float) -> Cost:
    """Gloo's binomial tree: in each round, every rank that has the values passes them on to one that has not.

    Cost: log2 P steps; the root sends log2 P times, half of the ranks not at all.
    """
    p = topology.size
    place = (topology.rank - root) % p
    rounds = (p - 1).bit_length()
    receivers = [place + 2**i for i in range(rounds) if place < 2**i and place + 2**i < p]
    return sent(
        topology, {(root + receiver) % p: size_bytes for receiver in receivers}, steps=rounds
    )

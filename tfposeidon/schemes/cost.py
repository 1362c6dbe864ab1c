"""Predicted costs of exchanges."""

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
      flops: Floating-point additions this rank makes, other than inside Horovod; multiplications
        too, where factors are multiplied.
    """

    steps: int = 0
    node_bytes: float = 0.0
    cross_bytes: float = 0.0
    flops: float = 0.0

    @property
    def bytes(self) -> float:
        """Payload bytes this rank sends to all other ranks."""
        return self.node_bytes + self.cross_bytes

    def __add__(self, other: Cost) -> Cost:
        """Returns the cost of one exchange after the other."""
        return Cost(
            steps=self.steps + other.steps,
            node_bytes=self.node_bytes + other.node_bytes,
            cross_bytes=self.cross_bytes + other.cross_bytes,
            flops=self.flops + other.flops,
        )


def cost_of_messages(
    topology: Topology, messages: dict[int, float], *, steps: int, flops: float = 0.0
) -> Cost:
    """Sums the messages of one rank by the kind of link that they take.

    Args:
      topology: Topology of the job, as the sender sees it.
      messages: Bytes for each receiver, by rank; those to the sender itself do not count.
      steps: Messages that follow one another on the longest path.
      flops: Additions that the sender makes.

    Returns:
      The sender's cost, with the bytes within its node and across nodes apart.
    """
    me = topology.rank
    node = sum(
        size for peer, size in messages.items() if peer != me and topology.same_node(me, peer)
    )
    cross = sum(size for peer, size in messages.items() if not topology.same_node(me, peer))
    return Cost(steps=steps, node_bytes=node, cross_bytes=cross, flops=flops)


def ring_all_reduce(topology: Topology, group: Group, size_bytes: float) -> Cost:
    """Predicts Horovod's ring: a rank sends all to one neighbour (in Gloo, the one before it).

    Args:
      topology: Topology of the job, as the rank that spends it sees it.
      group: The ranks of the ring.
      size_bytes: Bytes of the vector.

    Returns:
      Cost for `topology.rank`: steps, and payload bytes in its node and across nodes.

    Cost: 2 (P - 1) steps, 2 n (P - 1) / P bytes sent per rank.
    Source: Patarasuk and Yuan 2009.
    """
    p = group.size
    neighbour = group.ranks[(group.index(topology.rank) - 1) % p]
    return cost_of_messages(topology, {neighbour: 2 * size_bytes * (p - 1) / p}, steps=2 * (p - 1))


def all_to_all(
    topology: Topology, group: Group, split_bytes: list[float], flops: float = 0.0
) -> Cost:
    """Predicts an all-to-all, in which part `i` goes straight to the group's rank `i`.

    Args:
      topology: Topology of the job, as the rank that spends it sees it.
      group: The ranks that take part.
      split_bytes: Bytes of each part.
      flops: Additions that the rank makes of what it receives.

    Returns:
      Cost for `topology.rank`: steps, and payload bytes in its node and across nodes; additions as
      given.

    Cost: P - 1 steps; all parts but the rank's own are sent.
    """
    messages = dict(zip(group.ranks, split_bytes, strict=True))
    return cost_of_messages(topology, messages, steps=group.size - 1, flops=flops)


def ring_all_gather(topology: Topology, group: Group, parts_bytes: list[float]) -> Cost:
    """Predicts Horovod's ring over Gloo: a rank sends on every part but that of its successor.

    Args:
      topology: Topology of the job, as the rank that spends it sees it.
      group: The ranks of the ring.
      parts_bytes: Bytes of the part that each rank of the group contributes.

    Returns:
      Cost for `topology.rank`: steps, and payload bytes in its node and across nodes.

    Cost: P - 1 steps, n (P - 1) / P bytes sent per rank where the parts are equal.
    """
    p = group.size
    successor = (group.index(topology.rank) + 1) % p
    # The successor has its own part, which it would get last.
    sent_on = sum(parts_bytes) - parts_bytes[successor]
    return cost_of_messages(topology, {group.ranks[successor]: sent_on}, steps=p - 1)


def tree_broadcast(topology: Topology, root: int, size_bytes: float) -> Cost:
    """Predicts Gloo's binomial tree: in each round, all ranks that have the values send them on.

    Args:
      topology: Topology of the job, as the rank that spends it sees it; all ranks take part.
      root: The rank that has the values.
      size_bytes: Bytes of the vector.

    Returns:
      Cost for `topology.rank`: steps, and payload bytes in its node and across nodes.

    Cost: log2 P steps; the root sends log2 P times, half of the ranks not at all.
    """
    p = topology.size
    # Distance from the root round the ring of ranks: in round i those below 2^i have the values.
    distance = (topology.rank - root) % p
    rounds = (p - 1).bit_length()
    receivers = [distance + 2**i for i in range(rounds) if distance < 2**i and distance + 2**i < p]
    return cost_of_messages(
        topology, {(root + receiver) % p: size_bytes for receiver in receivers}, steps=rounds
    )

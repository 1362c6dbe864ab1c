"""What an exchange consists of, stage by stage, and what it costs.

A scheme describes the exchange of a bucket as a sequence of stages: transfers, which are the
collectives that it asks the wire for, and local work between them. Steps, bytes and operations are
added up from this one description.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from tfposeidon.communication import partition
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


Operation = Literal["all_reduce", "all_gather", "all_to_all", "broadcast"]
"""Collectives of the wire; see `communication.wire.Wire`."""

Kind = Literal["sum", "encode", "select", "scatter", "multiply"]
"""Kinds of local work, which take different times per element."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One collective of an exchange.

    Args:
      name: End of the collective's name, behind the prefix of the bucket; on all ranks the same.
      operation: Collective of the wire.
      group: The ranks that take part.
      parts_bytes: Payload bytes: of an all-gather the part of each rank of the group, of an
        all-to-all what this rank sends to each, of the others one number, those of the vector.
      itemsize: Bytes of an element on the wire (default 4).
      root: Rank whose values are broadcast (default 0); ignored by the others.

    Example:
      >>> from tfposeidon.communication.topology import Topology
      >>> topology = Topology.regular(rank=0, size=4, ranks_per_node=2)
      >>> ring = Transfer(
      ...     name="", operation="all_reduce", group=topology.world, parts_bytes=(4000.0,)
      ... )
      >>> ring.cost(topology)
      Cost(steps=6, node_bytes=0.0, cross_bytes=6000.0, flops=0.0)
    """

    name: str
    operation: Operation
    group: Group
    parts_bytes: tuple[float, ...]
    itemsize: int = 4
    root: int = 0

    @classmethod
    def of_vector(
        cls, operation: Operation, group: Group, length: int, *, itemsize: int = 4
    ) -> Transfer:
        """Returns a collective to which each rank of a group brings a vector of its own.

        Args:
          operation: Collective of the wire; an all-to-all cuts the vector evenly.
          group: The ranks that take part.
          length: Elements of each rank's vector.
          itemsize: Bytes of an element (default 4).
        """
        parts = {
            "all_gather": [length] * group.size,
            "all_to_all": [end - begin for begin, end in partition.even(length, group.size)],
        }.get(operation, [length])
        parts_bytes = tuple(float(itemsize * part) for part in parts)
        return cls(
            name="", operation=operation, group=group, parts_bytes=parts_bytes, itemsize=itemsize
        )

    @property
    def steps(self) -> int:
        """Messages that follow one another on the longest path."""
        p = self.group.size
        if self.operation == "all_reduce":
            return 2 * (p - 1)
        # Gloo's broadcast is a binomial tree: in each round all ranks that have the values send.
        return (p - 1).bit_length() if self.operation == "broadcast" else p - 1

    def messages(self, rank: int) -> dict[int, float]:
        """Returns what a rank of the group sends over the whole operation.

        Args:
          rank: A rank of the group.

        Returns:
          Payload bytes by receiver; what it would send to itself does not count.

        Source: Patarasuk and Yuan 2009 for the rings. As Horovod carries them out over Gloo: an
        all-reduce sends all to the neighbour before, an all-gather to the one behind.
        """
        p = self.group.size
        if p == 1:
            return {}
        me = self.group.index(rank)
        if self.operation == "all_reduce":
            return {self.group.ranks[me - 1]: 2 * self.parts_bytes[0] * (p - 1) / p}
        if self.operation == "all_gather":
            successor = (me + 1) % p
            # The successor has its own part, which it would get last.
            sent_on = sum(self.parts_bytes) - self.parts_bytes[successor]
            return {self.group.ranks[successor]: sent_on}
        if self.operation == "all_to_all":
            parts = zip(self.group.ranks, self.parts_bytes, strict=True)
            return {receiver: size for receiver, size in parts if receiver != rank}
        # Distance from the root round the ring of ranks: in round i those below 2^i have the
        # values.
        distance = (me - self.group.index(self.root)) % p
        receivers = [
            distance + 2**i for i in range(self.steps) if distance < 2**i and distance + 2**i < p
        ]
        return {
            self.group.ranks[(me - distance + receiver) % p]: self.parts_bytes[0]
            for receiver in receivers
        }

    def cost(self, topology: Topology) -> Cost:
        """Returns what `topology.rank` sends, in its node and across nodes, and the steps.

        Args:
          topology: Topology of the job, as the sender sees it.
        """
        me, messages = topology.rank, self.messages(topology.rank)
        within = sum((size for peer, size in messages.items() if topology.same_node(me, peer)), 0.0)
        return Cost(
            steps=self.steps,
            node_bytes=within,
            cross_bytes=sum(messages.values()) - within,
        )


@dataclass(frozen=True, kw_only=True)
class Work:
    """Local work of this rank between transfers.

    Args:
      name: Name of the work, unique in the exchange; on all ranks that do it the same.
      kind: Kind of work: "sum" (also reading 16 bits as 32), "encode" to 16 bits, "select" the
        largest elements, "scatter" pairs into a vector, "multiply" factors.
      elements: Elements that are read or written.
      pairs: Pairs of an index and a value that are selected or scattered (default 0).
      operations: Floating-point additions, and multiplications of factors (default 0).
    """

    name: str
    kind: Kind
    elements: float = 0.0
    pairs: float = 0.0
    operations: float = 0.0

    def cost(self, topology: Topology) -> Cost:
        """Returns the operations alone.

        Args:
          topology: Topology of the job, as this rank sees it.
        """
        return Cost(flops=self.operations)


Stage = Transfer | Work
"""One part of an exchange, after the one before it."""


def total_cost(stages: Iterable[Stage], topology: Topology) -> Cost:
    """Adds up what `topology.rank` spends on an exchange.

    Args:
      stages: Stages of the exchange, as this rank carries them out.
      topology: Topology of the job, as this rank sees it.

    Returns:
      Cost of the exchange: steps, payload bytes in the node and across nodes, and operations.
    """
    return sum((stage.cost(topology) for stage in stages), Cost())


def renamed(stages: Iterable[Stage], prefix: str) -> tuple[Stage, ...]:
    """Returns the stages with a prefix before their names.

    Args:
      stages: Stages of an exchange.
      prefix: Text that makes the names differ from those of other exchanges in the same bucket.

    Returns:
      The same stages, in their order.
    """
    return tuple(replace(stage, name=f"{prefix}.{stage.name}") for stage in stages)

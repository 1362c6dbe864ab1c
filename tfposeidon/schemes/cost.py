"""Description of an exchange as a sequence of stages, and its cost.

Stages are transfers, which are collectives, and local work between them. Steps, bytes and
operations are all derived from this one description.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from tfposeidon.communication import partition
from tfposeidon.communication.topology import Group, Topology


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Predicted cost of one exchange for one rank.

    Attributes:
      steps: Number of messages on the longest path.
      node_bytes: Payload bytes that this rank sends to ranks of its own node.
      cross_bytes: Payload bytes that this rank sends to ranks of other nodes.
      flops: Floating-point additions of this rank, except those inside Horovod; for products of
        matrices, also multiplications.
    """

    steps: int = 0
    node_bytes: float = 0.0
    cross_bytes: float = 0.0
    flops: float = 0.0

    @property
    def bytes(self) -> float:
        """Payload bytes that this rank sends to all other ranks."""
        return self.node_bytes + self.cross_bytes

    def __add__(self, other: Cost) -> Cost:
        """Returns the cost of two exchanges in sequence."""
        return Cost(
            steps=self.steps + other.steps,
            node_bytes=self.node_bytes + other.node_bytes,
            cross_bytes=self.cross_bytes + other.cross_bytes,
            flops=self.flops + other.flops,
        )


Operation = Literal["all_reduce", "all_gather", "all_to_all", "broadcast"]
"""Collectives of `communication.wire.Wire`."""

Kind = Literal["sum", "encode", "select", "scatter", "multiply"]
"""Kinds of local work, which take different times per element."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One collective of an exchange.

    Args:
      name: Suffix of the collective's name, after the prefix of the bucket; the same on all ranks.
      operation: Collective of `Wire`.
      group: Ranks that take part.
      parts_bytes: Payload bytes. For an all-gather the part of each rank of the group, for an
        all-to-all the part that this rank sends to each; for other collectives one number, the size
        of the vector.
      itemsize: Size in bytes of an element as it is sent (default 4).
      root: Rank whose values are broadcast (default 0); ignored by other collectives.

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
        """Returns the transfer of one vector per rank of a group.

        Args:
          operation: Collective of `Wire`; an all-to-all splits the vector evenly.
          group: Ranks that take part.
          length: Number of elements of each rank's vector.
          itemsize: Size of an element in bytes (default 4).
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
        """Number of messages on the longest path."""
        p = self.group.size
        if self.operation == "all_reduce":
            return 2 * (p - 1)
        # Gloo's broadcast is a binomial tree: at each step, all ranks that have the values send.
        return (p - 1).bit_length() if self.operation == "broadcast" else p - 1

    def messages(self, rank: int) -> dict[int, float]:
        """Returns the payload bytes that a rank of the group sends to each receiver."""
        # Patarasuk and Yuan 2009 for the rings, in Horovod's directions over Gloo: an all-reduce
        # sends to the preceding rank, an all-gather to the following one.
        p = self.group.size
        if p == 1:
            return {}
        me = self.group.index(rank)
        if self.operation == "all_reduce":
            return {self.group.ranks[me - 1]: 2 * self.parts_bytes[0] * (p - 1) / p}
        if self.operation == "all_gather":
            successor = (me + 1) % p
            # The successor already has its own part, which would be sent last.
            sent_on = sum(self.parts_bytes) - self.parts_bytes[successor]
            return {self.group.ranks[successor]: sent_on}
        if self.operation == "all_to_all":
            parts = zip(self.group.ranks, self.parts_bytes, strict=True)
            return {receiver: size for receiver, size in parts if receiver != rank}
        # Distance from the root in rank order, modulo p: at step i, ranks at distances below 2^i
        # have the values.
        distance = (me - self.group.index(self.root)) % p
        receivers = [
            distance + 2**i for i in range(self.steps) if distance < 2**i and distance + 2**i < p
        ]
        return {
            self.group.ranks[(me - distance + receiver) % p]: self.parts_bytes[0]
            for receiver in receivers
        }

    def cost(self, topology: Topology) -> Cost:
        """Returns the steps, and the bytes that `topology.rank` sends within and across nodes."""
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
      name: Name of the work, unique in the exchange, and the same on all ranks that do it.
      kind: `"sum"` (including the conversion from 16 to 32 bits), `"encode"` to 16 bits, `"select"`
        the largest elements, `"scatter"` pairs into a vector, or `"multiply"` matrices.
      elements: Number of elements that are read or written (default 0).
      pairs: Number of pairs of index and value that are selected or scattered (default 0).
      operations: Floating-point additions, and multiplications of matrices (default 0).
    """

    name: str
    kind: Kind
    elements: float = 0.0
    pairs: float = 0.0
    operations: float = 0.0

    def cost(self, topology: Topology) -> Cost:
        """Returns the cost, which consists of the operations."""
        return Cost(flops=self.operations)


Stage = Transfer | Work
"""One part of an exchange; stages run in sequence."""


def total_cost(stages: Iterable[Stage], topology: Topology) -> Cost:
    """Sums the cost of all stages for `topology.rank`."""
    return sum((stage.cost(topology) for stage in stages), Cost())


def renamed(stages: Iterable[Stage], prefix: str) -> tuple[Stage, ...]:
    """Returns the stages with a prefix, which makes their names unique in a bucket."""
    return tuple(replace(stage, name=f"{prefix}.{stage.name}") for stage in stages)

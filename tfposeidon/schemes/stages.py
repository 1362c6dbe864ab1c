"""Stages of an exchange: the building blocks of schemes, each next to the description of its cost.

Stages are transfers, which are collectives, and local work between transfers. Steps and bytes are
derived from the stages. A reduce-scatter here is an all-to-all followed by a local sum. Over Gloo,
these two are several times faster than Horovod's own reduce-scatter, support more dtypes and
uneven shards, and sum 16-bit values in float32. Hierarchical schemes shard a vector over
the ranks of a node (`Levels.node`), and each rank's shard again over the ranks at the same position
in all nodes (`Levels.across`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import tensorflow as tf

from tfposeidon.communication.topology import Group, Topology, even_parts
from tfposeidon.communication.wire import Wire
from tfposeidon.schemes.wire_format import decode, decode_sum, encode, wire_itemsize

Operation = Literal["all_reduce", "all_gather", "all_to_all", "broadcast"]
"""Collectives of `communication.wire.Wire`."""

Kind = Literal["sum", "encode", "select", "scatter", "multiply"]
"""Kinds of local work, which take different times per element."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Predicted cost of one exchange for one rank.

    Attributes:
      steps: Number of messages on the longest path.
      node_bytes: Payload bytes that this rank sends to ranks of its own node.
      cross_bytes: Payload bytes that this rank sends to ranks of other nodes.
    """

    steps: int = 0
    node_bytes: float = 0.0
    cross_bytes: float = 0.0

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
        )


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One collective of an exchange.

    Args:
      name: Suffix of the collective's name, after the prefix of the bucket; the same on all ranks.
      operation: Collective of `Wire`.
      group: Ranks that take part.
      parts_bytes: Numbers of payload bytes: for an all-gather, the part of each rank of the group;
        for an all-to-all, the part that this rank sends to each rank of the group; for other
        collectives, only the size of the vector.
      itemsize: Size in bytes of an element as it is sent (default 4).
      root: Rank whose values are broadcast (default 0); ignored by other collectives.

    Example:
      >>> from tfposeidon.communication.topology import Topology
      >>> topology = Topology.regular(rank=0, size=4, ranks_per_node=2)
      >>> ring = Transfer(
      ...     name="", operation="all_reduce", group=topology.world, parts_bytes=(4000.0,)
      ... )
      >>> ring.cost(topology)
      Cost(steps=6, node_bytes=0.0, cross_bytes=6000.0)
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
            "all_to_all": [end - begin for begin, end in even_parts(length, group.size)],
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
        # Gloo's broadcast is a binomial tree: at each step, all ranks with the values send them.
        return (p - 1).bit_length() if self.operation == "broadcast" else p - 1

    def messages(self, rank: int) -> dict[int, float]:
        """Returns how many payload bytes a rank of the group sends to each receiver."""
        # Rings are as in Patarasuk and Yuan 2009, in the directions that Horovod uses over Gloo: an
        # all-reduce sends to the preceding rank, an all-gather to the following one.
        p = self.group.size
        if p == 1:
            return {}
        me = self.group.index(rank)
        if self.operation == "all_reduce":
            return {self.group.ranks[me - 1]: 2 * self.parts_bytes[0] * (p - 1) / p}
        if self.operation == "all_gather":
            successor = (me + 1) % p
            # Omit the successor's own part, which would be sent last.
            sent_on = sum(self.parts_bytes) - self.parts_bytes[successor]
            return {self.group.ranks[successor]: sent_on}
        if self.operation == "all_to_all":
            parts = zip(self.group.ranks, self.parts_bytes, strict=True)
            return {receiver: size for receiver, size in parts if receiver != rank}
        # At step i, ranks at distances below 2^i from the root, in rank order modulo p, have the
        # values.
        distance = (me - self.group.index(self.root)) % p
        return {
            self.group.ranks[(me + 2**i) % p]: self.parts_bytes[0]
            for i in range(self.steps)
            if distance < 2**i < p - distance
        }

    def cost(self, topology: Topology) -> Cost:
        """Returns the steps, and the bytes that `topology.rank` sends within and across nodes."""
        messages, node = self.messages(topology.rank), topology.node.ranks
        within = sum((size for peer, size in messages.items() if peer in node), 0.0)
        cross = sum(messages.values()) - within
        return Cost(steps=self.steps, node_bytes=within, cross_bytes=cross)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Local work of this rank between transfers.

    Args:
      name: Name of the work, unique in the exchange, and the same on all ranks that do it.
      kind: `"sum"` (including the conversion from 16 to 32 bits), `"encode"` to or from 16 bits,
        `"select"` the largest elements, `"scatter"` pairs into a vector, or `"multiply"` matrices.
      elements: Number of elements that are read or written (default 0).
      pairs: Number of pairs of index and value that are selected or scattered (default 0).
      operations: Additions and multiplications of `"multiply"` (default 0).
    """

    name: str
    kind: Kind
    elements: float = 0.0
    pairs: float = 0.0
    operations: float = 0.0


Stage = Transfer | Work
"""One part of an exchange; stages run in sequence."""


def total_cost(stages: Iterable[Stage], topology: Topology) -> Cost:
    """Sums the cost of all transfers for `topology.rank`."""
    transfers = (stage for stage in stages if isinstance(stage, Transfer))
    return sum((transfer.cost(topology) for transfer in transfers), Cost())


def renamed(stages: Iterable[Stage], prefix: str) -> tuple[Stage, ...]:
    """Returns the stages with a prefix, which makes their names unique in a bucket."""
    return tuple(replace(stage, name=f"{prefix}.{stage.name}") for stage in stages)


@dataclass(frozen=True)
class Shards:
    """A vector sharded over the ranks of a group.

    Args:
      group: Ranks that take part.
      lengths: Number of elements that each of these ranks owns; 0 for ranks that only contribute.
    """

    group: Group
    lengths: tuple[int, ...]

    @classmethod
    def even(cls, length: int, group: Group, owners: int | None = None) -> Shards:
        """Shards a vector so that lengths differ by at most one element.

        Args:
          length: Number of elements of the vector.
          group: Ranks that take part.
          owners: Number of ranks that own a shard, from the first of the group; all by default.

        Returns:
          The shards, longest first; ranks after the owners have empty shards.
        """
        owners = group.size if owners is None else owners
        lengths = [end - begin for begin, end in even_parts(length, owners)]
        return cls(group, (*lengths, *([0] * (group.size - owners))))

    def length_of(self, rank: int) -> int:
        """Returns the number of elements that a rank owns.

        Args:
          rank: Rank of the group.
        """
        return self.lengths[self.group.index(rank)]

    def offset_of(self, rank: int) -> int:
        """Returns the index of the first element that a rank owns.

        Args:
          rank: Rank of the group.
        """
        return sum(self.lengths[: self.group.index(rank)])


def scatter_sum(
    vector: tf.Tensor, shards: Shards, wire: Wire, name: str, wire_dtype: str | None
) -> tf.Tensor:
    """Sums a vector over a group and returns this rank's shard.

    Args:
      vector: Vector to sum, `[sum(shards.lengths)]` floating point.
      shards: Group of ranks, with the length of each shard.
      wire: Collectives of the job.
      name: Name of the collective, the same on every rank.
      wire_dtype: Dtype in which values are sent; `None` for the vector's own.

    Returns:
      `[own length]` in the vector's dtype; values that are sent in 16 bits are summed in float32.
    """
    if shards.group.size == 1:
        return vector
    received = wire.all_to_all(encode(vector, wire_dtype), shards.lengths, shards.group, name)
    own_length = shards.length_of(wire.topology.rank)
    if own_length == 0:
        # The result is empty, but must depend on the collective: TensorFlow would fold a constant
        # and drop the collective.
        return decode(received, wire_dtype, vector.dtype)
    # `received` is this shard from every rank, concatenated. Only the owner sums it and sends the
    # result, so ranks get the same bits for any order of TensorFlow's additions.
    received = tf.ensure_shape(received, [shards.group.size * own_length])
    return decode_sum(received, shards.group.size, wire_dtype, vector.dtype)


def gather(encoded: tf.Tensor, shards: Shards, wire: Wire, name: str) -> tf.Tensor:
    """Gathers all shards on every rank, with the same bits on each.

    Values stay encoded, so that hierarchical schemes, which gather twice, convert them only once.

    Args:
      encoded: Shard of this rank, `[own length]`, in the dtype that is sent.
      shards: Group of ranks, with the length of each shard.
      wire: Collectives of the job.
      name: Name of the collective, the same on every rank.

    Returns:
      `[sum(shards.lengths)]` in the dtype of `encoded`.
    """
    if shards.group.size == 1:
        return encoded
    return tf.ensure_shape(wire.all_gather(encoded, shards.group, name), [sum(shards.lengths)])


def scatter_sum_stages(
    shards: Shards, itemsize: int, topology: Topology, wire_dtype: str | None, name: str
) -> tuple[Stage, ...]:
    """Describes `scatter_sum`: P - 1 messages of a shard each, whose values are then summed.

    Args:
      shards: Group of ranks, with the length of each shard.
      itemsize: Size in bytes of an element in the vector's own dtype.
      topology: Topology of the job; `topology.rank` is the rank described.
      wire_dtype: Dtype in which values are sent; `None` for the vector's own.
      name: Name of the collective.

    Returns:
      The stages; none for a group of one rank.
    """
    p, own = shards.group.size, shards.length_of(topology.rank)
    if p == 1:
        return ()
    width = wire_itemsize(wire_dtype, itemsize)
    sizes = tuple(float(n * width) for n in shards.lengths)
    transfer = Transfer(
        name=name, operation="all_to_all", group=shards.group, parts_bytes=sizes, itemsize=width
    )
    added = Work(name=f"{name}.sum", kind="sum", elements=p * own)
    return (*encoding(sum(shards.lengths), wire_dtype, f"{name}.encode"), transfer, added)


def gather_stages(
    shards: Shards, itemsize: int, wire_dtype: str | None, name: str
) -> tuple[Stage, ...]:
    """Describes `gather`: P - 1 messages of a shard each.

    Args:
      shards: Group of ranks, with the length of each shard.
      itemsize: Size in bytes of an element in the vector's own dtype.
      wire_dtype: Dtype in which values are sent; `None` for the vector's own.
      name: Name of the collective.

    Returns:
      The stages; none for a group of one rank.
    """
    width = wire_itemsize(wire_dtype, itemsize)
    return gathering(shards.group, [float(n * width) for n in shards.lengths], name, width)


def gathering(
    group: Group, parts_bytes: Sequence[float], name: str, itemsize: int = 4
) -> tuple[Stage, ...]:
    """Describes an all-gather.

    Args:
      group: Ranks that take part.
      parts_bytes: Bytes that each of them contributes.
      name: Name of the collective.
      itemsize: Size in bytes of an element as it is sent (default 4).

    Returns:
      The transfer; none for a group of one rank.
    """
    sizes = tuple(parts_bytes)
    transfer = Transfer(
        name=name, operation="all_gather", group=group, parts_bytes=sizes, itemsize=itemsize
    )
    return () if group.size == 1 else (transfer,)


def encoding(length: int, wire_dtype: str | None, name: str) -> tuple[Stage, ...]:
    """Describes `wire_format.encode` or `decode`; returns no work without a `wire_dtype`."""
    return () if wire_dtype is None else (Work(name=name, kind="encode", elements=length),)


@dataclass(frozen=True)
class Levels:
    """A vector sharded over the ranks of a node, and this rank's shard again over nodes.

    If nodes differ in size, only ranks at positions that exist in every node own shards. The other
    ranks do not take part in exchanges across nodes.
    """

    length: int
    topology: Topology

    @cached_property
    def node(self) -> Shards:
        """Shards of the vector over the ranks of the node."""
        return Shards.even(self.length, self.topology.node, owners=self.topology.positions)

    @cached_property
    def across(self) -> Shards:
        """Shards of this rank's shard over nodes."""
        group = self.topology.across or Group((self.topology.rank,))
        return Shards.even(self.shard_length, group)

    @property
    def shard_length(self) -> int:
        """Number of elements of this rank's shard of `node`."""
        return self.node.length_of(self.topology.rank)

    def own_mean(
        self, vector: tf.Tensor, wire: Wire, name: str, wire_dtype: str | None
    ) -> tf.Tensor:
        """Averages the part of the vector that this rank owns across nodes."""
        shard = scatter_sum(vector, self.node, wire, f"{name}.node_scatter", wire_dtype)
        return self.mean_across(shard, wire, name, wire_dtype)

    def mean_across(
        self, shard: tf.Tensor, wire: Wire, name: str, wire_dtype: str | None
    ) -> tf.Tensor:
        """Averages this rank's part of `shard`, the node's sum, over all ranks of the job."""
        # Divide once, by the number of all ranks: a mean of node means would weight uneven nodes
        # equally.
        size, name = tf.cast(wire.topology.size, shard.dtype), f"{name}.across_scatter"
        if wire_dtype is None:
            # Divide last, so that sums of integers are exact.
            return scatter_sum(shard, self.across, wire, name, None) / size
        # Divide before values are sent in 16 bits, because a node's sum may exceed their range.
        return scatter_sum(shard / size, self.across, wire, name, wire_dtype)

    def gather(self, own: tf.Tensor, wire: Wire, name: str, wire_dtype: str | None) -> tf.Tensor:
        """Gathers the vector from the parts of all ranks, with the same bits on each."""
        # Values are encoded once for both levels, so that they are rounded once. Gathering reverses
        # the order of scattering: parts of other nodes complete the shard of the node's vector.
        encoded = gather(encode(own, wire_dtype), self.across, wire, f"{name}.across_gather")
        gathered = gather(encoded, self.node, wire, f"{name}.node_gather")
        return decode(gathered, wire_dtype, own.dtype)

    def stages(self, itemsize: int, wire_dtype: str | None) -> tuple[Stage, ...]:
        """Describes `own_mean` and `gather`."""
        scatter = scatter_sum_stages(self.node, itemsize, self.topology, wire_dtype, "node_scatter")
        return scatter + self.stages_across(itemsize, wire_dtype)

    def stages_across(self, itemsize: int, wire_dtype: str | None) -> tuple[Stage, ...]:
        """Describes `mean_across` and `gather`."""
        across, topology = self.across, self.topology
        return (
            *scatter_sum_stages(across, itemsize, topology, wire_dtype, "across_scatter"),
            *encoding(across.length_of(topology.rank), wire_dtype, "encode"),
            *gather_stages(across, itemsize, wire_dtype, "across_gather"),
            *gather_stages(self.node, itemsize, wire_dtype, "node_gather"),
            *encoding(self.length, wire_dtype, "decode"),
        )

"""Dense schemes, which send all elements: averages by four methods, and the maximum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tfposeidon.communication.topology import Topology
from tfposeidon.communication.wire import Wire
from tfposeidon.schemes import stages
from tfposeidon.schemes.base import Scheme, State
from tfposeidon.schemes.stages import Levels, Stage, Transfer, Work
from tfposeidon.schemes.wire_format import check_wire_dtype, decode, encode, wire_itemsize


@dataclass(frozen=True, kw_only=True)
class _WithWireDtype:
    """Mix-in for schemes whose only error is the rounding of values that are sent."""

    # This class must precede the scheme's other base class, whose `exact` it overrides.
    wire_dtype: str | None = None

    def __post_init__(self) -> None:
        check_wire_dtype(self.wire_dtype)

    @property
    def exact(self) -> bool:
        """True if values are sent in the gradient's own dtype."""
        return self.wire_dtype is None


@dataclass(frozen=True, kw_only=True)
class AllReduce(_WithWireDtype, Scheme):
    """Averages gradients by Horovod's all-reduce (a ring over Gloo, NCCL's choice on GPUs).

    Args:
      wire_dtype: Dtype in which values are sent: `None` for the gradient's own (default), or
        `"float16"`, in which Horovod also sums.

    Raises:
      ValueError: If `wire_dtype` has another value.

    Cost: 2 (P - 1) steps, 2 n (P - 1) / P elements sent per rank.

    Example:
      >>> from tfposeidon.schemes import AllReduce, Topology
      >>> int(AllReduce().cost(1000, itemsize=4, topology=Topology.regular(0, 4, 2)).bytes)
      6000
      >>> AllReduce(wire_dtype="float16").exact
      False
    """

    def __post_init__(self) -> None:
        remedy = 'Use AllToAll(wire_dtype="bfloat16"): Horovod cannot sum bfloat16.'
        check_wire_dtype(self.wire_dtype, ("float16",), remedy)

    @override
    def exchange(
        self, gradient: tf.Tensor, state: State, wire: Wire, name: str
    ) -> tuple[tf.Tensor, State]:
        world = wire.topology.world
        if self.wire_dtype is None:
            return wire.all_reduce(gradient, world, name, scale=1.0 / world.size), state
        # Scale before the cast: the sum of P ranks must not overflow float16.
        scaled = gradient / tf.cast(world.size, gradient.dtype)
        summed = wire.all_reduce(encode(scaled, self.wire_dtype), world, name)
        return decode(summed, self.wire_dtype, gradient.dtype), state

    @override
    def stages(self, length: int, itemsize: int, topology: Topology) -> tuple[Stage, ...]:
        width = wire_itemsize(self.wire_dtype, itemsize)
        return (
            *stages.encoding(length, self.wire_dtype, "encode"),
            Transfer.of_vector("all_reduce", topology.world, length, itemsize=width),
            *stages.encoding(length, self.wire_dtype, "decode"),
        )


class _ByLevels(Scheme):
    """Averages a vector within each node, and then across nodes."""

    wire_dtype: str | None = None

    @override
    def exchange(
        self, gradient: tf.Tensor, state: State, wire: Wire, name: str
    ) -> tuple[tf.Tensor, State]:
        levels = self._levels(gradient.shape[0], wire.topology)
        own = levels.own_mean(gradient, wire, name, self.wire_dtype)
        return levels.gather(own, wire, name, self.wire_dtype), state

    @override
    def stages(self, length: int, itemsize: int, topology: Topology) -> tuple[Stage, ...]:
        return self._levels(length, topology).stages(itemsize, self.wire_dtype)

    def _levels(self, length: int, topology: Topology) -> Levels:
        return Levels(length, topology)


@dataclass(frozen=True, kw_only=True)
class AllToAll(_WithWireDtype, _ByLevels):
    """Averages gradients by all-to-all, local sum and all-gather (ASA of Theano-MPI).

    Args:
      wire_dtype: Dtype in which values are sent: `None` for the gradient's own (default), or
        `"float16"` or `"bfloat16"`. 16-bit values have half the bytes of float32, and are summed in
        float32. With float16, values beyond 65504 become infinite.

    Raises:
      ValueError: If `wire_dtype` has another value.

    Cost: 2 (P - 1) steps, 2 n (P - 1) / P elements sent per rank.
    Source: Ma, Mao and Taylor 2016 (Theano-MPI), section 3.2. Differs: parts differ by at most one
    element where P does not divide n; bfloat16 is supported.

    Example:
      >>> from tfposeidon.schemes import AllToAll, Topology
      >>> half = AllToAll(wire_dtype="bfloat16")
      >>> int(half.cost(1000, itemsize=4, topology=Topology.regular(0, 4, 2)).bytes)
      3000
    """

    @override
    def _levels(self, length: int, topology: Topology) -> Levels:
        return Levels(length, Topology(topology.rank, (topology.world.ranks,)))


@dataclass(frozen=True, kw_only=True)
class Torus2D(_WithWireDtype, _ByLevels):
    """Averages by reduce-scatter in the node, all-reduce across nodes, and all-gather (2DTAR).

    With m nodes of n ranks, the ranks at the same position in all nodes all-reduce their shard, so
    all n network interfaces of a node are busy at once.

    Args:
      wire_dtype: Dtype in which values are sent: `None` for the gradient's own (default), or
        `"float16"` or `"bfloat16"`; see `AllToAll`.

    Raises:
      ValueError: If `wire_dtype` has another value.

    Cost: 2 (n - 1) steps and 2 d (n - 1) / n elements sent per rank in the node; 2 (m - 1) steps
    and 2 d (m - 1) / (m n) across nodes, for d elements.
    Source: Shi et al. 2021 (CommLib), section 5.3; Mikami et al. 2018. Differs: each reducing stage
    is an all-to-all with a local sum (Theano-MPI's, see `stages`); if nodes differ in size, only
    ranks at positions that exist in every node own shards, and the other ranks only contribute.

    Example:
      >>> from tfposeidon.schemes import Torus2D, Topology
      >>> cost = Torus2D().cost(1000, itemsize=4, topology=Topology.regular(0, 4, 2))
      >>> int(cost.node_bytes), int(cost.cross_bytes)
      (4000, 2000)
    """


@dataclass(frozen=True, kw_only=True)
class ParameterServer(_ByLevels):
    """Averages gradients by reduce-scatter and all-gather over shard owners (PS of Poseidon).

    Every node is both worker and shard owner. A bucket is split into equal parts, one per node. The
    ranks of a node first sum their gradients, and each rank owns a shard of the node's part.

    Every rank updates all variables with the averaged gradients. In
    `tfposeidon.ShardedOptimizer`, shard owners instead retain their averaged gradients and
    optimizer state, and updated variables are gathered.

    Cost: 2 (P - 1) steps; over all buckets 2 d (P - 1) / P elements sent per node and as many
    received, for P nodes and d elements.
    Source: Zhang et al. 2017 (Poseidon), sections 4.1 and 5.1; push is an all-to-all with a local
    sum, and pull is an all-gather. Differs: every bucket is sharded over all nodes, whereas each of
    Poseidon's key-value pairs has one server. Horovod runs one exchange after another: with a
    bucket on one server, only that server's network connection would be busy.

    Example:
      >>> from tfposeidon.schemes import ParameterServer, Topology
      >>> ParameterServer().own_range(10, Topology.regular(1, size=4, ranks_per_node=1))
      (3, 6)
    """

    name: ClassVar[str] = "ps"

    def own_range(self, length: int, topology: Topology) -> tuple[int, int]:
        """Returns the shard that `topology.rank` owns.

        Args:
          length: Number of elements of the bucket.
          topology: Topology of the job.

        Returns:
          Start and end of the shard, which are equal if the rank owns none.
        """
        levels, rank = Levels(length, topology), topology.rank
        begin = levels.node.offset_of(rank) + levels.across.offset_of(rank)
        return begin, begin + levels.across.length_of(rank)


@dataclass(frozen=True, kw_only=True)
class Largest(Scheme):
    """Returns the elementwise maximum over all ranks, by an all-gather.

    Plans use this scheme for variables with `overwrite_with_gradient`, such as float8 scales and
    histories, which are never negative. Keras computes the maximum over accumulated calls, and this
    scheme computes it over ranks. No policy chooses this scheme.
    """

    averages: ClassVar[bool] = False

    @override
    def exchange(
        self, gradient: tf.Tensor, state: State, wire: Wire, name: str
    ) -> tuple[tf.Tensor, State]:
        gathered = wire.all_gather(gradient[tf.newaxis], wire.topology.world, name)
        return tf.reduce_max(gathered, 0), state

    @override
    def stages(self, length: int, itemsize: int, topology: Topology) -> tuple[Stage, ...]:
        gather = Transfer.of_vector("all_gather", topology.world, length, itemsize=itemsize)
        return gather, Work(name="largest", kind="sum", elements=length * topology.size)

"""The ranks of one node as a job of their own."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from typing_extensions import override

from tfposeidon.communication.topology import Group, Topology
from tfposeidon.communication.wire import Wire


class NodeWire(Wire):
    """Wire between the ranks of this rank's node, which it numbers from 0.

    Args:
      wire: Wire between all ranks of the job.

    Attributes:
      topology: The node's ranks, as a job of a single node.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire, self._node = wire, wire.topology.node
        own = tuple(range(self._node.size))
        self.topology = Topology(wire.topology.position, (own,))

    @override
    def all_reduce(
        self, tensor: tf.Tensor, group: Group, name: str, scale: float = 1.0
    ) -> tf.Tensor:
        return self._wire.all_reduce(tensor, self._in_job(group), name, scale)

    @override
    def all_gather(self, tensor: tf.Tensor, group: Group, name: str) -> tf.Tensor:
        return self._wire.all_gather(tensor, self._in_job(group), name)

    @override
    def all_to_all(
        self, tensor: tf.Tensor, splits: Sequence[int | tf.Tensor], group: Group, name: str
    ) -> tf.Tensor:
        return self._wire.all_to_all(tensor, splits, self._in_job(group), name)

    @override
    def broadcast(self, tensor: tf.Tensor, root_rank: int, name: str) -> tf.Tensor:
        # Horovod's broadcasts here are of the whole job.
        return self.all_gather(tensor[tf.newaxis], self.topology.world, name)[root_rank]

    def _in_job(self, group: Group) -> Group:
        return Group(tuple(self._node.ranks[rank] for rank in group.ranks))

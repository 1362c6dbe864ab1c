"""Some ranks of a job as a job of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf
from typing_extensions import override

from tfposeidon.communication.topology import Group, Topology
from tfposeidon.communication.wire import Wire


class GroupWire(Wire):
    """Wire between some ranks of a job, this one among them, which it numbers from 0.

    Args:
      wire: Wire between all ranks of the job.
      ranks: Ranks of the job that take part, a group for which Horovod has a process set.

    Attributes:
      topology: These ranks and their nodes, as a job.
    """

    def __init__(self, wire: Wire, ranks: Iterable[int]) -> None:
        self._wire, self._ranks = wire, tuple(sorted(ranks))
        job = wire.topology
        nodes = [[r for r in node if r in self._ranks] for node in job.nodes]
        numbered = [tuple(self._ranks.index(r) for r in node) for node in nodes if node]
        self.topology = Topology(self._ranks.index(job.rank), tuple(numbered))

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
        return Group(tuple(self._ranks[rank] for rank in group.ranks))

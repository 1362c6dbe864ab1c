"""A subset of the ranks of a job, presented as a separate job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf
from typing_extensions import override

from tfposeidon.communication.topology import Group, Topology
from tfposeidon.communication.wire import Wire


class GroupWire(Wire):
    """Collectives between some ranks of a job, numbered from 0, including this rank.

    Horovod must have a process set for these ranks. `topology` describes them and their nodes.
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
        # `HorovodWire.broadcast` always includes the whole job.
        return self.all_gather(tensor[tf.newaxis], self.topology.world, name)[root_rank]

    def _in_job(self, group: Group) -> Group:
        return Group(tuple(self._ranks[rank] for rank in group.ranks))

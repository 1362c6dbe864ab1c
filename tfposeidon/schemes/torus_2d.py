"""2D-torus all-reduce: most bytes stay on the fast links inside the nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from tfposeidon.communication.topology import Topology
from tfposeidon.communication.wire import Wire
from tfposeidon.schemes import stages
from tfposeidon.schemes.base import State, VectorScheme
from tfposeidon.schemes.cost import Cost
from tfposeidon.schemes.wire_format import check_wire_dtype


@dataclass(frozen=True, kw_only=True)
class Torus2D(VectorScheme):
    """Reduce-scatter in the node, all-reduce across nodes, all-gather in the node.

    With m nodes of n ranks, the ranks at one position of every node all-reduce their shard across
    nodes, so that all n links of the node are busy at once.

    Args:
      wire_dtype: As in `AllToAll`.

    Raises:
      ValueError: If `wire_dtype` is neither `None`, `"float16"` nor `"bfloat16"`.

    Cost: 2 (n - 1) steps and 2 d (n - 1) / n elements sent per rank in the node; 2 (m - 1) steps and
    2 d (m - 1) / (m n) across nodes, for d elements.
    Source: Shi et al. 2021 (CommLib), section 5.3; Mikami et al. 2018. Differs: each stage that
    reduces is an all-to-all with a local sum (Theano-MPI's, see `stages`); where nodes differ in
    size, shards go to the positions that every node has and the other ranks only contribute.
    """

    name: ClassVar[str] = "2dtar"
    wire_dtype: str | None = None

    def __post_init__(self) -> None:
        check_wire_dtype(self.wire_dtype)

    @property
    def exact(self) -> bool:
        return self.wire_dtype is None

    def exchange(
        self, gradient: tf.Tensor, state: State, wire: Wire, name: str
    ) -> tuple[tf.Tensor, State]:
        node, across = stages.levels(gradient.shape[0], wire.topology)
        return stages.mean_by_levels(gradient, node, across, wire, name, self.wire_dtype), state

    def cost(self, length: int, itemsize: int, topology: Topology) -> Cost:
        return stages.cost_by_levels(
            *stages.levels(length, topology), itemsize, topology, self.wire_dtype
        )

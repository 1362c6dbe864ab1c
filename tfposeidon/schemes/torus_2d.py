"""2D-torus all-reduce, which keeps most bytes on the fast network inside the nodes."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf
from typing_extensions import override

from tfposeidon.communication.topology import Topology
from tfposeidon.communication.wire import Wire
from tfposeidon.schemes import stages
from tfposeidon.schemes.base import Scheme, State
from tfposeidon.schemes.cost import Stage
from tfposeidon.schemes.wire_format import WithWireDtype


@dataclass(frozen=True, kw_only=True)
class Torus2D(WithWireDtype, Scheme):
    """Reduce-scatter in the node, all-reduce across nodes, all-gather in the node (2DTAR).

    With m nodes of n ranks, the ranks at one position of every node all-reduce their shard across
    nodes, so all n network interfaces of a node are busy at once.

    Args:
      wire_dtype: Dtype in which values are sent: `None` for the gradient's own (default), or
        `"float16"` or `"bfloat16"`; see `AllToAll`.

    Raises:
      ValueError: If `wire_dtype` is anything else.

    Cost: 2 (n - 1) steps and 2 d (n - 1) / n elements sent per rank in the node; 2 (m - 1) steps
    and 2 d (m - 1) / (m n) across nodes, for d elements.
    Source: Shi et al. 2021 (CommLib), section 5.3; Mikami et al. 2018. Differs: each reducing stage
    is an all-to-all with a local sum (Theano-MPI's, see `stages`); if nodes differ in size, only
    positions that every node has own shards, and the other ranks only contribute.

    Example:
      >>> from tfposeidon import schemes
      >>> from tfposeidon.communication.topology import Topology
      >>> cost = schemes.Torus2D().cost(1000, itemsize=4, topology=Topology.regular(0, 4, 2))
      >>> int(cost.node_bytes), int(cost.cross_bytes)
      (4000, 2000)
    """

    @override
    def exchange(
        self, gradient: tf.Tensor, state: State, wire: Wire, name: str
    ) -> tuple[tf.Tensor, State]:
        return stages.mean_by_levels(gradient, wire, name, self.wire_dtype), state

    @override
    def stages(self, length: int, itemsize: int, topology: Topology) -> tuple[Stage, ...]:
        return stages.stages_by_levels(length, itemsize, topology, self.wire_dtype)

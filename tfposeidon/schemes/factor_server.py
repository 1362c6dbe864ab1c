"""Project Adam's way: factors are pushed to one server, the whole matrix is pulled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tfposeidon.communication.topology import Topology
from tfposeidon.communication.wire import Wire
from tfposeidon.gradients.factors import Factors, FactorShape
from tfposeidon.schemes import stages
from tfposeidon.schemes.base import FactorScheme
from tfposeidon.schemes.cost import Stage, Transfer


@dataclass(frozen=True, kw_only=True)
class FactorServer(FactorScheme):
    """Sends all factors to the server of the variable, which sends their product to all ranks.

    This is what Poseidon is compared with: the server's link carries far more than the others'.

    Args:
      server: The rank that serves. `None` (default) lets the coordinator give each variable the
        rank that serves fewest bytes; used without a coordinator, it is rank 0.

    Cost: K (M + N) values pushed by each of P - 1 ranks; M N values pulled, P - 1 times in all,
    down a binomial tree.
    Source: Chilimbi et al. 2014 (Project Adam), as compared in Zhang et al. 2017 (Poseidon),
    sections 3.2 and 5.3. Differs: the matrix comes down Horovod's tree, so that the server sends it
    log2 P times and not P - 1 times.

    Example:
      >>> from tfposeidon import schemes
      >>> from tfposeidon.communication.topology import Topology
      >>> from tfposeidon.gradients.factors import FactorShape
      >>> factors = FactorShape(rows=32, left=1024, right=1024, dtype="float32")
      >>> worker = Topology.regular(1, size=4, ranks_per_node=1)
      >>> int(schemes.FactorServer(server=0).factor_cost(factors, worker).bytes) // 2**10
      4352
    """

    name: ClassVar[str] = "adam"
    loads_evenly: ClassVar[bool] = False
    server: int | None = None

    def __str__(self) -> str:
        return self.name

    @override
    def fitted(
        self, factors: FactorShape, topology: Topology, served_bytes: list[float]
    ) -> FactorServer:
        # Buckets come in the same order on all ranks, so that all find the same server.
        server = min(range(len(served_bytes)), key=served_bytes.__getitem__)
        served_bytes[server] += factors.matrix_bytes
        return replace(self, server=server)

    @override
    def exchange_factors(self, factors: Factors, wire: Wire, name: str) -> tf.Tensor:
        world, root = wire.topology.world, self.server or 0
        rows = factors.packed
        # A gather to one rank, which Horovod has not: an all-to-all that is empty for all others.
        splits = [tf.shape(rows)[0] if rank == root else 0 for rank in world.ranks]
        # The others multiply no rows, and get zeros of the right size to receive into.
        total = factors.product(wire.all_to_all(rows, splits, world, f"{name}.push"))
        return wire.broadcast(total / tf.cast(world.size, total.dtype), root, f"{name}.pull")

    @override
    def factor_stages(self, factors: FactorShape, topology: Topology) -> tuple[Stage, ...]:
        world, root = topology.world, self.server or 0
        if world.size == 1:
            return (stages.product(factors, 1),)
        pushed = [float(factors.bytes) if rank == root else 0.0 for rank in world.ranks]
        push = Transfer(
            name="push",
            operation="all_to_all",
            group=world,
            parts_bytes=tuple(pushed),
            itemsize=factors.itemsize,
        )
        pull = Transfer(
            name="pull",
            operation="broadcast",
            group=world,
            parts_bytes=(float(factors.matrix_bytes),),
            itemsize=factors.matrix_bytes // (factors.left * factors.right),
            root=root,
        )
        if topology.rank != root:
            return push, pull
        return push, stages.product(factors, world.size), pull

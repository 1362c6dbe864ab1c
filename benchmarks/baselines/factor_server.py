"""Scheme of Project Adam: ranks send factors to one server and receive the whole matrix."""

import dataclasses
import re

import tensorflow as tf
from typing_extensions import override

from tfposeidon import schemes


@dataclasses.dataclass(frozen=True, kw_only=True)
class FactorServer(schemes.FactorScheme):
    """Sends all factors to the server of the variable, which sends their product to all ranks.

    The Poseidon paper compares Poseidon with this scheme, whose server sends and receives most.

    Args:
      server: Rank of the server (default 0); `balanced` assigns a server to each variable.

    Cost: each of P - 1 ranks sends K (M + N) values; along a binomial tree, M N values are sent
    P - 1 times in all.
    Source: Chilimbi et al. 2014 (Project Adam), as compared in Zhang et al. 2017 (Poseidon),
    sections 3.2 and 5.3. Differs: Horovod broadcasts the matrix along a tree, so the server sends
    it log2 P times instead of P - 1 times.

    Example:
      >>> factors = schemes.FactorShape(rows=32, left=1024, right=1024, dtype="float32")
      >>> worker = schemes.Topology.regular(1, size=4, ranks_per_node=1)
      >>> int(FactorServer(server=0).factor_cost(factors, worker).bytes) // 2**10
      4352
    """

    loads_evenly = False
    server: int = 0

    @override
    def exchange_factors(self, factors, wire, name):
        world, rows = wire.topology.world, factors.packed
        # Horovod has no gather to one rank, so use an all-to-all with empty parts for other ranks.
        splits = [tf.shape(rows)[0] if rank == self.server else 0 for rank in world.ranks]
        # Other ranks have no rows: their product is a zero matrix, which the broadcast overwrites.
        total = factors.product(wire.all_to_all(rows, splits, world, f"{name}.push"))
        return wire.broadcast(total / tf.cast(world.size, total.dtype), self.server, f"{name}.pull")

    @override
    def factor_stages(self, factors, topology):
        world, product = topology.world, factors.multiplication(topology.size)
        if world.size == 1:
            return (product,)
        pushed = [float(factors.bytes) if rank == self.server else 0.0 for rank in world.ranks]
        push = schemes.Transfer(
            name="push",
            operation="all_to_all",
            group=world,
            parts_bytes=tuple(pushed),
            itemsize=factors.itemsize,
        )
        pull = schemes.Transfer(
            name="pull",
            operation="broadcast",
            group=world,
            parts_bytes=(float(factors.matrix_bytes),),
            itemsize=factors.matrix_bytes // (factors.left * factors.right),
            root=self.server,
        )
        return (push, product, pull) if topology.rank == self.server else (push, pull)


def balanced(kernels, ranks):
    """Returns rules that assign each kernel to the server with the fewest elements so far.

    Args:
      kernels: Path and number of elements of each kernel, in the same order on all ranks.
      ranks: Number of ranks.

    Example:
      >>> rules = balanced([("dense1/kernel", 10), ("dense2/kernel", 30), ("out/kernel", 5)], 2)
      >>> [(pattern, scheme.server) for pattern, scheme in rules]
      [('dense1/kernel$', 0), ('dense2/kernel$', 1), ('out/kernel$', 0)]
    """
    served, rules = [0] * ranks, []
    for path, length in kernels:
        server = served.index(min(served))
        served[server] += length
        rules.append((f"{re.escape(path)}$", FactorServer(server=server)))
    return rules

"""Communication schemes, the names under which `scheme=` finds them, and what a new one needs."""

from collections.abc import Callable

from tfposeidon.communication.topology import Group, Topology
from tfposeidon.communication.wire import Wire
from tfposeidon.gradients.factors import Factors, FactorShape
from tfposeidon.schemes import stages
from tfposeidon.schemes.all_reduce import AllReduce
from tfposeidon.schemes.all_to_all import AllToAll
from tfposeidon.schemes.base import FactorScheme, Scheme, Slot, State, VectorScheme
from tfposeidon.schemes.by_rows import ByRows
from tfposeidon.schemes.cost import Cost, Stage, Transfer, Work
from tfposeidon.schemes.factor_broadcast import FactorBroadcast
from tfposeidon.schemes.hierarchical_top_k import HierarchicalTopK
from tfposeidon.schemes.residual import ResidualScheme
from tfposeidon.schemes.sharded_server import ShardedServer
from tfposeidon.schemes.top_k_all_gather import TopKAllGather
from tfposeidon.schemes.torus_2d import Torus2D

REGISTRY: dict[str, Callable[[], Scheme]] = {
    "allreduce": AllReduce,
    "asa": AllToAll,
    "asa16": lambda: AllToAll(wire_dtype="float16"),
    "2dtar": Torus2D,
    "ps": ShardedServer,
    "sfb": FactorBroadcast,
    "hitopk": HierarchicalTopK,
    "topk": TopKAllGather,
}
"""Makes a scheme with its defaults, by the name that users pass as `scheme=`."""

__all__ = [
    "REGISTRY",
    "AllReduce",
    "AllToAll",
    "ByRows",
    "Cost",
    "FactorBroadcast",
    "FactorScheme",
    "FactorShape",
    "Factors",
    "Group",
    "HierarchicalTopK",
    "ResidualScheme",
    "Scheme",
    "ShardedServer",
    "Slot",
    "Stage",
    "State",
    "TopKAllGather",
    "Topology",
    "Torus2D",
    "Transfer",
    "VectorScheme",
    "Wire",
    "Work",
    "stages",
]

"""Communication schemes, their names for `scheme=`, and the classes that a custom scheme needs."""

from collections.abc import Callable

from tfposeidon.communication.topology import Group, Topology
from tfposeidon.communication.wire import Wire
from tfposeidon.gradients.factors import FactorPair, FactorShape
from tfposeidon.schemes import stages
from tfposeidon.schemes.all_reduce import AllReduce
from tfposeidon.schemes.all_to_all import AllToAll
from tfposeidon.schemes.base import FactorScheme, Scheme, Slot, State, VectorScheme
from tfposeidon.schemes.by_rows import ByRows
from tfposeidon.schemes.cost import Cost, Stage, Transfer, Work
from tfposeidon.schemes.factors import Factors
from tfposeidon.schemes.hi_top_k import HiTopK
from tfposeidon.schemes.parameter_server import ParameterServer
from tfposeidon.schemes.residual import ResidualScheme
from tfposeidon.schemes.top_k import TopK
from tfposeidon.schemes.torus_2d import Torus2D

REGISTRY: dict[str, Callable[[], Scheme]] = {
    "allreduce": AllReduce,
    "alltoall": AllToAll,
    "torus2d": Torus2D,
    "ps": ParameterServer,
    "factors": Factors,
    "hitopk": HiTopK,
    "topk": TopK,
}
"""Constructors of schemes with default options, by the name that users pass as `scheme=`."""

__all__ = [
    "REGISTRY",
    "AllReduce",
    "AllToAll",
    "ByRows",
    "Cost",
    "FactorPair",
    "FactorScheme",
    "FactorShape",
    "Factors",
    "Group",
    "HiTopK",
    "ParameterServer",
    "ResidualScheme",
    "Scheme",
    "Slot",
    "Stage",
    "State",
    "TopK",
    "Topology",
    "Torus2D",
    "Transfer",
    "VectorScheme",
    "Wire",
    "Work",
    "stages",
]

"""Communication schemes, their names for `scheme=`, and the classes that custom schemes need."""

from collections.abc import Callable
from typing import Any

from tfposeidon.communication.topology import Group, Topology
from tfposeidon.communication.wire import Wire
from tfposeidon.schemes import names, stages
from tfposeidon.schemes.base import ResidualScheme, Scheme, Slot, State
from tfposeidon.schemes.dense import AllReduce, AllToAll, ParameterServer, Torus2D
from tfposeidon.schemes.sparse import HiTopK, TopK
from tfposeidon.schemes.stages import Cost, Stage, Transfer, Work

REGISTRY: dict[str, Callable[[], Scheme]] = {
    "allreduce": AllReduce,
    "alltoall": AllToAll,
    "torus2d": Torus2D,
    "ps": ParameterServer,
    **names.constructors(names.SCHEMES, __name__),
    "hitopk": HiTopK,
    "topk": TopK,
}
"""Constructors of schemes with default options, by the name that users pass as `scheme=`."""

__all__ = [
    "REGISTRY",
    "AllReduce",
    "AllToAll",
    "Cost",
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
    "Wire",
    "Work",
    "stages",
]


def __getattr__(name: str) -> Any:
    return names.resolve(names.SCHEMES, __name__, name)


def __dir__() -> list[str]:
    return [*__all__, *names.SCHEMES]

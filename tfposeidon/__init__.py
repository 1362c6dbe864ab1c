"""Keras 3 training that scales over slow networks.

Importing this package loads none of its modules. Names are loaded on first use, so that `python -m
tfposeidon install` and `check` work before TensorFlow and Horovod are installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Import the names for type checkers and editors, which do not evaluate `__getattr__`.
if TYPE_CHECKING:
    from tfposeidon import local, ops, optimizers, policies, sample_counts, schemes, state
    from tfposeidon.collectives import all_gather, all_reduce, barrier, broadcast_variables
    from tfposeidon.communicating import unwrap
    from tfposeidon.communication.network_profile import Link, NetworkProfile, Rates
    from tfposeidon.communication.runtime import init, local_rank, local_size, rank, size, workers
    from tfposeidon.elastic_averaging.optimizer import ElasticAveraging
    from tfposeidon.exchange.parallel_operator import parallel_tensor_operator
    from tfposeidon.inputs.shares import shard
    from tfposeidon.local.optimizer import LocalUpdates
    from tfposeidon.optimizer import DistributedOptimizer
    from tfposeidon.sharded.optimizer import ShardedOptimizer

__version__ = "0.1.0"
__all__ = [
    "DistributedOptimizer",
    "ElasticAveraging",
    "Link",
    "LocalUpdates",
    "NetworkProfile",
    "Rates",
    "ShardedOptimizer",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast_variables",
    "init",
    "local",
    "local_rank",
    "local_size",
    "ops",
    "optimizers",
    "parallel_tensor_operator",
    "policies",
    "rank",
    "sample_counts",
    "schemes",
    "shard",
    "size",
    "state",
    "unwrap",
    "workers",
]
_NAMES_BY_MODULE = {
    "collectives": ("all_gather", "all_reduce", "barrier", "broadcast_variables"),
    "communicating": ("unwrap",),
    "communication.network_profile": ("Link", "NetworkProfile", "Rates"),
    "communication.runtime": ("init", "local_rank", "local_size", "rank", "size", "workers"),
    "elastic_averaging.optimizer": ("ElasticAveraging",),
    "exchange.parallel_operator": ("parallel_tensor_operator",),
    "inputs.shares": ("shard",),
    "local.optimizer": ("LocalUpdates",),
    "optimizer": ("DistributedOptimizer",),
    "sharded.optimizer": ("ShardedOptimizer",),
}


def __getattr__(name: str) -> Any:
    for module, names in _NAMES_BY_MODULE.items():
        if name in names:
            return getattr(importlib.import_module(f"tfposeidon.{module}"), name)
    if name in __all__:
        return importlib.import_module(f"tfposeidon.{name}")
    raise AttributeError(f"module 'tfposeidon' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

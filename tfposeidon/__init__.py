"""Keras 3 training that scales over slow networks.

Importing this package loads nothing else. Names are loaded on first use, so that `python -m
tfposeidon install` and `check` work before TensorFlow and Horovod are installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# For type checkers and editors, which cannot resolve names of `__getattr__`.
if TYPE_CHECKING:
    from tfposeidon import local, ops, optimizers, policies, sample_counts, schemes, state
    from tfposeidon.collectives import all_gather, all_reduce, barrier, broadcast_variables
    from tfposeidon.communicating import unwrap
    from tfposeidon.communication.network_profile import Link, NetworkProfile, Rates
    from tfposeidon.communication.runtime import init, rank, size, workers
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

_HOME = {
    "DistributedOptimizer": "optimizer",
    "ElasticAveraging": "elastic_averaging.optimizer",
    "LocalUpdates": "local.optimizer",
    "ShardedOptimizer": "sharded.optimizer",
    "all_gather": "collectives",
    "all_reduce": "collectives",
    "barrier": "collectives",
    "broadcast_variables": "collectives",
    "parallel_tensor_operator": "exchange.parallel_operator",
    "Link": "communication.network_profile",
    "NetworkProfile": "communication.network_profile",
    "Rates": "communication.network_profile",
    "init": "communication.runtime",
    "local_rank": "communication.runtime",
    "local_size": "communication.runtime",
    "rank": "communication.runtime",
    "shard": "inputs.shares",
    "size": "communication.runtime",
    "unwrap": "communicating",
    "workers": "communication.runtime",
}


def __getattr__(name: str) -> Any:
    if name in ("local", "ops", "optimizers", "policies", "sample_counts", "schemes", "state"):
        return importlib.import_module(f"tfposeidon.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(f"tfposeidon.{_HOME[name]}"), name)
    raise AttributeError(f"module 'tfposeidon' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

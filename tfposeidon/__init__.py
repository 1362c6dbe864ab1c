"""tfposeidon makes Keras 3 training scale over slow networks.

Importing it loads nothing and starts nothing; names load when they are first used, so that
`python -m tfposeidon install` and `check` work before TensorFlow and Horovod are there.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfposeidon import ops, optimizers, policies, schemes
    from tfposeidon.optimizer import DistributedOptimizer
    from tfposeidon.parallel_operator import parallel_tensor_operator
    from tfposeidon.runtime import init, rank, size

__version__ = "0.1.0"
__all__ = [
    "DistributedOptimizer",
    "init",
    "ops",
    "optimizers",
    "parallel_tensor_operator",
    "policies",
    "rank",
    "schemes",
    "size",
]

_HOME = {
    "DistributedOptimizer": "optimizer",
    "parallel_tensor_operator": "parallel_operator",
    "init": "runtime",
    "rank": "runtime",
    "size": "runtime",
}


def __getattr__(name: str) -> Any:
    if name in ("ops", "optimizers", "policies", "schemes"):
        return importlib.import_module(f"tfposeidon.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(f"tfposeidon.{_HOME[name]}"), name)
    raise AttributeError(f"module 'tfposeidon' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

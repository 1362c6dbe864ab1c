"""All imports of datacache from tfposeidon; its other modules import only this one.

Commands such as `python -m datacache ls` import this module and must start without TensorFlow, so
modules that need TensorFlow are imported within functions.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfposeidon.communication.agreement import require_equal
from tfposeidon.communication.launcher import process_rank
from tfposeidon.memory import available_memory, is_memory
from tfposeidon.quiet import import_tensorflow
from tfposeidon.ranges import check_integer
from tfposeidon.text import ProgressBar, table
from tfposeidon.units import parse_share, parse_size, readable_size

if TYPE_CHECKING:
    from tfposeidon.communication.wire import Wire
    from tfposeidon.inputs.graphs import (
        PYTHON_OPS,
        datasets,
        drawing_ops,
        file_ops,
        functions,
        kind_of,
        nodes,
        ops,
        serialized,
    )

_OF_GRAPHS = {
    *("PYTHON_OPS", "datasets", "drawing_ops", "file_ops", "functions", "kind_of", "nodes", "ops"),
    "serialized",
}
"""Names of a module that needs TensorFlow, which is imported when one of them is."""

__all__ = [
    "PYTHON_OPS",
    "ProgressBar",
    "Wire",
    "available_memory",
    "check_integer",
    "datasets",
    "drawing_ops",
    "exchange_objects",
    "file_ops",
    "functions",
    "import_tensorflow",
    "is_memory",
    "job_wire",
    "kind_of",
    "nodes",
    "ops",
    "parse_share",
    "parse_size",
    "process_rank",
    "readable_size",
    "require_equal",
    "serialized",
    "table",
]


def __getattr__(name: str) -> Any:
    if name not in _OF_GRAPHS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("tfposeidon.inputs.graphs"), name)


def job_wire() -> Wire | None:
    """Returns the collectives of this job's ranks, or `None` for a job of a single process.

    A single process needs no Horovod. Otherwise the first call starts Horovod with default
    arguments, unless the script has called `tfposeidon.init`.
    """
    if process_rank().size == 1:
        return None
    from tfposeidon.communication import runtime

    if runtime.server_rank() is not None:
        raise ValueError(
            "The data cache requires a job in which all ranks train. Received: a job in which rank "
            f"{runtime.server_rank()} is a server. Pass tf.data datasets or arrays to the workers: "
            "`tfposeidon.workers().index(rank)` is the shard of a rank."
        )
    return runtime.wire()


def exchange_objects(value: Any, wire: Wire, name: str) -> list[Any]:
    """Returns every rank's `value`, in rank order; collective."""
    from tfposeidon.communication import wire as communication

    return communication.exchange_objects(value, wire, name)

"""Collects all imports from tfposeidon, so that no other module of datacache imports it.

Commands such as `python -m datacache ls` import this module and must start without TensorFlow, so
modules that need TensorFlow are imported at their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfposeidon.checks import check_integer as check_integer
from tfposeidon.checks import require_equal as require_equal
from tfposeidon.communication.launcher import process_rank as process_rank
from tfposeidon.memory import available_memory as available_memory
from tfposeidon.memory import is_memory as is_memory
from tfposeidon.text import ProgressBar as ProgressBar
from tfposeidon.text import parse_share as parse_share
from tfposeidon.text import parse_size as parse_size
from tfposeidon.text import readable_size as readable_size
from tfposeidon.text import table as table

if TYPE_CHECKING:
    from tfposeidon.communication.wire import Wire as Wire
    from tfposeidon.inputs import pipelines as pipelines


def __getattr__(name: str) -> Any:
    if name == "pipelines":
        return importlib.import_module("tfposeidon.inputs.pipelines")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def job_wire() -> Wire | None:
    """Returns the collectives of this job's ranks, or `None` if the job is a single process."""
    # In a job of several ranks, the first call starts Horovod if the script has not.
    if process_rank().size == 1:
        return None
    from tfposeidon.communication import runtime

    if runtime.server_rank() is not None:
        raise ValueError(
            "The data cache requires a job in which all ranks train. Received: "
            f"server_rank={runtime.server_rank()}. Pass tf.data datasets or arrays to the workers: "
            "`tfposeidon.workers().index(rank)` is the shard of a rank."
        )
    return runtime.wire()


def exchange_objects(value: Any, wire: Wire, name: str) -> list[Any]:
    """Returns the `value` of every rank, in rank order. All ranks must call this."""
    from tfposeidon.communication import wire as communication

    return communication.exchange_objects(value, wire, name)

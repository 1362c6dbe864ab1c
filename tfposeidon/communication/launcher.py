"""Reads the rank and the rendezvous store of this process from environment variables.

horovodrun and `tfposeidon lab` set variables `HOROVOD_*`, and `peers` sets them from the variables
of other platforms. Open MPI, MPICH and SLURM use other names. `tfposeidon.init()` reads all these
variables. An import reads none.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from dataclasses import dataclass
from typing import Any

from tfposeidon.peers import rendezvous, sources
from tfposeidon.peers.store import FAILURES

# The first variable of a tuple that is set is used, so horovodrun's variables precede the variables
# of MPI and SLURM.
RANK = (rendezvous.LAUNCHER, *rendezvous.MPI_RANKS)
SIZE = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
LOCAL_RANK = (
    "HOROVOD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "SLURM_LOCALID",
)
LOCAL_SIZE = (
    "HOROVOD_LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)

STALL_WARNING = "HOROVOD_STALL_CHECK_TIME_SECONDS"
STALL_LIMIT = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
TRANSPORT_LIMIT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
STORE_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
STORE_TIMEOUT_S = 2.0
STORE_START_TIMEOUT_S = 60.0
"""Seconds within which the launcher's store must respond while all processes start at once."""

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens URLs of stores, which must not be requested through the proxy of `http_proxy`."""


@dataclass(frozen=True)
class ProcessRank:
    """Rank of this process, in the job and on its node; without a launcher, rank 0 of 1."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def process_rank() -> ProcessRank:
    """Returns the rank of this process, from the variables of its launcher or platform.

    On a platform, `local_rank` is 0 and `local_size` is 1 until `tfposeidon.init()` has found the
    nodes.
    """
    if not rendezvous.has_launcher(os.environ, has_mpi()):
        job = sources.find(os.environ)
        if job and (job.size > 1 or job.has_store):
            return ProcessRank(job.rank, job.size)
    # A size alone does not imply a launcher: SLURM also sets a size in scripts of a single process.
    # MPI's variables are used even if Horovod is built without MPI; tfposeidon.init() then raises
    # an error.
    if not any(os.environ.get(name) for name in RANK):
        return ProcessRank()
    size = _first(SIZE, 1)
    return ProcessRank(_first(RANK, 0), size, _first(LOCAL_RANK, 0), _first(LOCAL_SIZE, size))


def has_mpi() -> bool:
    """Returns whether variables of MPI are set and Horovod is built with MPI."""
    if not any(map(os.environ.get, rendezvous.MPI_RANKS)):
        return False
    try:
        import horovod.tensorflow as hvd
    except ImportError:
        return False
    return bool(hvd.mpi_built())


def ranks_of_node() -> int | None:
    """Returns the number of ranks on this node, or `None` if the launcher does not set it."""
    own = process_rank()
    return own.local_size if own.size == 1 or any(map(os.environ.get, LOCAL_SIZE)) else None


def _first(names: tuple[str, ...], default: int) -> int:
    return next((int(os.environ[name]) for name in names if os.environ.get(name)), default)


@dataclass(frozen=True)
class Store:
    """Client of the launcher's key-value store, which Gloo uses for rendezvous.

    Ranks store the sizes of nodes before Horovod starts, and the causes of failures when the job
    ends. All keys have the prefix `scope`.
    """

    address: str
    port: int
    scope: str = FAILURES

    @classmethod
    def of_launcher(cls) -> Store | None:
        """Returns the launcher's store, or `None` under MPI and without a launcher."""
        address = os.environ.get(rendezvous.STORE_ADDRESS)
        return cls(address, int(os.environ[STORE_PORT])) if address else None

    def put(self, key: str, value: object, timeout_s: float = STORE_START_TIMEOUT_S) -> None:
        """Stores a value that JSON supports; raises `OSError` if the store cannot be reached."""
        request = urllib.request.Request(
            self._url(key), data=json.dumps(value).encode(), method="PUT"
        )
        _DIRECT.open(request, timeout=timeout_s).close()

    def get(self, key: str) -> Any:
        """Returns the value of a key, or `None` if it is missing or the store is unreachable."""
        try:
            with _DIRECT.open(self._url(key), timeout=STORE_TIMEOUT_S) as answer:
                return json.loads(answer.read())
        # For a missing key, Horovod's server responds with 404: an HTTPError, which is an OSError.
        except OSError:
            return None

    def _url(self, key: str) -> str:
        return f"http://{self.address}:{self.port}/{self.scope}/{key}"

    def wait_for(self, key: str, timeout_s: float) -> Any:
        """Returns the value of a key once a rank has stored it, or raises `TimeoutError`."""
        # Poll, because the server responds immediately whether there is a value or not.
        deadline = time.monotonic() + timeout_s
        while (value := self.get(key)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"All ranks must register with the launcher within {timeout_s:.0f} s. "
                    f"Received: no value of {key!r} in the launcher's store. Check that all ranks "
                    "have started."
                )
            time.sleep(0.2)
        return value


def node_sizes(store: Store, own: ProcessRank, timeout_s: float = 120.0) -> list[int]:
    """Returns the number of ranks on each node; the launcher must number ranks node by node."""
    # The first rank of each node stores the node's size. Every rank reads the sizes in order,
    # because their sum is the first rank of the next node.
    if own.local_rank == 0:
        store.put(f"node-of-rank-{own.rank}", own.local_size)
    sizes: list[int] = []
    while sum(sizes) < own.size:
        sizes.append(store.wait_for(f"node-of-rank-{sum(sizes)}", timeout_s))
    return sizes

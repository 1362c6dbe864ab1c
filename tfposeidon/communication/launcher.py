"""Environment variables of launchers, and every one that tfposeidon sets.

horovodrun and `tfposeidon lab` name rank, node and rendezvous store in `HOROVOD_*`; Open MPI, MPICH
and SLURM have names of their own. Reading happens in `tfposeidon.init()`, never at import.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from dataclasses import dataclass
from typing import Any

# The first name of a tuple that is set counts: horovodrun's precede MPI's and SLURM's.
RANK = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
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
STORE_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
STORE_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
STORE_TIMEOUT_S = 2.0
STORE_START_TIMEOUT_S = 60.0
"""Where all processes of a machine start at once, the launcher's server answers late."""


@dataclass(frozen=True)
class ProcessRank:
    """Rank of this process, in the job and on its node.

    One process without a launcher is rank 0 of 1.

    Attributes:
      rank: Index of the process in the job.
      size: Number of processes in the job.
      local_rank: Index of the process on its node.
      local_size: Number of processes on its node.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def process_rank() -> ProcessRank:
    """Returns the rank of this process, from the launcher's variables."""
    # A size alone tells of no launcher: SLURM names one in scripts that start a single process,
    # too.
    if not any(os.environ.get(name) for name in RANK):
        return ProcessRank()
    size = _first(SIZE, 1)
    return ProcessRank(_first(RANK, 0), size, _first(LOCAL_RANK, 0), _first(LOCAL_SIZE, size))


def ranks_of_node() -> int | None:
    """Returns the number of ranks on this node; `None` if the launcher does not say."""
    own = process_rank()
    return own.local_size if own.size == 1 or any(map(os.environ.get, LOCAL_SIZE)) else None


def _first(names: tuple[str, ...], default: int) -> int:
    return next((int(os.environ[name]) for name in names if os.environ.get(name)), default)


@dataclass(frozen=True)
class Store:
    """The launcher's key-value store, over which Gloo's ranks find one another.

    Ranks leave the sizes of nodes there before Horovod starts, and the causes of failures when it
    ends.

    Attributes:
      address: Host name or IP address.
      port: TCP port.
      scope: Prefix of all keys.
    """

    address: str
    port: int
    scope: str = "tfposeidon"

    @classmethod
    def of_launcher(cls) -> Store | None:
        """Returns the launcher's store, or `None` under MPI and without a launcher."""
        address = os.environ.get(STORE_ADDRESS)
        return cls(address, int(os.environ[STORE_PORT])) if address else None

    def put(self, key: str, value: object, timeout_s: float = STORE_START_TIMEOUT_S) -> None:
        """Stores a value.

        Args:
          key: Name of the value.
          value: Anything that JSON can hold.
          timeout_s: Seconds to wait for the store.

        Raises:
          OSError: If the store cannot be reached.
        """
        request = urllib.request.Request(
            self._url(key), data=json.dumps(value).encode(), method="PUT"
        )
        urllib.request.urlopen(request, timeout=timeout_s).close()

    def get(self, key: str) -> Any:
        """Returns a value, or `None` while there is none or the store cannot be reached.

        Args:
          key: Name of the value.
        """
        try:
            with urllib.request.urlopen(self._url(key), timeout=STORE_TIMEOUT_S) as answer:
                return json.loads(answer.read())
        # Horovod's server answers 404 for a key that is missing: an HTTPError, which is an OSError.
        except OSError:
            return None

    def _url(self, key: str) -> str:
        return f"http://{self.address}:{self.port}/{self.scope}/{key}"

    def wait_for(self, key: str, timeout_s: float) -> Any:
        """Returns a value as soon as some rank has put it.

        Args:
          key: Name of the value.
          timeout_s: Seconds to wait at most.

        Raises:
          TimeoutError: If that takes longer than `timeout_s`.
        """
        # The server answers at once, whether there is a value or not: it has to be asked again.
        deadline = time.monotonic() + timeout_s
        while (value := self.get(key)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{key!r} did not appear in the launcher's store within {timeout_s:.0f} s"
                )
            time.sleep(0.05)
        return value


def node_sizes(store: Store, own: ProcessRank, timeout_s: float = 120.0) -> list[int]:
    """Finds the number of ranks of each node, where the launcher numbers ranks node by node.

    The first rank of each node leaves its node's size in the store; everybody walks from node to
    node.

    Args:
      store: Launcher's store.
      own: Rank of this process.
      timeout_s: Seconds to wait for each node.

    Returns:
      The number of ranks of each node, in the order of the nodes' ranks.

    Raises:
      TimeoutError: If the first rank of a node does not come in time.
    """
    if own.local_rank == 0:
        store.put(f"node-of-rank-{own.rank}", own.local_size)
    sizes: list[int] = []
    while sum(sizes) < own.size:
        sizes.append(store.wait_for(f"node-of-rank-{sum(sizes)}", timeout_s))
    return sizes

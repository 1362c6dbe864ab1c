"""What launchers leave in the environment, and every environment variable that tfposeidon sets.

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


@dataclass(frozen=True)
class Place:
    """Where the launcher put this process. One process without a launcher is rank 0 of 1."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def place() -> Place:
    """Reads the launcher's variables."""
    if not any(os.environ.get(name) for name in RANK):
        return Place()
    size = _first(SIZE, 1)
    return Place(_first(RANK, 0), size, _first(LOCAL_RANK, 0), _first(LOCAL_SIZE, size))


def _first(names: tuple[str, ...], default: int) -> int:
    return next((int(os.environ[name]) for name in names if os.environ.get(name)), default)


@dataclass(frozen=True)
class Store:
    """The launcher's key-value store, over which Gloo's ranks find one another.

    We leave the sizes of nodes there before Horovod starts, and the causes of failures when it ends.
    """

    address: str
    port: int
    scope: str = "tfposeidon"

    @classmethod
    def of_launcher(cls) -> Store | None:
        """The store, or `None` under MPI and without a launcher."""
        address = os.environ.get(STORE_ADDRESS)
        return cls(address, int(os.environ[STORE_PORT])) if address else None

    def put(self, key: str, value: object) -> None:
        """Stores a JSON value.

        Raises:
          OSError: If the store cannot be reached.
        """
        request = urllib.request.Request(
            self._url(key), data=json.dumps(value).encode(), method="PUT"
        )
        urllib.request.urlopen(request, timeout=STORE_TIMEOUT_S).close()

    def get(self, key: str) -> Any:
        """The value, or `None` while there is none or the store cannot be reached."""
        try:
            with urllib.request.urlopen(self._url(key), timeout=STORE_TIMEOUT_S) as answer:
                return json.loads(answer.read())
        except OSError:
            return None

    def _url(self, key: str) -> str:
        return f"http://{self.address}:{self.port}/{self.scope}/{key}"

    def wait_for(self, key: str, timeout_s: float) -> Any:
        """The value, once some rank has put it.

        Raises:
          TimeoutError: If that takes longer than `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while (value := self.get(key)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{key!r} did not appear in the launcher's store within {timeout_s:.0f} s"
                )
            time.sleep(0.05)
        return value


def node_sizes(store: Store, own: Place, timeout_s: float = 120.0) -> list[int]:
    """Ranks per node, where launchers number ranks node by node.

    The first rank of each node leaves its node's size in the store; everybody walks from node to node.
    """
    if own.local_rank == 0:
        store.put(f"node-of-rank-{own.rank}", own.local_size)
    sizes: list[int] = []
    while sum(sizes) < own.size:
        sizes.append(store.wait_for(f"node-of-rank-{sum(sizes)}", timeout_s))
    return sizes

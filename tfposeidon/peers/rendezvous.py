"""Registers ranks in a store at the start of a job, and derives Horovod's variables.

Each rank publishes its node and address and waits for all other ranks. All ranks then derive the
nodes and their own variables from the same entries, so that Horovod starts only after all ranks
have registered. A `Client` sends the requests of a rank to the store.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from tfposeidon.peers import sources, store
from tfposeidon.peers.sources import HOST, PORT, TOKEN, Job

LONGEST_WAIT_S = 30.0
ANSWER_TIMEOUT_S = 10.0
"""Time within which a store must answer a request."""
RETRY_S = 0.2
"""Seconds between attempts to reach a store."""
BIND_S = 15.0
"""Time to wait for a port that the store of an earlier start may still hold."""

MEMBER = "TFPOSEIDON_MEMBER"
"""Variable with the rank's process and store, by which `_refuse_child` detects child processes."""
LAUNCHER = "HOROVOD_RANK"
STORE_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
INTERFACE = "HOROVOD_GLOO_IFACE"
MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
START_TIMEOUT_S = 600.0
"""Default time within which all ranks must register, including the allocation of their nodes."""
RANKS = "ranks"
"""Scope of the store in which ranks register."""
START = secrets.token_hex(8)
"""Identifies this process: a restarted container has the same host name and process ID."""

Nodes = tuple[tuple[int, ...], ...]
_nodes: Nodes | None = None
_store: subprocess.Popen[str] | None = None
"""Process of the store on rank 0. The reference prevents a warning about a running process."""


# ------------------------------------------------------------------ store


@dataclass(frozen=True)
class Client:
    """Client of a store: the store's address, and the prefix of the job's paths."""

    host: str
    port: int
    prefix: str

    def put_first(self, scope: str, key: str, value: Any) -> Any:
        """Stores a value unless the key has one; returns the key's value."""
        return self.request(f"{scope}/{key}", json.dumps(value).encode())[0]

    def get(self, scope: str, key: str, wait_s: float = 0.0) -> Any:
        """Returns a value as soon as it exists, or `None` after `wait_s`, at most 30 s."""
        return self.request(f"{scope}/{key}", wait_s=wait_s)[0]

    def all(self, scope: str, count: int, wait_s: float = 0.0) -> dict[int, Any] | None:
        """Returns a scope's values by rank once it has `count` values, or `None` after `wait_s`."""
        found = self.get(scope, f"{store.COUNT}{count}", wait_s)
        return found and {int(rank): value for rank, value in found.items()}

    def request(self, path: str, body: bytes | None = None, wait_s: float = 0.0) -> tuple[Any, str]:
        """Sends a GET, or with `body` a PUT that overwrites no value.

        Returns the key's value, or `None`, and the identity of the store's job, or an empty string
        if another program answers. Raises `OSError` if there is no answer or the job is ending.
        """
        wait_s = max(0.0, min(wait_s, LONGEST_WAIT_S))
        # The store ignores a header that concerns the other method.
        headers = {"If-None-Match": "*", "Prefer": f"wait={wait_s:.3f}"}
        timeout_s = wait_s + ANSWER_TIMEOUT_S
        # Do not use urllib, which would send requests to the proxy in `http_proxy`.
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            with contextlib.closing(connection):
                method = "GET" if body is None else "PUT"
                connection.request(method, f"/{self.prefix}:0/{path}", body, headers)
                answer = connection.getresponse()
                content = answer.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"the answer is not HTTP: {error!r}") from error
        if answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise ConnectionRefusedError("its job is ending")
        job = unquote(answer.getheader(store.JOB_HEADER) or "")
        return json.loads(content) if job and content else None, job


def open_store(job: Job, token: str | None, timeout_s: float) -> tuple[Client, store.Store | None]:
    """Returns a client of the job's store, and the store if this process must serve it."""
    if job.rank > 0 or job.has_store:
        return connect(job, token, timeout_s), None
    here = replace(job, host=store.loopback_address(job.host))
    deadline = time.monotonic() + BIND_S
    while not isinstance(found := reach(here, token), Client):
        try:
            own = store.listen(job.host, job.ports, job.identity, token)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)
        else:
            return Client(here.host, own.server_address[1], own.prefix), own
    # Another process 0 serves the store: `register_process` reports both processes.
    return found, None


def connect(job: Job, token: str | None, timeout_s: float) -> Client:
    """Returns a client of the job's store as soon as the store answers.

    Raises `PermissionError` for a wrong token, or `TimeoutError` with the problem at each address.
    """
    deadline = time.monotonic() + timeout_s
    while not isinstance(found := reach(job, token), Client):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"All processes of a job must reach the store of {job.unit} 0 within its start "
                f"timeout. Received: {found}, for {timeout_s:g} s. Check that "
                f"{job.name_of(0)} has started and that no firewall or network policy closes the "
                f"port, or set {HOST} and {PORT} to another address.{job.hint}"
            )
        time.sleep(RETRY_S)
    return found


def reach(job: Job, token: str | None) -> Client | str:
    """Returns a client of the job's store, or text with the problems of all ports."""
    prefix, problems = store.prefix_of(job.identity, token), []
    for port in job.ports:
        where = f"{job.host}:{port}"
        try:
            # Resolve the name once, so that later connections use the same address. Horovod
            # supports only IPv4.
            client = Client(socket.gethostbyname(job.host), port, prefix)
            entries, identity = client.request(f"{RANKS}/{store.COUNT}0")
        except OSError as error:
            problems.append(f"no answer at {where} ({error})")
            continue
        if entries is not None:
            return client
        if identity == job.identity:
            raise PermissionError(
                "All processes of a job must have the same token. Received: a token of "
                f"{job.name_of(job.rank)} that the store at {where} refused. Set {TOKEN}, or the "
                f"content of the file in {TOKEN}_FILE, to the same value for all processes."
            )
        served = identity or "another program"
        problems.append(f"another job at {where} ({served}; this job is {job.identity})")
    return "; ".join(problems)


# ------------------------------------------------------------------ ranks


@dataclass(frozen=True)
class Entry:
    """Unique name of a rank's node, and the rank's address on its connection to the store."""

    node: str
    address: str


def join(timeout_s: float, *, has_mpi: bool) -> Nodes | None:
    """Registers this rank, waits for all others, and sets Horovod's variables.

    Returns the ranks of each node, or `None` if a launcher started this process or the job has only
    one process.
    """
    global _nodes
    if _nodes is not None:
        return _nodes
    _refuse_child()
    job = None if has_launcher(os.environ, has_mpi) else sources.find(os.environ)
    if job is None or job.size == 1:
        return None
    entries, client = register_ranks(job, sources.token(os.environ), timeout_s)
    # Retain an interface that the user has chosen.
    interface = interface_variables(entries, job.rank) | os.environ
    os.environ.update(interface | horovod_variables(entries, job.rank, client))
    os.environ[MEMBER] = f"{os.getpid()} {os.environ[STORE_ADDRESS]}"
    # Jobs that this rank starts must not inherit the variable of `run`.
    os.environ.pop(sources.RUN, None)
    _nodes = nodes_of([entry.node for entry in entries])
    return _nodes


def has_launcher(found: Mapping[str, str], has_mpi: bool) -> bool:
    """Returns whether a launcher's variables apply; the variable of `run` takes precedence."""
    names = (LAUNCHER, *(MPI_RANKS if has_mpi else ()))
    return sources.RUN not in found and any(found.get(name) for name in names)


def _refuse_child() -> None:
    """Raises `RuntimeError` in a child process that has inherited the variables of a rank."""
    process, _, address = os.environ.get(MEMBER, "").partition(" ")
    # A process with another store is a rank of a job that the registered rank has started.
    if process in ("", str(os.getpid())) or address != os.environ.get(STORE_ADDRESS):
        return
    raise RuntimeError(
        "Each rank must be one process. Received: the environment variables of rank "
        f"{os.environ.get(LAUNCHER)}, process {process}, in process {os.getpid()}. Call "
        "tfposeidon.init() only in the rank's own process, or start its child without the "
        "environment variables that begin with HOROVOD_."
    )


def register_ranks(job: Job, token: str | None, timeout_s: float) -> tuple[list[Entry], Client]:
    """Registers this rank, and returns all ranks' entries in order and the store's client.

    Rank 0 starts the store first, unless it runs already.
    """
    global _store
    deadline = time.monotonic() + timeout_s
    client, own_store = open_store(job, token, timeout_s)
    if own_store:
        _store = store.start_process(own_store, job.size)
    own = {"node": job.node or _this_node(), "address": _address_towards(client.host)}
    entries = register_process(client, RANKS, job, own, deadline)
    return [Entry(entry["node"], entry["address"]) for entry in entries], client


def register_process(client: Client, scope: str, job: Job, own: Any, deadline: float) -> list[Any]:
    """Publishes `own`, waits for all processes of the job, and returns their values in order."""
    process = {"host": socket.gethostname(), "process": os.getpid(), "start": START}
    own = {**own, **process, "size": job.size}
    found = None
    while found is None:
        try:
            if (first := client.put_first(scope, str(job.rank), own)) != own:
                raise RuntimeError(
                    f"Each {job.unit} must be one process. Received from {job.source}: "
                    f"{job.name_of(job.rank)} is process {first['process']} on {first['host']} and "
                    f"process {own['process']} on {own['host']}. Start one process for each "
                    f"{job.unit}; restart all of them if one has ended."
                )
            found = client.all(scope, job.size, deadline - time.monotonic())
        except OSError as error:
            # Other errors, such as a reset connection, do not show that the store has ended.
            if isinstance(error, ConnectionRefusedError) or time.monotonic() > deadline:
                raise RuntimeError(
                    f"The store of {job.unit} 0 must answer until all {job.unit}s have registered. "
                    f"Received: {error} at {client.host}:{client.port}, which had answered before. "
                    f"Read the messages of {job.name_of(0)}, which show why it ended."
                ) from error
            time.sleep(RETRY_S)
        else:
            if found is None and time.monotonic() > deadline:
                raise TimeoutError(_missing(client, scope, job))
    _require_same_size(found, job)
    return [found[rank] for rank in range(job.size)]


def _require_same_size(found: Mapping[int, Any], job: Job) -> None:
    # Check the sizes before reading the entries by rank: if another process has a larger size, the
    # entry of one of this job's ranks may still be missing.
    for rank, entry in found.items():
        if entry["size"] != job.size:
            raise ValueError(
                f"All {job.unit}s must have the same size. Received from {job.source}: {job.size} "
                f"on {job.name_of(job.rank)}, {entry['size']} on {job.name_of(rank)}. Set the same "
                f"size for all of them, and restart all {job.unit}s."
            )


def _missing(client: Client, scope: str, job: Job) -> str:
    found = client.all(scope, 0) or {}
    missing = [job.name_of(rank) for rank in range(job.size) if rank not in found]
    return (
        f"All {job.size} {job.unit}s must register in the store within the start timeout "
        f"(`start_timeout_s`). Received: no registration of {', '.join(missing)} at "
        f"{client.host}:{client.port}. Check that they have started, and that they reach this "
        f"address; their own messages name the address that they tried.{job.hint}"
    )


def _this_node() -> str:
    """Returns text that is equal for processes that share a machine and its shared memory."""
    boot, memory = Path("/proc/sys/kernel/random/boot_id"), Path("/dev/shm")
    start = boot.read_text().strip() if boot.exists() else ""
    device = memory.stat().st_dev if memory.exists() else ""
    return f"{start} {socket.gethostname()} {device}"


def nodes_of(names: Sequence[str]) -> Nodes:
    """Returns the ranks of each node, ordered by first rank; ranks need not be consecutive."""
    nodes: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        nodes.setdefault(name, []).append(rank)
    return tuple(map(tuple, nodes.values()))


def horovod_variables(entries: Sequence[Entry], rank: int, client: Client) -> dict[str, str]:
    """Returns the environment variables of a rank for Horovod over Gloo."""
    nodes = nodes_of([entry.node for entry in entries])
    node = next(index for index, ranks in enumerate(nodes) if rank in ranks)
    local_rank = nodes[node].index(rank)
    # Horovod's cross group consists of the ranks with the same local rank on all nodes.
    across = [index for index, ranks in enumerate(nodes) if len(ranks) > local_rank]
    found = {
        "RANK": rank,
        "SIZE": len(entries),
        "LOCAL_RANK": local_rank,
        "LOCAL_SIZE": len(nodes[node]),
        "CROSS_RANK": across.index(node),
        "CROSS_SIZE": len(across),
        # Horovod uses the text after the address as a prefix of each path in its requests.
        "GLOO_RENDEZVOUS_ADDR": f"{client.host}:{client.port}/{client.prefix}",
        "GLOO_RENDEZVOUS_PORT": 0,
        "HOSTNAME": f"node-{node}",
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
    }
    return {f"HOROVOD_{name}": str(value) for name, value in found.items()}


def interface_variables(entries: Sequence[Entry], rank: int) -> dict[str, str]:
    """Returns variables that select the interface between ranks, or `{}` if it is unknown."""
    own, first = entries[rank], entries[0]
    elsewhere = next((one.address for one in entries if one.node != first.node), "127.0.0.1")
    # Ranks on the first node reach the store over the loopback, so use their address in connections
    # to another node.
    address = _address_towards(elsewhere) if own.node == first.node else own.address
    name = _interface_of(address)
    return {INTERFACE: name, "NCCL_SOCKET_IFNAME": name} if name else {}


def _address_towards(host: str) -> str:
    """Returns this host's address in connections to `host`; sends no packets."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        return probe.getsockname()[0]


def _interface_of(address: str) -> str | None:
    """Returns the name of the interface with an address, or `None`."""
    # Import psutil here, because `check` must start before `install` has installed it.
    import psutil

    found = psutil.net_if_addrs().items()
    return next((name for name, all in found if address in {one.address for one in all}), None)

"""Reads the job of a process from the environment variables of its platform.

Think of each source as a function from variables to a `Job`. `find` returns the job of the first
complete source with several processes. This module receives the variables as a mapping, and does
not read the environment.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass

Variables = Mapping[str, str]

RUN = "TFPOSEIDON_RUN"
"""Variable that `run` sets for each rank: the fields of its `Job` as JSON."""
NODES = "TFPOSEIDON_NODES"
HOST = "TFPOSEIDON_HOST"
PORT = "TFPOSEIDON_PORT"
TOKEN = "TFPOSEIDON_TOKEN"
TOKEN_FILE = "TFPOSEIDON_TOKEN_FILE"
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"

FIRST_PORT, PORT_COUNT, PORT_TRIES = 20_000, 10_000, 4
"""Range of the ports that a job's identity selects, below the range of outgoing connections."""
FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""First step number of SLURM's batch scripts and shells, which run as one process."""


@dataclass(frozen=True)
class Job:
    """Job of `size` processes that a source describes to the process with number `rank`.

    The store is at `host`, at the first usable of `ports`. `identity` differs between all jobs
    that run at the same time. `node` is this process's node, and `members` are the addresses of all
    processes for messages; both may be empty. With `one_per_node`, each process may start a rank
    per GPU; with `has_store`, the process that set the variables runs the store. `unit` is "rank"
    or "node", and `hint` is a remedy for messages about missing processes.
    """

    source: str
    rank: int
    size: int
    host: str
    ports: tuple[int, ...]
    identity: str
    _: KW_ONLY
    node: str = ""
    members: tuple[str, ...] = ()
    one_per_node: bool = False
    has_store: bool = False
    unit: str = "rank"
    hint: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(
                f"The rank must be in 0..size-1. Received from {self.source}: rank {self.rank} of "
                f"{self.size}. Number the processes from 0."
            )

    def name_of(self, rank: int) -> str:
        """Returns the name of a process for messages, with its address if the source gives it."""
        address = f" ({self.members[rank]})" if rank < len(self.members) else ""
        return f"{self.unit} {rank}{address}"

    def __str__(self) -> str:
        return f"{self.source}: {self.unit} {self.rank} of {self.size}"


def find(variables: Variables) -> Job | None:
    """Returns the job of the first complete source, or `None` if there is no source.

    A job of one process counts only if `run` has started it or no source has a larger job. Raises
    `ValueError` if an earlier source contradicts itself, or if all sources are incomplete.
    """
    alone, lacks = None, []
    for found in jobs(variables):
        if isinstance(found, str):
            lacks.append(found)
        elif isinstance(found, ValueError):
            raise found
        elif found.size > 1 or found.has_store:
            return found if found.has_store else with_settings(found, variables)
        else:
            alone = alone or found
    if lacks and alone is None:
        raise ValueError(
            "The environment variables that describe a job must be complete. Received: "
            f"{'; '.join(lacks)}. Set the missing variables, or unset the others to run a single "
            "process."
        )
    return alone


def jobs(variables: Variables) -> Iterator[Job | ValueError | str]:
    """Yields each source's job, or its contradiction as an error, or text on missing variables."""
    for name, names, read in SOURCES:
        missing = [one for one in names if not variables.get(one)]
        if missing[:2] == [*names[:2]]:
            continue
        try:
            if missing:
                yield f"{name} lacks {', '.join(missing)}"
            elif job := read(variables):
                yield job
        except ValueError as error:
            yield error


def token(variables: Variables) -> str | None:
    """Returns the job's token from a file that only this user can access, or from its variable."""
    if not (path := variables.get(TOKEN_FILE)):
        return variables.get(TOKEN) or None
    with open(path) as stream:
        found = os.fstat(stream.fileno())
        if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid not in (0, os.geteuid()):
            raise ValueError(
                "A token file must be accessible to its owner alone, who must be this user or "
                f"root. Received: {path} with mode {stat.S_IMODE(found.st_mode):04o}, owned by uid "
                f"{found.st_uid}. As its owner, run: chmod 600 {path}"
            )
        text = stream.read().strip()
    if not text:
        raise ValueError(
            f"A token file must hold a token. Received: {path}, which is empty. Run: openssl rand "
            f"-hex 16 > {path}"
        )
    return text


def split_address(text: str, source: str) -> tuple[str, int]:
    """Returns host and port of an address.

    >>> split_address("node1:2222", "TF_CONFIG")
    ('node1', 2222)
    """
    host, colon, port = text.strip().rpartition(":")
    if not (host and colon and port.isdigit()):
        raise ValueError(
            f"An address must have the form host:port. Received from {source}: {text!r}. Set an "
            "address such as node1:29500."
        )
    return host.strip("[]"), int(port)


def derived_ports(identity: str) -> tuple[int, ...]:
    """Returns the ports to try for a job whose platform sets no port."""
    digest = int(hashlib.sha256(identity.encode()).hexdigest(), 16)
    return tuple(FIRST_PORT + (digest >> 16 * i) % PORT_COUNT for i in range(PORT_TRIES))


def with_settings(job: Job, variables: Variables) -> Job:
    """Returns a job with the user's host and port; raises `ValueError` for an IPv6 address."""
    host = variables.get(HOST) or job.host
    ports = (_integer(variables, PORT),) if variables.get(PORT) else job.ports
    if ":" in host and job.size > 1:
        raise ValueError(
            "Horovod's rendezvous requires an IPv4 address, or a name that has one. Received "
            f"from {HOST if variables.get(HOST) else job.source}: {host!r}. Set {HOST} to one."
        )
    return dataclasses.replace(job, host=host, ports=ports)


def _integer(variables: Variables, name: str) -> int:
    text = variables[name]
    if not text.strip().isdigit():
        raise ValueError(
            f"{name} must be a number. Received: {name}={text!r}. Set it to 0 or more."
        )
    return int(text)


def _cluster(source: str, roles: tuple[str, ...], variables: Variables) -> Job | None:
    """Reads TensorFlow's description of a cluster, and numbers the ranks in the order of roles."""
    cluster, kind, index = _parsed(source, variables[source])
    if not cluster:
        return None
    if others := sorted({*cluster, kind} - {*roles}):
        raise ValueError(
            f"{source} may contain only roles that train: {', '.join(roles)}. Received: "
            f"{', '.join(others)}. Remove parameter servers and evaluators. To shard parameters "
            'over ranks, use tp.DistributedOptimizer(..., scheme="ps").'
        )
    members = [(role, number) for role in roles for number in range(len(cluster.get(role, ())))]
    if (kind, index) not in members:
        raise ValueError(
            f"The task of {source} must be part of its cluster. Received: {kind} {index}, and "
            f"{', '.join(f'{len(cluster[role])} {role}' for role in roles if role in cluster)}. "
            "Set the task's index (from 0), or add its address to the cluster."
        )
    addresses = [cluster[role][number] for role, number in members]
    return _of_addresses(source, addresses, members.index((kind, index)), len(members))


def _parsed(source: str, text: str) -> tuple[dict[str, list[str]], str, int]:
    """Returns the addresses of each role, and the type and index of the task."""
    try:
        found = json.loads(text)
        if not (cluster := found.get("cluster")):
            return {}, "", 0
        # Refuse sparse clusters, which map indices to addresses: only parameter servers use them.
        if all(
            isinstance(one, list) and all(isinstance(address, str) for address in one)
            for one in cluster.values()
        ):
            return cluster, str(found["task"]["type"]), int(found["task"].get("index") or 0)
        problem = "the addresses of a role are not a list of strings"
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        problem = repr(error)
    raise ValueError(
        f"{source} must be a JSON object with `cluster`, which lists all addresses of each role, "
        f"and `task`, with a type and an index. Received: {text!r} ({problem}). Set it to text "
        'such as {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}.'
    )


def _of_addresses(source: str, addresses: list[str], rank: int, size: int) -> Job:
    """Returns the job of a source that lists the addresses of all ranks, or that of rank 0 only."""
    if repeated := sorted({one for one in addresses if addresses.count(one) > 1}):
        raise ValueError(
            f"The addresses of {source} must differ. Received more than once: "
            f"{', '.join(repeated)}. Set the address of each process."
        )
    split = [split_address(address, source) for address in addresses]
    hosts = [host for host, _ in split]
    digest = hashlib.sha256(",".join(addresses).encode()).hexdigest()[:8]
    identity = f"{source} {addresses[0]} {digest} of {size}"
    members = tuple(addresses) if len(addresses) == size else ()
    return Job(
        *(source, rank, size, hosts[0], (split[0][1],), identity),
        # `Job` refuses an index beyond the list.
        node=hosts[rank] if rank < len(members) else "",
        members=members,
        one_per_node=len(set(hosts)) == size,
    )


def _torchrun(variables: Variables) -> Job:
    rank, size = _integer(variables, "RANK"), _integer(variables, "WORLD_SIZE")
    per_node = "LOCAL_RANK" not in variables
    if per_node and variables.get("PET_NNODES", "").isdecimal():
        # With `nprocPerNode`, a PyTorchJob counts pods in RANK, but processes in WORLD_SIZE.
        size = int(variables["PET_NNODES"])
    local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(size), **variables}
    if _integer(local, "LOCAL_RANK") >= _integer(local, "LOCAL_WORLD_SIZE"):
        raise ValueError(
            f"LOCAL_RANK must be less than LOCAL_WORLD_SIZE. Received: {local['LOCAL_RANK']} of "
            f"{local['LOCAL_WORLD_SIZE']}. Number the ranks of each node from 0."
        )
    port = _integer(variables, "MASTER_PORT")
    # Ignore restarts on several nodes, because the agents may count them differently.
    alone = variables.get("GROUP_WORLD_SIZE", "1") == "1"
    restarts = variables.get("TORCHELASTIC_RESTART_COUNT", "0") if alone else "0"
    # Leave the address out of the identity: some operators set it to "localhost" on the master.
    run = variables.get("TORCHELASTIC_RUN_ID", "")
    identity = f"torchrun {port} {run} of {size} restart {restarts}"
    # If this variable is "True", torchrun's agent listens on the port.
    is_taken = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    place = (variables["MASTER_ADDR"], derived_ports(identity) if is_taken else (port,), identity)
    return Job("torchrun", rank, size, *place, one_per_node=per_node)


def _trainjob(variables: Variables) -> Job:
    rank, size = _integer(variables, "PET_NODE_RANK"), _integer(variables, "PET_NNODES")
    host, port = variables["PET_MASTER_ADDR"], _integer(variables, "PET_MASTER_PORT")
    identity = f"TrainJob {host}:{port} of {size}"
    return Job("TrainJob", rank, size, host, (port,), identity, one_per_node=True)


def _keras(variables: Variables) -> Job:
    source = "KERAS_DISTRIBUTION"
    addresses = variables[f"{source}_JOB_ADDRESSES"].split(",")
    rank, count = _integer(variables, f"{source}_PROCESS_ID"), f"{source}_NUM_PROCESSES"
    size = _integer(variables, count) if variables.get(count) else len(addresses)
    if len(addresses) not in (1, size):
        raise ValueError(
            "KERAS_DISTRIBUTION_JOB_ADDRESSES must list the addresses of all processes, or of the "
            f"coordinator alone. Received: {len(addresses)} addresses of {size} processes. Set one "
            f"address or {size}."
        )
    return _of_addresses(source, addresses, rank, size)


def _slurm(variables: Variables) -> Job | None:
    if _integer(variables, "SLURM_STEP_ID") >= FIRST_SPECIAL_STEP:
        return None
    rank, size = _integer(variables, "SLURM_PROCID"), _integer(variables, "SLURM_STEP_NUM_TASKS")
    restarts = variables.get("SLURM_RESTART_COUNT", "0")
    identity = f"SLURM {variables['SLURM_JOB_ID']}.{variables['SLURM_STEP_ID']} restart {restarts}"
    nodes, node = variables["SLURM_STEP_NODELIST"], variables.get("SLURMD_NODENAME", "")
    # Accept any word in place of brackets, because SLURM does not always number nodes in decimal.
    if node and not re.fullmatch(re.sub(r"\[.*?\]", r"\\w+", nodes).replace(",", "|"), node):
        raise ValueError(
            f"SLURMD_NODENAME must be in SLURM_STEP_NODELIST. Received: {node!r} and {nodes!r}. "
            "Unset the variables of another step, and start the tasks with srun."
        )
    return Job(
        *("SLURM", rank, size, first_host(nodes), derived_ports(identity), identity),
        node=node,
        one_per_node=variables.get("SLURM_STEP_NUM_NODES") == str(size),
        hint=" Start all tasks of the step with srun, or unset SLURM_STEP_ID and "
        "SLURM_STEP_NODELIST for a job of one process.",
    )


def first_host(nodes: str) -> str:
    """Returns the first host of SLURM's list of nodes.

    >>> first_host("rack[2-3]n[01-03,07],gpu1")
    'rack2n01'
    """
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodes).split(",")[0]


def _indexed_job(variables: Variables) -> Job | None:
    rank, size = _integer(variables, "JOB_COMPLETION_INDEX"), _integer(variables, NODES)
    if size == 1:
        # If each pod trains alone, its index is not a rank.
        return None
    # Look up the name only here, because a lookup takes seconds on some networks.
    pod, dot, domain = socket.getfqdn(variables.get("HOSTNAME", "")).partition(".")
    name = pod.removesuffix(f"-{rank}")
    if name == pod:
        raise ValueError(
            "The host name of a pod of an Indexed Job must end in its index. Received: "
            f"{pod!r} and JOB_COMPLETION_INDEX={rank}. Remove `hostname` from the pod's template."
        )
    host = f"{name}-0{dot}{domain}"
    identity = f"Indexed Job {host} {size}"
    ports = derived_ports(identity)
    members = tuple(f"{name}-{index}{dot}{domain}" for index in range(size))
    return Job(
        *("Indexed Job", rank, size, host, ports, identity), members=members, one_per_node=True
    )


def _names(prefix: str, names: str) -> tuple[str, ...]:
    return tuple(prefix + name for name in names.split())


SOURCES: tuple[tuple[str, tuple[str, ...], Callable[[Variables], Job | None]], ...] = (
    ("tfposeidon run", (RUN,), lambda variables: Job(**json.loads(variables[RUN]))),
    *(
        (name, (name,), functools.partial(_cluster, name, roles))
        for name, roles in (
            ("TF_CONFIG", ("chief", "master", "worker")),
            ("CLUSTER_SPEC", ("workerpool0", "workerpool1")),
        )
    ),
    ("torchrun", _names("", "RANK WORLD_SIZE MASTER_ADDR MASTER_PORT"), _torchrun),
    ("TrainJob", _names("PET_", "NODE_RANK NNODES MASTER_ADDR MASTER_PORT"), _trainjob),
    ("KERAS_DISTRIBUTION", _names("KERAS_DISTRIBUTION_", "PROCESS_ID JOB_ADDRESSES"), _keras),
    # The first two names exclude the number of tasks, which some shells set outside of steps.
    ("SLURM", _names("SLURM_", "STEP_ID STEP_NODELIST STEP_NUM_TASKS PROCID JOB_ID"), _slurm),
    ("Indexed Job", ("JOB_COMPLETION_INDEX", NODES), _indexed_job),
)
"""Name, variables and function of each source in order of precedence.

A source is present if one of its first two variables is set.
"""

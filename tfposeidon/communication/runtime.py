"""Start of Horovod, once per process, with the process sets that the topology needs."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any, Literal

from tfposeidon import ranges
from tfposeidon.communication import agreement, failure, launcher
from tfposeidon.communication.network_profile import NetworkProfile, parse_links
from tfposeidon.communication.topology import Group, Topology
from tfposeidon.communication.wire import GroupWire, HorovodWire, Wire, exchange_objects
from tfposeidon.peers import meeting, sources

SERVED_TRANSPORT_TIMEOUT_S = 300.0
"""Default seconds that Gloo waits in jobs with a server.

During a transfer to one worker, which takes minutes for large weights over slow networks, Horovod's
thread on the server does not communicate with other workers.
"""
DEFAULT_STALL_TIMEOUT_S = 300.0
"""Default seconds that ranks wait for a late one; Horovod's default of 0 waits forever."""
LONGEST_STALL_WARNING_S = 60
"""Maximum seconds between Horovod's checks for late ranks."""
LAYOUT_PATIENCE_S = 120.0
"""Seconds that a rank waits for rank 0 to write its layout to the launcher's store."""

MEASURE: Literal["measure"] = "measure"
"""Network profile to measure when the first step that needs it is traced."""
UNKNOWN = "unknown"
"""Network profile that is not measured."""

log = logging.getLogger("tfposeidon")
_wire: HorovodWire | None = None
_server_rank: int | None = None
_links: NetworkProfile | None = None
_measures_links = False


def init(
    *,
    ranks_per_node: int | None = None,
    stall_timeout_s: float | None = None,
    transport_timeout_s: float | None = None,
    pin_gpu: bool = True,
    network: Any = None,
    server_rank: int | None = None,
    start_timeout_s: float = meeting.START_TIMEOUT_S,
) -> Topology:
    """Starts Horovod, finds the nodes and sets up process sets. May be called repeatedly.

    Ranks find each other by the environment variables of their launcher or platform; without either
    it starts a job of one rank. The first step calls it if the script does not.
    Call it to set its arguments, or before code that depends on the rank.

    Args:
      ranks_per_node: Number of ranks of each emulated node; by default, nodes are the launcher's
        hosts.
      stall_timeout_s: Seconds that ranks wait for a late rank that is alive before the job ends;
        default 300, or the value of `HOROVOD_STALL_SHUTDOWN_TIME_SECONDS`.
      transport_timeout_s: Seconds that Gloo waits for a stopped process or a broken connection;
        default 30, with a server 300, or the value of `HOROVOD_GLOO_TIMEOUT_SECONDS`.
      pin_gpu: True (default) to assign each rank of a node the GPU of its local rank, with memory
        growth; False for the script's own GPU configuration.
      network: Network profile for the plans of `scheme="auto"`, the same on all ranks: `"measure"`
        to measure it at the first step; the bandwidth between nodes in one direction with its unit,
        such as `"25gbit"`; a `tfposeidon.NetworkProfile`; the path of a file that contains one; or
        `"unknown"`, with which `"auto"` uses all-reduce. The default is `"measure"` on CPUs, and
        `"unknown"` on GPUs, where measuring is untested.
      server_rank: Rank that holds the global weights of `ElasticAveraging` and does not train, the
        same on all ranks; `None` (default) for none.
      start_timeout_s: Seconds within which all ranks of a platform must have called this function;
        launchers have limits of their own.

    Returns:
      The topology from the perspective of this rank: `rank`, `size`, `nodes`.

    Raises:
      ImportError: If Horovod is missing or was built without TensorFlow.
      ValueError: If an argument is out of its range, `network` is for another kind of cluster, or
        the variables of a platform are incomplete or contradict each other.
      TimeoutError: If a rank did not come within `start_timeout_s`.
      PermissionError: If the token of this rank is not that of the job.
      RuntimeError: If it was called before with another layout or server, if ranks request
        different ones, if two processes have one rank, if `hvd.init()` was called before and
        process sets are needed, if TensorFlow has initialized the GPUs that ranks of this node
        share, or if Horovod has NCCL and the node has fewer GPUs than ranks
        (unless `pin_gpu` is false).

    Example:
      >>> import tfposeidon as tp
      >>> tp.init().size
      1
    """
    global _wire, _server_rank
    if _wire is not None:
        check_same_layout(_wire.topology, ranks_per_node)
        _check_same_server(server_rank)
        if network is not None:
            _take_links(network, _wire.topology)
        return _wire.topology
    _check_horovod()
    # Before Horovod starts, because it then reads its environment.
    set_limits(stall_timeout_s, transport_timeout_s, serves=server_rank is not None)
    nodes = _find_peers(start_timeout_s)
    if pin_gpu:
        require_gpu_per_rank(launcher.ranks_of_node())
    _wire = _start(ranks_per_node, server_rank, nodes)
    _server_rank = server_rank
    failure.watch(_wire.topology.rank, _wire.topology.size)
    if pin_gpu:
        choose_gpu(launcher.process_rank().local_rank, launcher.ranks_of_node())
        warn_of_idle_gpus(launcher.ranks_of_node())
    _take_links(network, _wire.topology)
    return _wire.topology


def has_begun() -> bool:
    """Returns whether Horovod has been started, by the script or by the first step."""
    return _wire is not None


def wire() -> Wire:
    """Returns the collectives of this process; starts Horovod with default arguments if needed."""
    if _wire is None:
        init()
    assert _wire is not None
    return _wire


def node_wire() -> Wire:
    """Returns collectives between the ranks of this rank's node; starts Horovod if needed."""
    return GroupWire(wire(), wire().topology.node.ranks)


def own_wire() -> Wire:
    """Returns collectives of this rank alone; starts Horovod if needed."""
    return GroupWire(wire(), [rank()])


def server_rank() -> int | None:
    """Returns the server's rank that was passed to `init`; `None` for none."""
    return _server_rank


def workers() -> Group:
    """Returns the ranks that train: all except the server of `init(server_rank=...)`.

    Shard data over them: `workers().index(rank())` is the shard of this rank, out of
    `workers().size`. Starts Horovod with default arguments if needed.

    Example:
      >>> import tfposeidon as tp
      >>> tp.workers().index(tp.rank()), tp.workers().size
      (0, 1)
    """
    return Group(tuple(r for r in wire().topology.world.ranks if r != _server_rank))


def pair_wire(worker: int) -> Wire:
    """Returns collectives between the server and a worker; only these two ranks may call it."""
    assert _server_rank is not None
    return GroupWire(wire(), (_server_rank, worker))


def stall_limit_s() -> float:
    """Returns the seconds after which Horovod ends a job with a late rank; 0 for never."""
    return float(os.environ.get(launcher.STALL_LIMIT, DEFAULT_STALL_TIMEOUT_S))


def links() -> NetworkProfile | None:
    """Returns the network profile of this job, or `None` if it is not known (yet)."""
    return _links


def measures_links() -> bool:
    """Returns whether this job measures its network, at the first step that needs the profile."""
    return _measures_links


def set_links(given: NetworkProfile | Literal["measure"] | None) -> None:
    """Sets the network profile for later plans, which must be the same on all ranks."""
    global _links, _measures_links
    _links, _measures_links = (None, True) if given == MEASURE else (given, False)


def keep_links(measured: NetworkProfile) -> None:
    """Stores a measured profile, the same on all ranks, of this job or the one that it resumes."""
    global _links
    _links = measured


def _take_links(given: Any, topology: Topology) -> None:
    # A single rank has no network, even if the script describes one for larger jobs.
    if topology.size == 1:
        return
    import tensorflow as tf

    on_gpu = bool(tf.config.list_physical_devices("GPU"))
    if given is None:
        given = UNKNOWN if on_gpu else MEASURE
    if given in (MEASURE, UNKNOWN):
        set_links(MEASURE if given == MEASURE else None)
    else:
        found = parse_links(given, topology, "v100" if on_gpu else "cpu")
        here = socket.gethostname()
        if found.hosts and here not in found.hosts:
            say(
                "tfposeidon: the network profile was measured on %s, but this host is %s; the "
                "profile is valid only if the nodes are of the same kind.",
                ", ".join(found.hosts),
                here,
            )
        set_links(found)


def rank() -> int:
    """Returns the rank of this process, from 0.

    Starts Horovod with default arguments if needed.

    Example:
      >>> import tfposeidon as tp
      >>> tp.rank()
      0
    """
    return wire().topology.rank


def size() -> int:
    """Returns the number of ranks in the job.

    Starts Horovod with default arguments if needed.

    Example:
      >>> import tfposeidon as tp
      >>> tp.size()
      1
    """
    return wire().topology.size


def local_rank() -> int:
    """Returns the index of this process among the ranks of its node, from 0.

    With `init(ranks_per_node=...)`, nodes are the emulated ones. Starts Horovod with default
    arguments if needed.

    Example:
      >>> import tfposeidon as tp
      >>> tp.local_rank()
      0
    """
    return wire().topology.position


def local_size() -> int:
    """Returns the number of ranks of this process's node.

    Starts Horovod with default arguments if needed.

    Example:
      >>> import tfposeidon as tp
      >>> tp.local_size()
      1
    """
    return wire().topology.node.size


def spokesman() -> int:
    """Returns the rank that logs for the job: the server if there is one, else rank 0."""
    return _server_rank or 0


def say(text: str, *values: object) -> None:
    """Logs one line about the job, on one rank only; arguments as for `logging`."""
    if rank() == spokesman():
        # A warning, because without a logging configuration Python shows nothing below that level.
        log.warning(text, *values)


def _find_peers(timeout_s: float) -> meeting.Nodes | None:
    """Returns the ranks of each node if they find each other by a platform's variables."""
    import horovod.tensorflow as hvd

    ranges.check_number("start_timeout_s", timeout_s, ranges.AT_LEAST_1, "The unit is seconds.")
    return None if hvd.is_initialized() else meeting.join(timeout_s, has_mpi=launcher.has_mpi())


def _start(
    ranks_per_node: int | None, server_rank: int | None, nodes: meeting.Nodes | None
) -> HorovodWire:
    import horovod.tensorflow as hvd

    if hvd.is_initialized():
        return adopt(hvd, ranks_per_node, server_rank)
    own = launcher.process_rank()
    check_server_rank(server_rank, own.size)
    if ranks_per_node is None and own.size > 1 and launcher.Store.of_launcher() is None:
        return start_over_mpi(hvd, own, server_rank)
    topology = _find_topology(own, ranks_per_node, nodes)
    _check_layout_in_store(topology, server_rank)
    # Passed at the start: process sets that are added later make each cycle of Horovod's thread
    # wait for all ranks.
    groups = _groups(topology, server_rank)
    process_sets = {group: hvd.ProcessSet(list(group.ranks)) for group in groups}
    hvd.init(process_sets=list(process_sets.values()))
    _check_layout(hvd, topology)
    return HorovodWire(topology, process_sets)


def _groups(topology: Topology, server_rank: int | None) -> tuple[Group, ...]:
    """Returns the groups that need a process set: nodes, positions, and pairs with the server."""
    pairs: list[Group] = []
    # In a job of two ranks the pair is the world, which has a process set.
    if server_rank is not None and topology.size > 2:
        others = (r for r in topology.world.ranks if r != server_rank)
        pairs = [Group(tuple(sorted((server_rank, r)))) for r in others]
    # A node of two ranks may also be a pair.
    return tuple(dict.fromkeys([*topology.groups(), *pairs]))


def start_over_mpi(hvd: Any, own: launcher.ProcessRank, server_rank: int | None) -> HorovodWire:
    """Starts Horovod if ranks do not know each other's hosts beforehand."""
    # Process sets are added after the start, which makes each cycle of Horovod's thread wait for
    # all ranks.
    hvd.init(process_sets="dynamic")
    # A Horovod without MPI has one process in each of mpirun's.
    _check_layout(hvd, own)
    # This layout has all ranks on one node, so the world is its only group.
    world = HorovodWire(Topology.regular(hvd.rank(), hvd.size(), hvd.size()), {})
    everybody = exchange_objects([socket.gethostname(), server_rank], world, "tp.hosts")
    _require_same_servers([server for _, server in everybody])
    nodes: dict[str, list[int]] = {}
    for rank, (host, _) in enumerate(everybody):
        nodes.setdefault(host, []).append(rank)
    topology = Topology(hvd.rank(), tuple(map(tuple, nodes.values())))
    groups = _groups(topology, server_rank)
    return HorovodWire(topology, {g: hvd.add_process_set(list(g.ranks)) for g in groups})


def _find_topology(
    own: launcher.ProcessRank, ranks_per_node: int | None, nodes: meeting.Nodes | None
) -> Topology:
    if ranks_per_node is not None:
        return Topology.regular(own.rank, own.size, ranks_per_node)
    if nodes is not None:
        return Topology(own.rank, nodes)
    store = launcher.Store.of_launcher()
    if store is None or own.size == 1:
        return Topology(0, ((0,),))
    sizes = launcher.node_sizes(store, own)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return Topology(
        own.rank, tuple(tuple(range(s, s + n)) for s, n in zip(starts, sizes, strict=True))
    )


def _check_layout_in_store(topology: Topology, server_rank: int | None) -> None:
    """Compares the layout with that of rank 0, before Horovod starts."""
    # Horovod would abort without a reason if process sets differed between ranks.
    store = launcher.Store.of_launcher()
    if store is None or topology.size == 1:
        return
    mine = [list(node) for node in topology.nodes]
    if topology.rank == 0:
        store.put("layout", [mine, server_rank])
    else:
        nodes, server = store.wait_for("layout", LAYOUT_PATIENCE_S)
        agreement.require_equal(
            {0: nodes, topology.rank: mine},
            "All ranks must see the same nodes",
            "Pass the same `ranks_per_node` to tfposeidon.init() on every rank.",
        )
        _require_same_servers({0: server, topology.rank: server_rank})


def _require_same_servers(servers: Any) -> None:
    agreement.require_equal(
        servers,
        "All ranks must use the same `server_rank`",
        "Pass the same `server_rank` to tfposeidon.init() on every rank.",
    )


def check_server_rank(server_rank: int | None, size: int) -> None:
    """Refuses an invalid rank of the server, and a job without workers."""
    if server_rank is None:
        return
    ranges.check_integer("server_rank", server_rank, 0)
    if size == 1:
        raise ValueError(
            "`server_rank` requires a job of two or more ranks. Received: server_rank=0 in a job "
            "of one rank. Start the job with horovodrun -np 2 or more, or leave `server_rank` "
            "out."
        )
    if server_rank >= size:
        raise ValueError(
            f"`server_rank` must be one of the {size} ranks. Received: server_rank={server_rank}. "
            "Use 0."
        )


def _check_same_server(server_rank: int | None) -> None:
    if server_rank not in (None, _server_rank):
        raise RuntimeError(
            f"Process sets are created once per process. Received: server_rank={server_rank}, but "
            f"the job started with server_rank={_server_rank}. Pass `server_rank` to the first "
            "tfposeidon.init()."
        )


def adopt(hvd: Any, ranks_per_node: int | None, server_rank: int | None) -> HorovodWire:
    """Uses a Horovod that the script started, if no process sets are needed."""
    check_server_rank(server_rank, hvd.size())
    topology = Topology.regular(hvd.rank(), hvd.size(), ranks_per_node or hvd.local_size())
    described = launcher.process_rank().size if hvd.size() == 1 else 1
    problem = None
    if described > 1:
        problem = f"found one rank, but the environment describes {described}"
    elif missing := _groups(topology, server_rank):
        problem = f"{topology} need {len(missing)} process sets"
    if problem:
        raise RuntimeError(
            "tfposeidon.init() must start Horovod to create its process sets. Received: "
            f"hvd.init() was called before, and {problem}. Replace hvd.init() by "
            "tfposeidon.init()."
        )
    return HorovodWire(topology, {})


def _check_horovod() -> None:
    remedy = "Run: python -m tfposeidon install --horovod-only"
    try:
        import horovod.tensorflow  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError(f"tfposeidon requires Horovod ({error}). {remedy}") from error
    except ImportError as error:
        raise ImportError(
            f"Horovod is installed, but cannot be imported with this TensorFlow ({error}). {remedy}"
        ) from error


def set_limits(
    stall_timeout_s: float | None, transport_timeout_s: float | None, serves: bool = False
) -> None:
    """Sets Horovod's variables for time limits, except those that the user has set."""
    if transport_timeout_s is None and serves and launcher.TRANSPORT_LIMIT not in os.environ:
        transport_timeout_s = SERVED_TRANSPORT_TIMEOUT_S
    for name, value in (
        ("stall_timeout_s", stall_timeout_s),
        ("transport_timeout_s", transport_timeout_s),
    ):
        if value is not None:
            ranges.check_number(name, value, ranges.AT_LEAST_1, "The unit is seconds.")
    if stall_timeout_s is not None or launcher.STALL_LIMIT not in os.environ:
        limit = round(stall_timeout_s or DEFAULT_STALL_TIMEOUT_S)
        os.environ[launcher.STALL_LIMIT] = str(limit)
        # Horovod checks for late ranks once per warning time, and only ends the job at such a
        # check.
        os.environ[launcher.STALL_WARNING] = str(max(1, min(LONGEST_STALL_WARNING_S, limit // 4)))
    if transport_timeout_s is not None:
        os.environ[launcher.TRANSPORT_LIMIT] = str(round(transport_timeout_s))


def check_same_layout(topology: Topology, ranks_per_node: int | None) -> None:
    """Refuses a number of ranks per node other than that of the running job."""
    if ranks_per_node is None:
        return
    asked = Topology.regular(topology.rank, topology.size, ranks_per_node)
    if asked.nodes != topology.nodes:
        raise RuntimeError(
            "Process sets are created once per process. Received: "
            f"ranks_per_node={ranks_per_node}, but the job already runs as {topology}. Pass "
            "`ranks_per_node` to the first tfposeidon.init()."
        )


def _check_layout(hvd: Any, expected: Topology | launcher.ProcessRank) -> None:
    if (hvd.rank(), hvd.size()) != (expected.rank, expected.size):
        raise RuntimeError(
            "The launcher's environment variables and Horovod must agree. Received: rank "
            f"{expected.rank} of {expected.size} from the environment, rank {hvd.rank()} of "
            f"{hvd.size()} from Horovod. Start the job with horovodrun, with mpirun only if "
            "Horovod is built with MPI, or remove the variables of another job from the "
            "environment."
        )


def require_gpu_per_rank(ranks_here: int | None) -> None:
    """Refuses ranks that share a GPU under NCCL, which would fail at the first collective."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    if ranks_here is None or not hvd.nccl_built() or sources.VISIBLE_GPUS in os.environ:
        # SLURM makes only one GPU visible to each rank, so shared GPUs cannot be detected here;
        # NCCL detects them.
        return
    gpus = len(tf.config.list_physical_devices("GPU"))
    if 0 < gpus < ranks_here:
        raise RuntimeError(
            f"NCCL requires one GPU per rank. Received: {ranks_here} ranks on this node, which "
            f"has {gpus} GPU(s). Start at most {gpus} ranks on each node, or install a Horovod in "
            "which ranks can share GPUs: python -m tfposeidon install --horovod-only --no-cuda"
        )


def choose_gpu(local_rank: int, ranks_here: int | None) -> None:
    """Makes only this rank's GPU visible to TensorFlow, or raises if ranks would share all."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return
    try:
        # With more ranks than GPUs, some share one, which memory growth makes possible.
        own = gpus[local_rank % len(gpus)]
        tf.config.set_visible_devices(own, "GPU")
        tf.config.experimental.set_memory_growth(own, True)
    except RuntimeError as error:
        if len(gpus) > 1 and (ranks_here or 1) > 1:
            raise RuntimeError(
                "Each rank must choose its GPU before TensorFlow initializes any. Received: "
                f"TensorFlow has initialized {len(gpus)} GPUs, and {ranks_here} ranks share this "
                "node. Call tfposeidon.init(), or a function that calls it, such as tp.shard, "
                "before the first model, tensor or dataset."
            ) from error
        log.warning(
            "TensorFlow was initialized before tfposeidon.init(); its visible GPUs stay "
            "unchanged (%s)",
            error,
        )


def warn_of_idle_gpus(ranks_here: int | None) -> None:
    """Warns if one process is alone on a node with several GPUs, of which it uses one."""
    import tensorflow as tf

    gpus = len(tf.config.list_physical_devices("GPU"))
    if ranks_here == 1 and gpus > 1:
        log.warning(
            "tfposeidon: one of the %d GPUs of this node is used, because only one rank runs here. "
            "To start one rank per GPU: python -m tfposeidon run -- python train.py",
            gpus,
        )

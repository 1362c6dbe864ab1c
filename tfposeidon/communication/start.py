"""Starts Horovod with the process sets that the topology needs, and chooses each rank's GPU.

`runtime.init` calls these functions once per process.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import socket
from typing import Any

import tensorflow as tf

from tfposeidon import checks
from tfposeidon.checks import at_first_entry, require_equal
from tfposeidon.communication import launcher
from tfposeidon.communication.topology import Topology
from tfposeidon.communication.wire import HorovodWire, exchange_objects
from tfposeidon.peers import rendezvous, sources

SERVED_TRANSPORT_TIMEOUT_S = 300.0
"""Default seconds that Gloo waits in jobs with a server, whose Horovod thread communicates with one
worker at a time; a transfer of large weights over a slow network takes minutes."""
DEFAULT_STALL_TIMEOUT_S = 300.0
"""Default seconds that ranks wait for a late rank; Horovod's default of 0 waits forever."""
LONGEST_STALL_WARNING_S = 60
"""Maximum seconds between Horovod's checks for late ranks."""
LAYOUT_PATIENCE_S = 120.0
"""Seconds that a rank waits for rank 0 to write its layout to the launcher's store."""

log = logging.getLogger("tfposeidon")


def find_peers(timeout_s: float) -> rendezvous.Nodes | None:
    """Returns the ranks of each node on a platform without a launcher, else `None`."""
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise ImportError(
            "tfposeidon requires Horovod, which cannot be imported with this TensorFlow "
            f"({error}). Run: python -m tfposeidon install --horovod-only"
        ) from error
    checks.check_number("start_timeout_s", timeout_s, checks.AT_LEAST_1, "Pass seconds.")
    return None if hvd.is_initialized() else rendezvous.join(timeout_s, has_mpi=launcher.has_mpi())


def start_horovod(
    ranks_per_node: int | None,
    server_rank: int | None,
    nodes: rendezvous.Nodes | None,
    pin_gpu: bool,
) -> HorovodWire:
    """Starts Horovod, or uses the instance that the script has started."""
    import horovod.tensorflow as hvd

    if hvd.is_initialized():
        return adopt(hvd, ranks_per_node, server_rank)
    own = launcher.process_rank()
    check_server_rank(server_rank, own.size)
    store = launcher.Store.of_launcher() if own.size > 1 else None
    if ranks_per_node is None and own.size > 1 and store is None:
        return start_over_mpi(hvd, own, server_rank, pin_gpu)
    check_interface()
    topology = _find_topology(own, ranks_per_node, nodes, store)
    mine = {"nodes": [list(node) for node in topology.nodes], "server_rank": server_rank}
    # Compare layouts now: Horovod would abort without naming the reason if process sets differed.
    if store is not None and own.rank == 0:
        store.put("layout", mine)
    elif store is not None:
        _require_equal({0: store.wait_for("layout", LAYOUT_PATIENCE_S), own.rank: mine})
    # Pass process sets at the start: process sets that are added later make each cycle of Horovod's
    # thread wait for all ranks.
    process_sets = {g: hvd.ProcessSet(list(g.ranks)) for g in topology.groups(server_rank)}
    hvd.init(process_sets=list(process_sets.values()))
    _check_layout(hvd, topology)
    return HorovodWire(topology, process_sets)


def start_over_mpi(
    hvd: Any, own: launcher.ProcessRank, server_rank: int | None, pin_gpu: bool
) -> HorovodWire:
    """Starts Horovod under MPI, where ranks learn each other's hosts only after the start."""
    # Add process sets after the start, although each cycle of Horovod's thread then waits for all
    # ranks.
    hvd.init(process_sets="dynamic")
    # Detect a Horovod without MPI, which makes each process of mpirun a job of one rank.
    _check_layout(hvd, own)
    if pin_gpu:
        # The first collective initializes all visible GPUs.
        choose_own_gpu()
    # This layout has all ranks on one node, so the world is its only group.
    world = HorovodWire(Topology.regular(hvd.rank(), hvd.size(), hvd.size()), {})
    own_host = [socket.gethostname(), {"server_rank": server_rank}]
    hosts, servers = zip(*exchange_objects(own_host, world, "tp.hosts"), strict=True)
    _require_equal(servers)
    topology = Topology(hvd.rank(), rendezvous.nodes_of(hosts))
    groups = topology.groups(server_rank)
    return HorovodWire(topology, {g: hvd.add_process_set(list(g.ranks)) for g in groups})


def _find_topology(
    own: launcher.ProcessRank,
    ranks_per_node: int | None,
    nodes: rendezvous.Nodes | None,
    store: launcher.Store | None,
) -> Topology:
    if ranks_per_node is not None:
        return Topology.regular(own.rank, own.size, ranks_per_node)
    if nodes is not None:
        return Topology(own.rank, nodes)
    if store is None:
        return Topology(0, ((0,),))
    ranks = itertools.count()
    sizes = launcher.node_sizes(store, own)
    return Topology(own.rank, tuple(tuple(itertools.islice(ranks, size)) for size in sizes))


def _require_equal(layouts: Any) -> None:
    require_equal(
        layouts,
        "All ranks must see the same nodes and use the same `server_rank`",
        "Pass the same `ranks_per_node` and `server_rank` to tfposeidon.init() on every rank.",
        at_first_entry(),
    )


def check_interface() -> None:
    """Raises `ValueError` if this host lacks Gloo's network interface: Horovod would abort."""
    name, names = os.environ.get(rendezvous.INTERFACE), [name for _, name in socket.if_nameindex()]
    if name and name not in names:
        raise ValueError(
            f"{rendezvous.INTERFACE} must name a network interface of this host. Received: "
            f"{name!r} on {socket.gethostname()}, which has {', '.join(names)}. Set one of these, "
            "or remove the variable."
        )


def check_server_rank(server_rank: int | None, size: int) -> None:
    """Raises `ValueError` for an invalid server rank, or for a job without workers."""
    if server_rank is None:
        return
    checks.check_integer("server_rank", server_rank, 0)
    if size == 1 or server_rank >= size:
        raise ValueError(
            "`server_rank` must be one of two or more ranks. Received: "
            f"server_rank={server_rank} in a job of {size} rank(s). Use 0 in a job of horovodrun "
            "-np 2 or more, or leave `server_rank` out."
        )


def adopt(hvd: Any, ranks_per_node: int | None, server_rank: int | None) -> HorovodWire:
    """Uses the Horovod instance that the script has started, if no process sets are needed."""
    check_server_rank(server_rank, hvd.size())
    topology = Topology.regular(hvd.rank(), hvd.size(), ranks_per_node or hvd.local_size())
    problem = None
    if hvd.size() == 1 and (described := launcher.process_rank().size) > 1:
        problem = f"found one rank, but the environment describes {described}"
    elif missing := topology.groups(server_rank):
        problem = f"{topology} need {len(missing)} process sets"
    if problem:
        raise RuntimeError(
            "tfposeidon.init() must start Horovod to create its process sets. Received: hvd.init() "
            f"was called before, and {problem}. Replace hvd.init() with tfposeidon.init()."
        )
    return HorovodWire(topology, {})


def set_limits(
    stall_timeout_s: float | None, transport_timeout_s: float | None, serves: bool = False
) -> None:
    """Sets Horovod's time limits in the environment; defaults do not override set variables."""
    if transport_timeout_s is None and serves and launcher.TRANSPORT_LIMIT not in os.environ:
        transport_timeout_s = SERVED_TRANSPORT_TIMEOUT_S
    limits = {"stall_timeout_s": stall_timeout_s, "transport_timeout_s": transport_timeout_s}
    for name, value in limits.items():
        if value is not None:
            checks.check_number(name, value, checks.AT_LEAST_1, "Pass seconds.")
    if stall_timeout_s is not None or launcher.STALL_LIMIT not in os.environ:
        limit = round(stall_timeout_s or DEFAULT_STALL_TIMEOUT_S)
        os.environ[launcher.STALL_LIMIT] = str(limit)
        # Shorten the warning time, too: Horovod checks for late ranks once per warning time, and
        # ends the job only at such a check.
        os.environ[launcher.STALL_WARNING] = str(max(1, min(LONGEST_STALL_WARNING_S, limit // 4)))
    if transport_timeout_s is not None:
        os.environ[launcher.TRANSPORT_LIMIT] = str(round(transport_timeout_s))


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
    """Raises `RuntimeError` if ranks share a GPU, because NCCL's first collective would fail."""
    import horovod.tensorflow as hvd

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


@functools.cache
def choose_own_gpu() -> None:
    """Calls `choose_gpu` for this rank, once per process."""
    import horovod.tensorflow as hvd

    choose_gpu(hvd.local_rank(), hvd.local_size())


def choose_gpu(local_rank: int, ranks_here: int) -> None:
    """Makes only this rank's GPU visible to TensorFlow; raises if ranks would share all GPUs.

    Warns if the only rank of a node uses one of several GPUs.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return
    try:
        # If there are more ranks than GPUs, ranks share GPUs, which requires memory growth.
        own = gpus[local_rank % len(gpus)]
        tf.config.set_visible_devices(own, "GPU")
        tf.config.experimental.set_memory_growth(own, True)
    except (RuntimeError, ValueError) as error:
        # The script may have chosen a GPU, or have divided it into logical devices.
        if len(tf.config.get_visible_devices("GPU")) > 1 and ranks_here > 1:
            raise RuntimeError(
                "Each rank must choose its GPU before TensorFlow initializes any. Received: "
                f"TensorFlow has initialized {len(gpus)} GPUs, and {ranks_here} ranks share this "
                "node. Call tfposeidon.init(), or a function that calls it, such as tp.shard, "
                "before the first model, tensor or dataset."
            ) from error
        log.warning(
            "tfposeidon: TensorFlow's GPUs were configured before tfposeidon.init(), and the "
            "visible GPUs stay unchanged (%s)",
            error,
        )
        return
    if ranks_here == 1 and len(gpus) > 1:
        log.warning(
            "tfposeidon: one of the %d GPUs of this node is used, because only one rank runs here. "
            "To start one rank per GPU: python -m tfposeidon run -- python train.py",
            len(gpus),
        )

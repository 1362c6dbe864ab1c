"""Starts the job of this process, and provides its ranks, collectives and network profile.

This module rejects environments in which collectives cannot run: other backends of Keras, the scope
of a `tf.distribute` strategy, and XLA.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfposeidon import native
from tfposeidon.communication import failure, launcher, start
from tfposeidon.communication.network_profile import NetworkProfile, parse_network
from tfposeidon.communication.topology import Group, Topology
from tfposeidon.communication.wire import GroupWire, HorovodWire, Wire
from tfposeidon.peers import rendezvous

MEASURE, UNKNOWN = "measure", "unknown"
"""Values of `network`: measure the profile when the first step needs it, or use none."""

_OF_FUNCTIONS = 50
"""Priority of the variable creators of `tf.function`; creators of users have another priority."""

log = logging.getLogger("tfposeidon")
_wire: HorovodWire | None = None
_server_rank: int | None = None
_network_profile: NetworkProfile | None = None
_measures_network = False


def init(
    *,
    ranks_per_node: int | None = None,
    stall_timeout_s: float | None = None,
    transport_timeout_s: float | None = None,
    pin_gpu: bool = True,
    network: Any = None,
    server_rank: int | None = None,
    start_timeout_s: float = rendezvous.START_TIMEOUT_S,
) -> Topology:
    """Starts Horovod, finds the nodes and sets up process sets. May be called repeatedly.

    Ranks find each other by the environment variables of their launcher or platform; without such
    variables, `init` starts a job of one rank. The first step calls `init` if the script does not.
    Call it to pass arguments, or before code that depends on the rank.

    Args:
      ranks_per_node: Number of ranks of each emulated node; by default, nodes are the launcher's
        hosts.
      stall_timeout_s: Seconds that ranks wait for a late rank that is alive before the job ends;
        default 300, or the value of `HOROVOD_STALL_SHUTDOWN_TIME_SECONDS`.
      transport_timeout_s: Seconds that Gloo waits for a stopped process or a broken connection;
        default 30, with a server 300, or the value of `HOROVOD_GLOO_TIMEOUT_SECONDS`.
      pin_gpu: True (default) to assign each rank of a node the GPU of its local rank, with memory
        growth; False to retain the script's own GPU configuration.
      network: Network profile for the plans of `scheme="auto"`, the same on all ranks: `"measure"`
        to measure it at the first step; the bandwidth between nodes in one direction with its unit,
        such as `"25gbit"`; a `tfposeidon.NetworkProfile`; the path of a file that contains one; or
        `"unknown"`, with which `"auto"` uses all-reduce. The default is `"measure"`, which is
        untested on GPUs.
      server_rank: Rank that holds the global weights of `ElasticAveraging` and does not train, the
        same on all ranks; `None` (default) for none.
      start_timeout_s: Seconds within which all ranks of a platform must call this function (default
        600); launchers have their own limits.

    Returns:
      The topology from the perspective of this rank: `rank`, `size`, `nodes`.

    Raises:
      ImportError: If Horovod is missing or was built without TensorFlow.
      ValueError: If an argument is out of its range, `network` is for another kind of cluster, or
        the variables of a platform are incomplete or contradict each other.
      TimeoutError: If a rank did not call `init` within `start_timeout_s`.
      PermissionError: If this rank's token differs from the job's token.
      RuntimeError: If `init` was called before with another layout or server, if ranks request
        different layouts or servers, if two processes have the same rank, if `hvd.init()` was
        called before and process sets are needed, if TensorFlow has initialized the GPUs that ranks
        of this node share, or if Horovod is built with NCCL and the node has fewer GPUs than ranks
        (unless `pin_gpu` is false).

    Example:
      >>> import tfposeidon as tp
      >>> tp.init().size
      1
    """
    global _wire, _server_rank
    if _wire is not None:
        check_same_job(_wire.topology, ranks_per_node, server_rank)
        if network is not None:
            _set_network(network, _wire.topology)
        return _wire.topology
    # Set the time limits first, because Horovod reads them from the environment when it starts.
    start.set_limits(stall_timeout_s, transport_timeout_s, serves=server_rank is not None)
    nodes = start.find_peers(start_timeout_s)
    if pin_gpu:
        start.require_gpu_per_rank(launcher.ranks_of_node())
    _wire = start.start_horovod(ranks_per_node, server_rank, nodes, pin_gpu)
    _server_rank = server_rank
    failure.watch(_wire.topology.rank, _wire.topology.size)
    if pin_gpu:
        # Choose the GPU after `watch`, so that all ranks report the cause if this fails.
        start.choose_own_gpu()
    _set_network(network, _wire.topology)
    return _wire.topology


def has_begun() -> bool:
    """Returns whether Horovod has been started, by the script or by the first step."""
    return _wire is not None


def wire() -> HorovodWire:
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
    """Returns the server's rank, or `None` for a job without a server."""
    return _server_rank


def workers() -> Group:
    """Returns the ranks that train: all except the server of `init(server_rank=...)`.

    To shard data over workers, assign shard `workers().index(rank())` of `workers().size` to this
    rank. Starts Horovod with default arguments if needed.

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
    return float(os.environ.get(launcher.STALL_LIMIT, start.DEFAULT_STALL_TIMEOUT_S))


def network_profile() -> NetworkProfile | None:
    """Returns the network profile of this job, or `None` while it is unknown."""
    return _network_profile


def measures_network() -> bool:
    """Returns whether this job measures its network, at the first step that needs the profile."""
    return _measures_network


def set_network_profile(profile: NetworkProfile | None, *, measures: bool = False) -> None:
    """Sets the profile for later plans, and whether it is measured; the same on all ranks."""
    global _network_profile, _measures_network
    _network_profile, _measures_network = profile, measures


def _set_network(given: Any, topology: Topology) -> None:
    # A single rank has no network, even if the script describes one for larger jobs.
    if topology.size == 1:
        return
    if given in (None, MEASURE, UNKNOWN):
        set_network_profile(None, measures=given != UNKNOWN)
        return
    device = "v100" if tf.config.list_physical_devices("GPU") else "cpu"
    found = parse_network(given, topology, device)
    here = socket.gethostname()
    if found.hosts and here not in found.hosts:
        log_once(
            "tfposeidon: the network profile was measured on %s, but this host is %s; the "
            "profile is valid only if the nodes are of the same kind.",
            ", ".join(found.hosts),
            here,
        )
    set_network_profile(found)


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

    With `init(ranks_per_node=...)`, the node is an emulated node. Starts Horovod with default
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


def leader() -> int:
    """Returns the rank that logs job-wide messages: the server if there is one, else rank 0."""
    return _server_rank or 0


def log_once(text: str, *values: object) -> None:
    """Logs a job-wide message on the leader only, with the arguments of `logging.warning`."""
    if rank() == leader():
        # Log a warning: without a logging configuration, Python omits messages below that level.
        log.warning(text, *values)


def check_same_job(topology: Topology, ranks_per_node: int | None, server_rank: int | None) -> None:
    """Raises `RuntimeError` if arguments of a later `init` contradict the running job."""
    asked = topology
    if ranks_per_node is not None:
        asked = Topology.regular(topology.rank, topology.size, ranks_per_node)
    if asked.nodes != topology.nodes or server_rank not in (None, _server_rank):
        raise RuntimeError(
            "Arguments of a later tfposeidon.init() must match the running job, because process "
            f"sets are created only once. Received: ranks_per_node={ranks_per_node}, "
            f"server_rank={server_rank}, but the job already runs as {topology} with "
            f"server_rank={_server_rank}. Pass `ranks_per_node` and `server_rank` to the first "
            "tfposeidon.init()."
        )


# ------------------------------------------------------------------ environment of a step


def check_environment() -> None:
    """Raises `ValueError` for another Keras backend, or in the scope of `tf.distribute`."""
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            "tfposeidon requires Keras's TensorFlow backend. Received: backend "
            f"{keras.backend.backend()!r}. Set KERAS_BACKEND=tensorflow."
        )
    if tf.distribute.has_strategy():
        raise ValueError(
            "DistributedOptimizer replaces tf.distribute and must not run in the scope of a "
            f"strategy. Received: the scope of {type(tf.distribute.get_strategy()).__name__}. "
            "Leave the strategy's scope, and start one process per GPU with horovodrun."
        )


def check_graph() -> None:
    """Raises `ValueError` if collectives cannot run in the environment of a traced step."""
    check_environment()
    check_is_outside_xla("a step")


def check_is_outside_xla(received: str) -> None:
    """Raises `ValueError` in a trace for XLA; `received` describes the traced code."""
    if native.in_xla():
        raise ValueError(
            "Steps and collectives must run without XLA, which cannot compile them. Received: "
            f"{received} in a function that is compiled with jit_compile=True or xla_segments. "
            "Leave both out. To compile the gradients alone, train with Keras's own train_step."
        )


@contextlib.contextmanager
def variables_outside_trace() -> Iterator[None]:
    """Makes variables in this context appear created before the trace, to prevent retracing."""
    # `tf.init_scope` is not sufficient: `tf.function` would still register these variables, and
    # trace again without creating any. TensorFlow has no public alternative to this attribute.
    graph = tf.compat.v1.get_default_graph()
    before = graph._variable_creator_stack
    graph._variable_creator_stack = [one for one in before if one[0] != _OF_FUNCTIONS]
    try:
        with tf.init_scope():
            yield
    finally:
        graph._variable_creator_stack = before

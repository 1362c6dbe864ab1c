"""Starts and ends asynchronous training, collectively over all ranks.

`fit` and `ElasticAveraging.run` first call `begin_fit` or `begin`, which copy the server's values
to all ranks. Workers then call `start_worker` and finally `end_worker`, and the server enters
`serving`, which saves the global weights if the job ends early.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfposeidon.checks import at_first_entry, require_equal
from tfposeidon.communication import failure, runtime
from tfposeidon.communication.wire import exchange_objects, pack, unpack
from tfposeidon.elastic_averaging.calls import Worker
from tfposeidon.elastic_averaging.server import Served, Server
from tfposeidon.exchange import replicas
from tfposeidon.state.placement import Placement, is_seed, seeds_of_layers
from tfposeidon.text import readable_size
from tfposeidon.training import entries, session

log = logging.getLogger("tfposeidon")


def check_roles() -> None:
    if runtime.server_rank() is None:
        raise ValueError(
            "ElasticAveraging requires a server and at least one worker. Received: "
            f"{runtime.size()} rank(s), server_rank=None. Start the job with horovodrun -np 2 or "
            "more, and call tfposeidon.init(server_rank=0) at the beginning of the script; on one "
            "rank, use the inner optimizer."
        )


def check_begun() -> None:
    if not runtime.has_begun():
        raise RuntimeError(
            "tfposeidon.init must be called before ElasticAveraging computes its plan or its "
            "default `alpha`, which depend on the ranks of the job. Received: no call. Call "
            "tfposeidon.init(server_rank=0) first, or tfposeidon.init() if there is only one rank."
        )


def is_server() -> bool:
    return runtime.server_rank() == runtime.rank()


# ------------------------------------------------------------------ start


def begin_fit(arguments: dict[str, Any]) -> tuple[list[Any], int | None]:
    """Copies the server's state to all ranks; returns optimizers, and the resumed epoch or None."""
    model = arguments["self"]
    optimizers = _optimizers(model)
    epochs = {name: arguments[name] for name in ("epochs", "initial_epoch")}
    return optimizers, begin(optimizers, [model], epochs, session.of(model).resumed_epoch)


def begin(
    optimizers: Sequence[Any],
    models: Sequence[Any],
    epochs: dict[str, int],
    resumed: int | None = None,
) -> int | None:
    """Copies the server's state to all ranks; returns the resumed epoch of the server."""
    for optimizer in optimizers:
        optimizer.check_detached()
    own = [
        {"variables": [list(v.shape) for v in o.exchanged_variables], **o.agreed_settings}
        for o in optimizers
    ]
    equal = {"number of models": len(models), **epochs}
    everybody = exchange_objects([own, equal, resumed], runtime.wire(), "tp.asynchronous")
    optimizers_of_ranks, settings, resumed_epochs = zip(*everybody, strict=True)
    require_equal(
        optimizers_of_ranks,
        "Optimizers must be the same on all ranks",
        "Build the same model with the same arguments on the server and on all workers.",
    )
    require_equal(
        settings,
        "All ranks must train the same models for the same epochs",
        "Pass the same `epochs` and `initial_epoch` to fit, or the same models=[...] to run, on "
        "the server and on all workers.",
        at_first_entry(),
    )
    for optimizer in optimizers:
        variables = [*optimizer.exchanged_variables, *optimizer.sent_variables]
        replicas.broadcast(variables, runtime.wire(), runtime.leader())
    for model in models:
        _share_rest(model, optimizers)
    return resumed_epochs[runtime.leader()]


def _share_rest(model: Any, optimizers: Sequence[Any]) -> None:
    """Copies the model's other state, such as frozen weights; each rank gets a different seed."""
    if partial := entries.variables_of(model, Placement.PARTIAL):
        raise ValueError(
            "ElasticAveraging does not support partial variables, because ranks that train "
            f"asynchronously cannot sum their parts. Received: {partial[0].name!r}, "
            "registered as partial. Register it as local, or use LocalUpdates."
        )
    left_out = {id(v) for optimizer in optimizers for v in optimizer.exchanged_variables}
    local = entries.variables_of(model, Placement.LOCAL)
    left_out |= {id(v) for v in local if not is_seed(v)}
    # Keras leaves seeds out of `weights`.
    weights = [*model.weights, *seeds_of_layers(model)]
    rest = [v for v in weights if id(v) not in left_out]
    replicas.broadcast(rest, runtime.wire(), runtime.leader())
    entries.broadcast_layers(model, runtime.wire(), runtime.leader())


def _optimizers(model: Any) -> list[Any]:
    found = session.of(model).optimizers
    if not all(hasattr(optimizer, "exchanged_variables") for optimizer in found):
        raise ValueError(
            "Either all optimizers of a model must exchange with the server, or none. Received: "
            f"{[type(optimizer).__name__ for optimizer in found]}. Use ElasticAveraging for each."
        )
    if model.built and len(found) == 1 and not found[0].built:
        found[0].build(model.trainable_variables)
    if not all(optimizer.built for optimizer in found):
        raise ValueError(
            "Models and optimizers must be built before fit, because the server takes no steps. "
            f"Received: model.built={model.built}, and built={[o.built for o in found]} for its "
            "optimizers. Call model.build(input_shape) and, if a model has several optimizers, "
            "optimizer.build(variables) for each before fit."
        )
    return found


def start_worker(optimizers: Sequence[Any]) -> Worker:
    worker = Worker(runtime.pair_wire(runtime.rank()), runtime.stall_limit_s())
    for number, optimizer in enumerate(optimizers):
        optimizer.attach(worker, number)
    return worker


@contextlib.contextmanager
def serving(
    optimizers: Sequence[Any], savers: Sequence[Callable[[], Any]], without: str
) -> Iterator[Server]:
    """Serves the variables' values to workers; on exit, workers receive the current values.

    See `saved_at_failure` for the other arguments.
    """
    for variable in (v for o in optimizers for v in o.exchanged_variables):
        if not tf.reduce_all(tf.math.is_finite(variable)):
            raise ValueError(
                "Variables that workers exchange must be finite when training starts. Received: "
                f"infinity or NaN in {variable.path!r}. Initialize it with finite values."
            )
    wires = {rank: runtime.pair_wire(rank) for rank in runtime.workers().ranks}
    served = [
        Served(pack(o.exchanged_variables), o.server_alpha, pack(o.sent_variables))
        for o in optimizers
    ]
    server = Server(wires, served, runtime.stall_limit_s())
    server.start()
    with saved_at_failure(server, lambda: show_centers(server, optimizers), savers, without):
        yield server
        for one, optimizer in zip(served, optimizers, strict=True):
            one.center = pack(optimizer.exchanged_variables)
        server.release()
        _end_together()


# ------------------------------------------------------------------ end


def end_worker(worker: Worker, optimizers: Sequence[Any]) -> None:
    """Exchanges weights again, waits for other workers, and assigns the final global weights."""
    for optimizer in optimizers:
        optimizer.exchange_last()
    worker.wait_for_others()
    for optimizer in optimizers:
        optimizer.take_all()
        optimizer.detach()
    worker.leave()
    _end_together()


def run(
    optimizers: Sequence[Any], train: Callable[[], Any], on_failure: Callable[[], Any] | None
) -> None:
    """Runs `train` on workers and the server's loop on the server; see `ElasticAveraging.run`."""
    if is_server():
        without = "the global weights are lost, because run received no on_failure"
        with serving(optimizers, [on_failure] if on_failure else [], without) as server:
            for _ in server.epochs():
                pass
            show_centers(server, optimizers)
        return
    worker = start_worker(optimizers)
    try:
        train()
        for optimizer in optimizers:
            optimizer.send_state()
    except BaseException:
        worker.stop_calling()
        raise
    end_worker(worker, optimizers)


def _end_together() -> None:
    # Wait for all ranks, because a rank that exits aborts the last calls of the other ranks.
    exchange_objects(None, runtime.wire(), "tp.asynchronous.end")


# ------------------------------------------------------------------ state


def show_centers(server: Server, optimizers: Sequence[Any]) -> None:
    """Assigns global weights and averaged optimizer state to the server's variables."""
    for optimizer, served in zip(optimizers, server.served, strict=True):
        assign_parts(optimizer.exchanged_variables, served.center)
        assign_parts(optimizer.sent_variables, served.state)


def assign_parts(variables: Sequence[Any], vector: tf.Tensor) -> None:
    for variable, part in zip(variables, unpack(vector, variables), strict=True):
        variable.assign(part)


def notes_of_layout(bytes_per_step: float) -> list[str]:
    topology, server, workers = runtime.wire().topology, runtime.leader(), runtime.workers()
    local = [rank for rank in workers.ranks if topology.same_node(server, rank)]
    where = f"shares its node with worker(s) {local}" if local else "is alone on its node"
    remote_bytes = (workers.size - len(local)) * bytes_per_step
    return [
        f"server: rank {server}, which {where}; {workers.size} worker(s) on "
        f"{sum(any(rank != server for rank in node) for node in topology.nodes)} node(s)",
        f"the server transfers up to {readable_size(remote_bytes)} across nodes for a step of all "
        "workers, in each direction, one worker at a time",
    ]


# ------------------------------------------------------------------ failure


_TERMINATED = 128 + signal.SIGTERM
"""Exit status in response to SIGTERM."""


@contextlib.contextmanager
def saved_at_failure(
    server: Server, show: Callable[[], None], savers: Sequence[Callable[[], Any]], without: str
) -> Iterator[None]:
    """Saves the global weights before an error or the launcher ends the server.

    `show` assigns the global weights to the server's variables, and each of `savers` saves the
    variables. `without` is the text to log if `savers` is empty.
    """
    # If one rank has failed, launchers end all ranks by SIGTERM, and by SIGKILL seconds later.
    # Python installs signal handlers in the main thread only.
    is_main = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGTERM, _exit) if is_main else None
    try:
        yield
    except BaseException as error:
        if is_main:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if isinstance(error, SystemExit) and error.code == _TERMINATED:
            failure.report_signal("SIGTERM")
        # If the script continues, workers must not train without a server.
        server.is_silent = True
        # Build a list, so that each saver runs: `any` would stop a generator at the first success.
        done = [_succeeds(save) for save in savers] if _succeeds(show) else []
        if any(done):
            without = "the server has saved the global weights"
        elif savers:
            without = "the global weights could not be saved, for the reason above"
        log.warning("tfposeidon: the job ends; %s.", without)
        raise
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)


def _exit(*_: Any) -> None:
    # The exception interrupts the main thread's current operation.
    raise SystemExit(_TERMINATED)


def _succeeds(call: Callable[[], Any]) -> bool:
    try:
        call()
    except Exception:
        # The error that ends the job must be the last error in the log.
        name = getattr(call, "__qualname__", call)
        log.exception("tfposeidon: %s could not save the global weights.", name)
        return False
    return True

"""Starts and ends asynchronous training, collectively over all ranks.

`fit` and `ElasticAveraging.run` first call `begin_fit` or `begin_loop`, which copy the server's
values to all ranks. They then call `start_worker` or `start_server`, and finally `end_worker` or
`release_workers`. If the job ends early, `saved_at_failure` saves the global weights first. All
ranks raise an error if their optimizers or other settings differ.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfposeidon.checks import at_first_entry, require_equal
from tfposeidon.communication import failure, runtime
from tfposeidon.communication.wire import exchange_objects, pack, unpack
from tfposeidon.elastic_averaging.calls import OptimizerState, ServedState, Worker
from tfposeidon.elastic_averaging.server import ServedCenter, Server
from tfposeidon.exchange import replicas
from tfposeidon.optimizers.wrapper import rates, slots, step_counter
from tfposeidon.state.placement import Placement, is_seed, seeds_of_layers
from tfposeidon.text import readable_size
from tfposeidon.training import entries, session

log = logging.getLogger("tfposeidon")


def check_roles() -> None:
    """Refuses jobs without a server, or without a worker."""
    if runtime.size() == 1:
        raise ValueError(
            "ElasticAveraging requires a server and at least one worker. Received: 1 rank. Start "
            "the job with horovodrun -np 2 or more; on one rank, use the inner optimizer."
        )
    if runtime.server_rank() is None:
        raise ValueError(
            "ElasticAveraging requires a server rank. Received: server_rank=None. Call "
            "tfposeidon.init(server_rank=0) at the beginning of the script."
        )


def check_begun(what: str) -> None:
    """Refuses operations before `tfposeidon.init` that depend on the ranks; `what` names one."""
    if not runtime.has_begun():
        raise RuntimeError(
            f"{what} depends on the ranks of the job. Received: a use before tfposeidon.init. Call "
            "tfposeidon.init(server_rank=0) first, or tfposeidon.init() if there is only one "
            "rank."
        )


def is_server() -> bool:
    return runtime.server_rank() == runtime.rank()


def _server_rank() -> int:
    rank = runtime.server_rank()
    assert rank is not None
    return rank


# ------------------------------------------------------------------ start


def begin_fit(arguments: dict[str, Any]) -> tuple[list[Any], int | None]:
    """Copies the server's state to all ranks; returns optimizers, and the resumed epoch or None."""
    model = arguments["self"]
    optimizers = _optimizers(model)
    equal = {name: arguments[name] for name in ("epochs", "initial_epoch")}
    settings = _begin(optimizers, [equal, session.of(model).resumed_epoch])
    require_equal(
        [epochs for epochs, _ in settings],
        "All ranks must train for the same epochs",
        "Pass the same `epochs` and `initial_epoch` to fit on the server and on all workers.",
        at_first_entry(),
    )
    _share_rest(model, optimizers)
    return optimizers, settings[_server_rank()][1]


def begin_loop(optimizers: list[Any], models: Sequence[Any]) -> None:
    """Copies the server's state to all ranks, for a custom loop."""
    require_equal(
        _begin(optimizers, len(models)),
        "All ranks must train the same number of models",
        "Pass the same models=[...] to run on the server and on all workers.",
    )
    for model in models:
        _share_rest(model, optimizers)


def _begin(optimizers: Sequence[Any], settings: Any) -> list[Any]:
    """Copies the server's weights and optimizer state; returns the `settings` of all ranks."""
    for optimizer in optimizers:
        optimizer.check_detached()
    own = [
        {"variables": [list(v.shape) for v in o.exchanged_variables], **o.agreed_settings}
        for o in optimizers
    ]
    everybody = exchange_objects([own, settings], runtime.wire(), "tp.asynchronous")
    require_equal(
        [described for described, _ in everybody],
        "Optimizers must be the same on all ranks",
        "Build the same model with the same arguments on the server and on all workers.",
    )
    for optimizer in optimizers:
        inner = optimizer.inner_optimizer
        variables = [*optimizer.exchanged_variables, *sent_variables(inner), step_counter(inner)]
        replicas.broadcast(variables, runtime.wire(), _server_rank())
    return [given for _, given in everybody]


def _share_rest(model: Any, optimizers: list[Any]) -> None:
    """Copies the model's other state, such as frozen weights; each rank gets a different seed."""
    if partial := entries.variables_of(model, Placement.PARTIAL):
        raise ValueError(
            "ElasticAveraging does not support partial variables: its ranks train "
            f"asynchronously, so they cannot sum their parts. Received: {partial[0].name!r}, "
            "registered as partial. Register it as local, or use LocalUpdates."
        )
    left_out = {id(v) for optimizer in optimizers for v in optimizer.exchanged_variables}
    local = entries.variables_of(model, Placement.LOCAL)
    left_out |= {id(v) for v in local if not is_seed(v)}
    # Keras leaves seeds out of `weights`.
    weights = [*model.weights, *seeds_of_layers(model)]
    rest = [v for v in weights if id(v) not in left_out]
    replicas.broadcast(rest, runtime.wire(), _server_rank())
    entries.broadcast_layers(model, runtime.wire(), _server_rank())


def _optimizers(model: Any) -> list[Any]:
    """Returns the model's optimizers; raises unless all are built and exchange with the server."""
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
    """Starts this worker's calls to the server, and attaches the optimizers to it."""
    worker = Worker(runtime.pair_wire(runtime.rank()), runtime.stall_limit_s())
    worker.start()
    for number, optimizer in enumerate(optimizers):
        optimizer.attach(worker, number)
    return worker


def start_server(optimizers: Sequence[Any]) -> Server:
    """Starts the server with the current values of the variables."""
    for variable in itertools.chain(*(o.exchanged_variables for o in optimizers)):
        if not bool(tf.reduce_all(tf.math.is_finite(variable))):
            raise ValueError(
                "State that workers exchange with the global weights must start with finite "
                f"values. Received: infinity or NaN in {variable.path!r}. Store such state of "
                "layers in Python, or as integers."
            )
    wires = {rank: runtime.pair_wire(rank) for rank in runtime.workers().ranks}
    centers = [ServedCenter(pack(o.exchanged_variables), o.server_alpha) for o in optimizers]
    states = [ServedState(state_of(o.inner_optimizer)) for o in optimizers]
    server = Server(wires, centers, states, runtime.stall_limit_s())
    server.start()
    return server


# ------------------------------------------------------------------ end


def end_worker(worker: Worker, optimizers: Sequence[Any]) -> None:
    """Exchanges weights again, waits for other workers, and takes the final global weights."""
    for optimizer in optimizers:
        optimizer.exchange_last()
    worker.wait_for_others()
    for optimizer in optimizers:
        optimizer.take_all()
    worker.leave()
    for optimizer in optimizers:
        optimizer.detach()
    _end_together()


def run(
    optimizers: Sequence[Any], train: Callable[[], Any], on_failure: Callable[[], Any] | None
) -> None:
    """Runs `train` on workers and the server's loop on the server; see `ElasticAveraging.run`."""
    if is_server():
        server = start_server(optimizers)
        without = "the global weights are lost, because run received no on_failure"
        savers = [on_failure] if on_failure else []
        with saved_at_failure(server, lambda: show_centers(server, optimizers), savers, without):
            for _ in server.epochs():
                pass
            show_centers(server, optimizers)
            release_workers(server, optimizers)
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


def release_workers(server: Server, optimizers: Sequence[Any]) -> None:
    """Sends the server's variables to all workers, after all of them have finished training."""
    for center, optimizer in zip(server.centers, optimizers, strict=True):
        center.values = pack(optimizer.exchanged_variables)
    server.release()
    _end_together()


def _end_together() -> None:
    # A rank that exits shuts down Horovod, and aborts the last calls of the other ranks.
    exchange_objects(None, runtime.wire(), "tp.asynchronous.end")


# ------------------------------------------------------------------ state


def show_centers(server: Server, optimizers: Sequence[Any]) -> None:
    """Assigns global weights and averaged optimizer state to the server's variables."""
    for optimizer, center, state in zip(optimizers, server.centers, server.states, strict=True):
        assign_parts(optimizer.exchanged_variables, center.values)
        assign_state(optimizer.inner_optimizer, state.now)


def sent_variables(inner_optimizer: Any) -> list[Any]:
    """Returns the variables that workers send: state, and rates, because callbacks may set them."""
    return [*slots(inner_optimizer), *rates(inner_optimizer)]


def state_of(inner_optimizer: Any) -> OptimizerState:
    """Returns the optimizer state as one vector to send, and the step counter."""
    steps = int(step_counter(inner_optimizer).numpy())
    return OptimizerState(pack(sent_variables(inner_optimizer)), steps)


def assign_state(inner_optimizer: Any, given: OptimizerState) -> None:
    """Assigns the state that `state_of` returned for an equal optimizer."""
    assign_parts(sent_variables(inner_optimizer), given.values)
    step_counter(inner_optimizer).assign(given.steps)


def assign_parts(variables: Sequence[Any], vector: tf.Tensor) -> None:
    """Assigns a vector that `pack` returned for equal variables."""
    for variable, part in zip(variables, unpack(vector, variables), strict=True):
        variable.assign(part)


def notes_of_layout(bytes_per_step: float) -> list[str]:
    """Returns remarks on the server's location, and its traffic for one step of each worker."""
    topology, server, workers = runtime.wire().topology, _server_rank(), runtime.workers()
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


class _Terminated(SystemExit):
    """Exit in response to SIGTERM."""


@contextlib.contextmanager
def saved_at_failure(
    server: Server, show: Callable[[], None], savers: Sequence[Callable[[], Any]], without: str
) -> Iterator[None]:
    """Saves the global weights before an error or the launcher ends the server.

    `show` assigns the global weights to the server's variables, and each of `savers` saves the
    variables. `without` is the log's text for an empty list of savers.
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
        if isinstance(error, _Terminated):
            failure.report_signal("SIGTERM")
        # If the script continues, workers must not train without a server.
        server.is_silent = True
        # Build a list, so that each saver runs even if an earlier one fails.
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
    raise _Terminated(128 + signal.SIGTERM)


def _succeeds(call: Callable[[], Any]) -> bool:
    try:
        call()
    except Exception:
        # The error that ends the job must be the last one in the log.
        name = getattr(call, "__qualname__", call)
        log.exception("tfposeidon: %s could not save the global weights.", name)
        return False
    return True

"""Begin and end of asynchronous training, for all ranks together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfposeidon.communication import agreement, runtime
from tfposeidon.communication.wire import exchange_objects
from tfposeidon.elastic_averaging.last_centre import saved_at_failure
from tfposeidon.elastic_averaging.server import ServedCentre, Server
from tfposeidon.elastic_averaging.slots import ServedSlots, Slots
from tfposeidon.elastic_averaging.worker import Worker
from tfposeidon.exchange import replicas
from tfposeidon.exchange.one_vector import joined, parted
from tfposeidon.optimizers.wrapping import rates, slots, step_counter


class Asynchronous(Protocol):
    """Optimizer that exchanges with a server."""

    inner_optimizer: Any

    @property
    def exchanged_variables(self) -> list[Any]:
        """Variables whose values are exchanged."""

    @property
    def server_alpha(self) -> float:
        """Share of a worker's difference by which the centre moves."""

    @property
    def agreed_settings(self) -> dict[str, Any]:
        """Settings that have to be the same on all ranks."""

    def check_detached(self) -> None:
        """Refuses to begin where steps exchange already."""

    def attach(self, worker: Worker, number: int) -> None:
        """Makes steps exchange with a centre of the server."""

    def give_last(self) -> None:
        """Exchanges what was trained since the last exchange."""

    def give_slots(self) -> None:
        """Hands the server the slots, and the number of steps that they are of."""

    def take_all(self) -> None:
        """Takes the centre for the weights, and the server's slots."""

    def detach(self) -> None:
        """Makes steps exchange no more."""


def check_roles() -> None:
    """Refuses jobs without a server, or without a worker.

    Raises:
      ValueError: If it is one.
    """
    if runtime.size() == 1:
        raise ValueError(
            "ElasticAveraging needs a server and a worker at least. Received: a job of one rank. "
            "Start it with horovodrun -np 2 or more; on one rank, use the inner optimizer."
        )
    if runtime.server_rank() is None:
        raise ValueError(
            "ElasticAveraging needs a rank that serves. Received: a job without. Call "
            "tfposeidon.init(server_rank=0) at the beginning of the script."
        )


def check_begun(what: str) -> None:
    """Refuses to begin the job, without a server, for something that depends on it.

    Args:
      what: Subject of the error's first sentence, which depends on the job.

    Raises:
      RuntimeError: If nobody has begun the job.
    """
    if not runtime.has_begun():
        raise RuntimeError(
            f"{what} depends on the ranks of the job. Received: a job that has not begun. Call "
            "tfposeidon.init(server_rank=0) first; tfposeidon.init() where there is one rank only."
        )


def is_server() -> bool:
    """Returns whether this rank serves the others."""
    return runtime.server_rank() == runtime.rank()


def begin(
    optimizers: Sequence[Asynchronous], settings: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Makes all ranks begin with the server's weights and slots; all of them call it together.

    Args:
      optimizers: Optimizers that exchange; built, the same on all ranks.
      settings: Small values of this rank that all others get, for JSON.

    Returns:
      What each rank has given, by rank.

    Raises:
      RuntimeError: On all ranks, if optimizers or their variables differ; if they train already.
    """
    for optimizer in optimizers:
        optimizer.check_detached()
    own = [
        {"variables": [list(v.shape) for v in o.exchanged_variables], **o.agreed_settings}
        for o in optimizers
    ]
    everybody = exchange_objects([own, settings or {}], runtime.wire(), "tp.asynchronous")
    agreement.require_equal(
        [optimizers_there for optimizers_there, _ in everybody],
        "Optimizers must be the same on all ranks",
        "Build the same model with the same arguments on the server and on all workers.",
    )
    server = runtime.server_rank()
    assert server is not None
    for optimizer in optimizers:
        inner = optimizer.inner_optimizer
        variables = [*optimizer.exchanged_variables, *handed_over(inner), step_counter(inner)]
        replicas.broadcast(variables, runtime.wire(), server)
    return [given for _, given in everybody]


def start_worker(optimizers: Sequence[Asynchronous]) -> Worker:
    """Begins to exchange with the server, after `begin`.

    Args:
      optimizers: Optimizers that exchange.
    """
    worker = Worker(runtime.pair_wire(runtime.rank()), runtime.stall_limit_s())
    worker.start()
    for number, optimizer in enumerate(optimizers):
        optimizer.attach(worker, number)
    return worker


def end_epoch(
    worker: Worker, optimizers: Sequence[Asynchronous], has_trained: bool, is_last: bool
) -> None:
    """Hands the server a worker's slots, and tells it that an epoch has ended.

    Args:
      worker: This worker's side of its pair.
      optimizers: Optimizers that exchange.
      has_trained: False for an epoch without a batch.
      is_last: True if no epoch follows: what is left to exchange goes before it ends.
    """
    # First: once the epoch has ended, the server evaluates and saves.
    for optimizer in optimizers:
        if is_last:
            optimizer.give_last()
        optimizer.give_slots()
    worker.end_epoch(has_trained)


def end_worker(worker: Worker, optimizers: Sequence[Asynchronous]) -> None:
    """Gives the server what is left, waits for the other workers, and takes the last centre.

    Args:
      worker: This worker's side of its pair.
      optimizers: Optimizers that exchange.
    """
    for optimizer in optimizers:
        optimizer.give_last()
    worker.wait_for_others()
    for optimizer in optimizers:
        optimizer.take_all()
    worker.leave()
    for optimizer in optimizers:
        optimizer.detach()
    _end_together()


def start_server(optimizers: Sequence[Asynchronous]) -> Server:
    """Begins to serve the workers, after `begin`.

    Args:
      optimizers: Optimizers whose centres are served, which begin with their variables' values.
    """
    workers = runtime.workers().ranks
    wires = {rank: runtime.pair_wire(rank) for rank in workers}
    for optimizer in optimizers:
        _check_finite(optimizer.exchanged_variables)
    centres = [ServedCentre(joined(o.exchanged_variables), o.server_alpha) for o in optimizers]
    of_start = [ServedSlots(slots_of(o.inner_optimizer)) for o in optimizers]
    server = Server(wires, centres, of_start, runtime.stall_limit_s())
    server.start()
    return server


def _check_finite(variables: Sequence[Any]) -> None:
    for variable in variables:
        if not bool(tf.reduce_all(tf.math.is_finite(variable))):
            raise ValueError(
                "What workers exchange with the centre begins with finite values. Received: "
                f"{variable.path}, which does not. Let layers keep such state in Python, or as "
                "whole numbers."
            )


def run(
    optimizers: Sequence[Asynchronous],
    train: Callable[[], Any],
    on_failure: Callable[[], Any] | None = None,
) -> None:
    """Calls a function on workers, while the server serves; all call it together, after `begin`.

    Args:
      optimizers: Optimizers that exchange; built, the same on all ranks.
      train: Function without arguments that takes a worker's steps.
      on_failure: Function without arguments that saves the centre, on the server, where the job
        ends with an error; `None` for none.
    """
    if is_server():
        serve(start_server(optimizers), optimizers, [on_failure] if on_failure else [])
        return
    worker = start_worker(optimizers)
    try:
        train()
        for optimizer in optimizers:
            optimizer.give_slots()
    except BaseException:
        worker.fall_silent()
        raise
    end_worker(worker, optimizers)


def serve(
    server: Server, optimizers: Sequence[Asynchronous], savers: Sequence[Callable[[], Any]]
) -> None:
    """Serves until workers have ended, with the last centre in all variables.

    Args:
      server: The server, which has started.
      optimizers: Optimizers whose centres are served.
      savers: Functions that save the centre where the job ends with an error.
    """
    show = functools.partial(show_centres, server, optimizers)
    without = "the centre is lost, as run was given no on_failure"
    with saved_at_failure(server, show, savers, without):
        for _ in server.epochs():
            pass
        show()
        let_workers_go(server, optimizers)


def let_workers_go(server: Server, optimizers: Sequence[Asynchronous]) -> None:
    """Gives all workers what the server's variables hold, once none trains any more.

    Args:
      server: The server.
      optimizers: Optimizers whose centres are served.
    """
    server.let_go([joined(optimizer.exchanged_variables) for optimizer in optimizers])
    _end_together()


def _end_together() -> None:
    # A script that ends takes Horovod along, and with it the last calls of the others.
    exchange_objects(None, runtime.wire(), "tp.asynchronous.end")


def show_centres(server: Server, optimizers: Sequence[Asynchronous]) -> None:
    """Puts the centres into the server's variables, with the slots that workers have handed over.

    Args:
      server: The server.
      optimizers: Optimizers whose centres are served.
    """
    for number, optimizer in enumerate(optimizers):
        assign_parts(optimizer.exchanged_variables, server.centre(number))
        assign_slots(optimizer.inner_optimizer, server.slots(number))


def handed_over(inner_optimizer: Any) -> list[Any]:
    """Returns what workers hand to the server: slots, and the rate, which callbacks may set.

    Args:
      inner_optimizer: A built Keras optimizer.
    """
    return [*slots(inner_optimizer), *rates(inner_optimizer)]


def slots_of(inner_optimizer: Any) -> Slots:
    """Returns an optimizer's slots as they travel.

    Args:
      inner_optimizer: A built Keras optimizer.
    """
    steps = int(step_counter(inner_optimizer).numpy())
    return Slots(joined(handed_over(inner_optimizer)), steps)


def assign_slots(inner_optimizer: Any, given: Slots) -> None:
    """Assigns slots to an optimizer.

    Args:
      inner_optimizer: A built Keras optimizer.
      given: What `slots_of` has returned for another one of the same kind.
    """
    assign_parts(handed_over(inner_optimizer), given.values)
    step_counter(inner_optimizer).assign(given.steps)


def assign_parts(variables: Sequence[Any], vector: tf.Tensor) -> None:
    """Assigns the parts of a vector to variables.

    Args:
      variables: The variables that the vector was made of.
      vector: Vector as `joined` returns it.
    """
    for variable, part in zip(variables, parted(vector, variables), strict=True):
        variable.assign(part)

"""Agreement of all ranks at the start of asynchronous training, in `fit` or a custom loop.

The server's values are the start of all ranks, for the exchanged variables and the other state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfposeidon.communication import agreement, runtime
from tfposeidon.elastic_averaging import job
from tfposeidon.exchange import replicas
from tfposeidon.state.placement import Placement, is_seed
from tfposeidon.training import entries, layer_state, session

_EQUAL = ("epochs", "initial_epoch")
"""Arguments of `fit` that must be equal on all ranks."""


def begin(arguments: dict[str, Any]) -> tuple[list[Any], int | None]:
    """Starts all ranks with the server's weights; returns optimizers and the resumed epoch.

    Collective. The epoch is `None` for a new run. It raises on all ranks if optimizers or epochs
    differ.
    """
    model = arguments["self"]
    optimizers = _optimizers(model)
    equal = {name: arguments[name] for name in _EQUAL}
    own = {"equal": equal, "resumed": session.of(model).resumed_epoch}
    everybody = job.begin(optimizers, own)
    agreement.require_equal(
        [given["equal"] for given in everybody],
        "All ranks must train for the same epochs",
        "Pass the same `epochs` and `initial_epoch` to fit on the server and on all workers.",
        agreement.at_first_entry(),
    )
    _share_rest(model, optimizers)
    server = runtime.server_rank()
    assert server is not None
    resumed = everybody[server]["resumed"]
    return optimizers, None if resumed is None else int(resumed)


def begin_loop(optimizers: list[Any], models: Sequence[Any]) -> None:
    """Starts a custom loop on all ranks with the server's state; collective.

    It raises on all ranks if optimizers or the numbers of models differ.
    """
    agreement.require_equal(
        [given["models"] for given in job.begin(optimizers, {"models": len(models)})],
        "All ranks must train the same number of models",
        "Pass the same models=[...] to run on the server and on all workers.",
    )
    for model in models:
        _share_rest(model, optimizers)


def _share_rest(model: Any, optimizers: list[Any]) -> None:
    """Sends workers the server's state of the model that is not exchanged; collective.

    This state includes frozen weights, counters, and state outside of variables. Seeds become
    different on each rank.
    """
    server = runtime.server_rank()
    assert server is not None
    if partial := entries.variables_of(model, Placement.PARTIAL):
        raise ValueError(
            "ElasticAveraging does not support partial variables: its ranks train "
            f"asynchronously, so they cannot sum their parts. Received: {partial[0].name!r}, "
            "registered as partial. Register it as local, or use LocalUpdates."
        )
    left_out = {id(v) for optimizer in optimizers for v in optimizer.exchanged_variables}
    local = entries.variables_of(model, Placement.LOCAL, Placement.PARTIAL)
    left_out |= {id(variable) for variable in local if not is_seed(variable)}
    rest = [variable for variable in model.weights if id(variable) not in left_out]
    replicas.broadcast(rest, runtime.wire(), server)
    layer_state.broadcast(model, runtime.wire(), server)


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
            "Received: a model or an optimizer that is not built. Call model.build(input_shape) "
            "and, if a model has several optimizers, optimizer.build(variables) for each before "
            "fit."
        )
    return found

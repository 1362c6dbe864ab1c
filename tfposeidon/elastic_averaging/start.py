"""What ranks agree on when asynchronous training begins, by `fit` or a loop of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfposeidon.communication import agreement, runtime
from tfposeidon.elastic_averaging import job
from tfposeidon.exchange import replicas
from tfposeidon.state.placement import Placement, is_seed
from tfposeidon.training import entries, layer_state, session

_EQUAL = ("epochs", "initial_epoch")
"""Arguments of `fit` that have to be the same on all ranks."""


def begin(arguments: dict[str, Any]) -> tuple[list[Any], int | None]:
    """Makes all ranks begin with the server's weights, at its epoch; all of them call it together.

    Args:
      arguments: Arguments of `fit`, by name.

    Returns:
      The model's optimizers, and the epoch at which the server resumes an earlier run; `None` if it
      does not.

    Raises:
      ValueError: If an optimizer does not exchange with the server, or is not built.
      RuntimeError: On all ranks, if optimizers or epochs differ.
    """
    model = arguments["self"]
    optimizers = _optimizers(model)
    equal = {name: arguments[name] for name in _EQUAL}
    own = {"equal": equal, "resumed": session.of(model).resumed_epoch}
    everybody = job.begin(optimizers, own)
    agreement.require_equal(
        [given["equal"] for given in everybody],
        "All ranks must train for the same epochs",
        "Give fit the same `epochs` and `initial_epoch` on the server and on all workers.",
        agreement.at_first_entry(),
    )
    _share_rest(model, optimizers)
    server = runtime.server_rank()
    assert server is not None
    resumed = everybody[server]["resumed"]
    return optimizers, None if resumed is None else int(resumed)


def begin_loop(optimizers: list[Any], models: Sequence[Any]) -> None:
    """Makes all ranks begin a loop of one's own with what the server has; all call it together.

    Args:
      optimizers: Optimizers that exchange; built, the same on all ranks.
      models: Models that the loop trains, the same on all ranks.

    Raises:
      RuntimeError: On all ranks, if optimizers or models differ.
    """
    agreement.require_equal(
        [given["models"] for given in job.begin(optimizers, {"models": len(models)})],
        "All ranks must train as many models",
        "Give run the same models=[...] on the server and on all workers.",
    )
    for model in models:
        _share_rest(model, optimizers)


def _share_rest(model: Any, optimizers: list[Any]) -> None:
    """Gives workers what the server's model has besides what is exchanged.

    These are frozen weights, counters, and what layers keep outside of variables; seeds become
    other ones on each rank.

    Args:
      model: The model, the same on all ranks, which call it together.
      optimizers: Optimizers whose variables are exchanged.
    """
    server = runtime.server_rank()
    assert server is not None
    if partial := entries.variables_of(model, Placement.PARTIAL):
        raise ValueError(
            "Ranks that train at their own pace have no time at which their parts could be summed. "
            f"Received: {partial[0].name!r}, registered as partial. Register it as local, or use "
            "LocalUpdates."
        )
    left_out = {id(v) for optimizer in optimizers for v in optimizer.exchanged_variables}
    local = entries.variables_of(model, Placement.LOCAL, Placement.PARTIAL)
    left_out |= {id(variable) for variable in local if not is_seed(variable)}
    rest = [variable for variable in model.weights if id(variable) not in left_out]
    replicas.broadcast(rest, runtime.wire(), server)
    layer_state.broadcast(model, runtime.wire(), server)


def _optimizers(model: Any) -> list[Any]:
    """Returns the model's optimizers, all of which exchange with the server.

    Raises:
      ValueError: If one does not, or is not built.
    """
    found = session.of(model).optimizers
    if not all(hasattr(optimizer, "exchanged_variables") for optimizer in found):
        raise ValueError(
            "All optimizers of a model exchange with the server, or none. Received: "
            f"{[type(optimizer).__name__ for optimizer in found]}. Use ElasticAveraging for each."
        )
    if model.built and len(found) == 1 and not found[0].built:
        found[0].build(model.trainable_variables)
    if not all(optimizer.built for optimizer in found):
        raise ValueError(
            "The server takes no step, and has to know the variables before. Received: a model or "
            "an optimizer that is not built. Call model.build(input_shape) and, where a model has "
            "several, optimizer.build(variables) for each before fit."
        )
    return found

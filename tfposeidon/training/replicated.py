"""What must be equal on all ranks while a model trains, and its comparison."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfposeidon.communication import runtime
from tfposeidon.communication.wire import Wire, exchange_objects
from tfposeidon.exchange import replicas
from tfposeidon.exchange.variable_agreement import as_json, check_same_variables
from tfposeidon.state.placement import Placement, another_seed, seeds_of_layers
from tfposeidon.training import layer_state
from tfposeidon.training.entries import held_optimizers, optimizers, variables_of


def replicated_variables(model: keras.Model) -> list[Any]:
    """Returns weights, optimizer state and other replicated state; all ranks have them equal.

    Args:
      model: A compiled model; an only optimizer that is not built yet is built.

    Raises:
      RuntimeError: If the model has no weights yet.
    """
    if not has_weights(model):
        raise RuntimeError(
            "This callback needs the model's weights when training begins. Received: a model that "
            "is not built, and data that do not tell their shapes. Call the model on one batch, or "
            "model.build(input_shape), before fit."
        )
    found = held_optimizers(model)
    # Which of several optimizers trains which variables is known only in their first step.
    if found == [getattr(model, "optimizer", None)] and not found[0].built:
        model.optimizer.build(model.trainable_variables)
    return variables_of(model, Placement.REPLICATED)


def has_weights(model: keras.Model) -> bool:
    """Returns whether a model is built, or all of its parts are."""
    # Models without a call of their own, such as GANs, are never built, though their parts are.
    # A trainer that is a layer has none.
    layers = getattr(model, "layers", ())
    return model.built or (bool(layers) and all(layer.built for layer in layers))


def share(model: keras.Model, wire: Wire, root_rank: int = 0) -> None:
    """Gives every rank the state of one; all ranks call it together.

    Args:
      model: A compiled model.
      wire: Collectives that join the ranks.
      root_rank: Rank whose state all others receive.

    Raises:
      RuntimeError: If the model has no weights yet, or on all ranks, if they have other variables.
      ValueError: On all ranks, if layers hold tables that differ and cannot be assigned.
    """
    variables = [
        *replicated_variables(model),
        *variables_of(model, Placement.AVERAGED),
        *seeds_of_layers(model),
    ]
    replicas.broadcast(variables, wire, root_rank)
    if wire.topology.rank != root_rank:
        # Their sum is what the root has.
        replicas.clear(variables_of(model, Placement.PARTIAL))
    layer_state.broadcast(model, wire, root_rank)
    for optimizer in optimizers(model):
        # Others keep the whole of their state on each rank.
        scatter = getattr(optimizer, "scatter_state", None)
        if scatter is not None:
            scatter(root_rank)


def begin_alike(model: keras.Model, wire: Wire) -> None:
    """Makes ranks whose values differ begin with those of rank 0, and each with seeds of its own.

    All ranks call it together. It says so if values differ.

    Raises:
      RuntimeError: On all ranks, if they have other variables.
    """
    problem = difference(model, wire, with_layers=True)
    if problem:
        share(model, wire)
        runtime.say("tfposeidon: %s All ranks begin with those of rank 0.", problem)
    seeds = seeds_of_layers(model)
    states = exchange_objects([v.numpy().tolist() for v in seeds], wire, "tp.seeds")
    rank = wire.topology.rank
    for variable, own, *lower in zip(seeds, states[rank], *states[:rank], strict=False):
        if own in lower:
            variable.assign(another_seed(tf.convert_to_tensor(variable), rank))


def difference(model: keras.Model, wire: Wire, with_layers: bool = False) -> str | None:
    """Compares values over ranks by one checksum, and finds by name what differs.

    All ranks call it together. A model without weights is not compared.

    Args:
      model: A compiled model; where ranks train weights of their own, the global ones are shown.
      wire: Collectives that join the ranks.
      with_layers: True to compare vocabularies and tables, too.

    Returns:
      The rule and what breaks it first, the same on all ranks; `None` if all is equal.

    Raises:
      RuntimeError: On all ranks, if they have other variables.

    Cost: one pass over all values, on the device that holds them, and one small exchange.
    """
    variables = replicated_variables(model) if has_weights(model) else []
    layers = layer_state.read(model, Placement.REPLICATED) if with_layers else {}
    sums = replicas.checksum(variables, on_device=True)
    own = [sums, replicas.checksum(list(layers.values()))]
    everybody = exchange_objects(own, wire, "tp.equal")
    # Looked at by all alike: the search for what differs is an exchange, too.
    if all(other == everybody[0] for other in everybody):
        return None
    described = as_json(replicas.describe_any(variables))
    check_same_variables(exchange_objects(described, wire, "tp.equal.variables"))
    found = replicas.differences(variables, wire) | replicas.different_arrays(layers, wire)
    if not found:
        # A rank without a GPU has other checksums.
        return None
    path, ranks = next(iter(found.items()))
    return (
        "All ranks must hold the same weights, optimizer state and state of layers. Received: "
        f"{path!r}, which differs on rank(s) {ranks} from rank 0, first of {len(found)} of "
        f"{len(variables) + len(layers)}."
    )

"""Replicated state of a model in training: its values must be equal on all ranks.

Ranks broadcast it from one rank, and compare it by a checksum before they search for a difference.
"""

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
    """Returns replicated variables; builds a sole optimizer; raises if the model has no weights."""
    if not has_weights(model):
        raise RuntimeError(
            "This callback requires the model's weights when training begins. Received: a model "
            "that is not built, and data of unknown shape. Call the model on one batch, or "
            "model.build(input_shape), before fit."
        )
    found = held_optimizers(model)
    # With several optimizers, their variables are known only in the first step.
    if found == [getattr(model, "optimizer", None)] and not found[0].built:
        model.optimizer.build(model.trainable_variables)
    return variables_of(model, Placement.REPLICATED)


def has_weights(model: keras.Model) -> bool:
    """Returns whether the model, or all of its layers, are built."""
    # Models without a `call` of their own, such as GANs, are never built, although their layers
    # are. A trainer that is a layer has no `layers`.
    layers = getattr(model, "layers", ())
    return model.built or (bool(layers) and all(layer.built for layer in layers))


def share(model: keras.Model, wire: Wire, root_rank: int = 0) -> None:
    """Copies the state of one rank to all ranks; collective."""
    variables = [
        *replicated_variables(model),
        *variables_of(model, Placement.AVERAGED),
        *seeds_of_layers(model),
    ]
    replicas.broadcast(variables, wire, root_rank)
    if wire.topology.rank != root_rank:
        # The sum over ranks must be the root's value.
        replicas.clear(variables_of(model, Placement.PARTIAL))
    layer_state.broadcast(model, wire, root_rank)
    for optimizer in optimizers(model):
        # Other optimizers hold their whole state on each rank.
        scatter = getattr(optimizer, "scatter_state", None)
        if scatter is not None:
            scatter(root_rank)


def begin_alike(model: keras.Model, wire: Wire) -> None:
    """Makes all ranks start with the values of rank 0, and each with its own seeds; collective."""
    problem = difference(model, wire, with_layers=True)
    if problem:
        share(model, wire)
        runtime.say("tfposeidon: %s All ranks start with the values of rank 0.", problem)
    seeds = seeds_of_layers(model)
    states = exchange_objects([v.numpy().tolist() for v in seeds], wire, "tp.seeds")
    rank = wire.topology.rank
    for variable, own, *lower in zip(seeds, states[rank], *states[:rank], strict=False):
        if own in lower:
            variable.assign(another_seed(tf.convert_to_tensor(variable), rank))


def difference(model: keras.Model, wire: Wire, with_layers: bool = False) -> str | None:
    """Compares values across ranks by one checksum; returns the first difference or `None`.

    Collective, and the result is the same on all ranks. It costs one pass over all values, on their
    device, and one small exchange. It raises on all ranks if they have different variables.
    """
    variables = replicated_variables(model) if has_weights(model) else []
    layers = layer_state.read(model, Placement.REPLICATED) if with_layers else {}
    sums = replicas.checksum(variables, on_device=True)
    own = [sums, replicas.checksum(list(layers.values()))]
    everybody = exchange_objects(own, wire, "tp.equal")
    # All ranks take the same branch, since the search for a difference is collective.
    if all(other == everybody[0] for other in everybody):
        return None
    described = as_json(replicas.describe_any(variables))
    check_same_variables(exchange_objects(described, wire, "tp.equal.variables"))
    found = replicas.differences(variables, wire) | replicas.different_arrays(layers, wire)
    if not found:
        # The checksums of a rank without a GPU may differ although the values are equal.
        return None
    path, ranks = next(iter(found.items()))
    return (
        "All ranks must hold the same weights, optimizer state and state of layers. Received: "
        f"{path!r}, which differs on rank(s) {ranks} from rank 0, the first of {len(found)} "
        f"differences in {len(variables) + len(layers)} values."
    )

"""All state of a model, its optimizers and its callbacks, with the placement of each entry.

Checkpoints, broadcasts and comparisons read this one list, so that they cover the same state.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfposeidon.communication import runtime
from tfposeidon.communication.wire import Wire, exchange_objects
from tfposeidon.exchange import replicas
from tfposeidon.exchange.replicas import check_same_variables, variables_as_json
from tfposeidon.gradients import of_tensorflow
from tfposeidon.state.placement import (
    Placement,
    StateDescription,
    StateEntry,
    another_seed,
    by_dtype,
    entries_of_layers,
    placed,
    seeds_of_layers,
)
from tfposeidon.training import layer_state, session


def held_optimizers(model: Any) -> list[Any]:
    """Returns the communicating optimizers, with their loss scales, or `model.optimizer`."""
    own = getattr(model, "optimizer", None)
    return session.held_by(model) or ([] if own is None else [own])


def optimizers(model: Any) -> list[Any]:
    """Returns `held_optimizers`, with loss scales around communicating optimizers removed."""
    return [session.without_loss_scale(held) for held in held_optimizers(model)]


def entries(model: Any) -> list[StateEntry]:
    """Returns all state of a model except for `parts`, in the same order on all ranks."""
    replicated = [
        *model.trainable_variables,
        *(variable for held in held_optimizers(model) for variable in _replicated(held)),
    ]
    callbacks = session.of(model).callbacks_with_state
    return [
        *placed([(variable, Placement.REPLICATED) for variable in replicated]),
        *entries_of_layers(model),
        *placed([pair for callback in callbacks for pair in callback.state()]),
        *layer_state.entries(model),
    ]


def _replicated(held: Any) -> list[Any]:
    optimizer = session.without_loss_scale(held)
    variables: list[Any] = (optimizer if _has_own_inner(optimizer) else held).variables
    return variables


def _has_own_inner(optimizer: Any) -> bool:
    # Keras's own optimizers are replicated.
    return getattr(optimizer, "has_own_inner", False)


def _own_inner(held: Any) -> list[Any]:
    """Returns the variables of an inner optimizer that differ between ranks, and its loss scale."""
    optimizer = session.without_loss_scale(held)
    if not (_has_own_inner(optimizer) and optimizer.built):
        return []
    around = [] if held is optimizer else held.variables
    found = {id(variable): variable for variable in [*optimizer.inner_optimizer.variables, *around]}
    equal = set(map(id, optimizer.variables))
    return [variable for key, variable in found.items() if key not in equal]


def of_train_step(model: Any) -> list[Any]:
    """Returns replicated variables that no optimizer has updated, and that are not its state."""
    updated: list[Any] = []
    for held in held_optimizers(model):
        optimizer = session.without_loss_scale(held)
        updated += [*held.variables, *optimizer.variables]
        updated += itertools.chain(*optimizer.exchange.plans.lists)
    known = {of_tensorflow(variable).ref() for variable in updated}
    return [v for v in replicated_variables(model) if of_tensorflow(v).ref() not in known]


def variables_of(model: Any, *placements: Placement) -> list[Any]:
    """Returns the variables with one of these placements."""
    return [
        entry.value
        for entry in entries(model)
        if entry.placement in placements and not isinstance(entry.value, keras.layers.Layer)
    ]


def statistics_of(model: Any, optimizer: Any) -> list[Any]:
    """Returns the averaged state that an optimizer synchronizes together with its weights."""
    # Only the first such optimizer synchronizes it: otherwise each would average all of it.
    found = [one for one in session.optimizers_of(model) if not one.fit_hooks(model).is_in_step]
    return variables_of(model, Placement.AVERAGED) if found[:1] == [optimizer] else []


def parts(model: Any) -> Iterator[tuple[Any, StateDescription]]:
    """Yields per-rank optimizer state, which a checkpoint redistributes over other ranks.

    An optimizer without a plan makes its plan here, which is collective over all ranks.
    """
    for number, held in enumerate(held_optimizers(model)):
        for variable, part in _parts(held):
            name = f"{part.name} of optimizer {number}" if number else part.name
            yield variable, dataclasses.replace(part, name=name)


def _parts(held: Any) -> list[tuple[Any, StateDescription]]:
    """Returns per-rank state of an optimizer and of its loss scale."""
    optimizer = session.without_loss_scale(held)
    # Keras's own optimizers have none.
    found = list(getattr(optimizer, "rank_state", ()))
    if held is not optimizer and _has_own_inner(optimizer):
        known = {id(variable) for variable in optimizer.variables}
        of_scale = [variable for variable in held.variables if id(variable) not in known]
        found += [
            (variable, StateDescription(name=f"loss scale {index}", placement=by_dtype(variable)))
            for index, variable in enumerate(of_scale)
        ]
    return found


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


def share(model: keras.Model, wire: Wire, root_rank: int = 0, with_own_inner: bool = False) -> None:
    """Copies the state of one rank to all ranks; collective.

    State of inner optimizers that differs between ranks is copied only on request.
    """
    own_inner = [v for held in held_optimizers(model) if with_own_inner for v in _own_inner(held)]
    variables = [
        *replicated_variables(model),
        *variables_of(model, Placement.AVERAGED),
        *seeds_of_layers(model),
        *own_inner,
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


def begin_alike(model: keras.Model, wire: Wire, root_rank: int = 0) -> None:
    """Makes all ranks start with the values of one, and each with its own seeds; collective."""
    # Within an epoch, a snapshot holds each rank's own statistics.
    placements = [] if session.of(model).is_resumed else [Placement.AVERAGED]
    problem = difference(model, wire, True, *placements)
    if problem:
        share(model, wire, root_rank)
        runtime.say(
            "tfposeidon: %s All ranks start with the values of rank %d.", problem, root_rank
        )
    seeds = seeds_of_layers(model)
    states = exchange_objects([v.numpy().tolist() for v in seeds], wire, "tp.seeds")
    rank = wire.topology.rank
    for variable, own, *lower in zip(seeds, states[rank], *states[:rank], strict=False):
        if own in lower:
            variable.assign(another_seed(tf.convert_to_tensor(variable), rank))


def difference(
    model: keras.Model, wire: Wire, with_layers: bool = False, *placements: Placement
) -> str | None:
    """Compares values across ranks by one checksum; returns the first difference or `None`.

    Compares replicated variables and those with other `placements`. Collective, and the result is
    the same on all ranks. It costs one pass over all values, on their device, and one small
    exchange. It raises on all ranks if they have different variables.
    """
    variables = replicated_variables(model) if has_weights(model) else []
    variables += variables_of(model, *placements)
    layers = layer_state.read(model, Placement.REPLICATED) if with_layers else {}
    sums = replicas.checksum(variables, on_device=True)
    own = [sums, replicas.checksum(list(layers.values()))]
    everybody = exchange_objects(own, wire, "tp.equal")
    # All ranks take the same branch, since the search for a difference is collective.
    if all(other == everybody[0] for other in everybody):
        return None
    described = variables_as_json(replicas.describe_any(variables))
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

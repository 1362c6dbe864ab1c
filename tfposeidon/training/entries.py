"""All state of a model, its optimizers and its callbacks, with the placement of each entry.

Checkpoints, broadcasts and comparisons read this one list, so that they cover the same state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import keras

from tfposeidon.state.placement import Placement, StateEntry, by_dtype, entries_of_layers, placed
from tfposeidon.state.rank_state import StateDescription
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

"""The one list of a model's state, of its optimizers and of callbacks."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

import keras

from tfposeidon.state.placement import Placement, StateEntry, entries_of_layers, placed
from tfposeidon.state.rank_state import StateDescription
from tfposeidon.training import layer_state, session


def optimizers(model: Any) -> list[Any]:
    """Returns a model's optimizers that communicate, or else the one of `compile`, if any."""
    own = getattr(model, "optimizer", None)
    return session.optimizers_of(model) or ([] if own is None else [own])


def entries(model: Any) -> list[StateEntry]:
    """Returns all state of a model in training, but for `parts`; in the same order on all ranks."""
    replicated = [
        *model.trainable_variables,
        *(variable for optimizer in optimizers(model) for variable in optimizer.variables),
    ]
    callbacks = session.of(model).callbacks_with_state
    return [
        *placed([(variable, Placement.REPLICATED) for variable in replicated]),
        *entries_of_layers(model),
        *placed([pair for callback in callbacks for pair in callback.state()]),
        *layer_state.entries(model),
    ]


def variables_of(model: Any, *placements: Placement) -> list[Any]:
    """Returns the variables with one of these placements."""
    return [
        entry.value
        for entry in entries(model)
        if entry.placement in placements and not isinstance(entry.value, keras.layers.Layer)
    ]


def carry_statistics(model: Any) -> None:
    """Makes averaged state travel with the weights, where these are exchanged."""
    # With one of these optimizers: each would have all of them.
    found = session.optimizers_of(model)
    exchange = [one for one in found if not one.fit_hooks(model).is_in_step]
    # The optimizer must not keep its model alive.
    reference = weakref.ref(model)
    for optimizer in exchange[:1]:
        optimizer.carry(lambda: variables_of(reference(), Placement.AVERAGED))


def parts(model: Any) -> Iterator[tuple[Any, StateDescription]]:
    """Yields state of optimizers that differs from rank to rank, and is cut anew for other ranks.

    An optimizer without a plan makes it, with all ranks.
    """
    for number, optimizer in enumerate(optimizers(model)):
        # Keras's own optimizers have none.
        for variable, part in getattr(optimizer, "rank_state", ()):
            name = f"{part.name} of optimizer {number}" if number else part.name
            yield variable, dataclasses.replace(part, name=name)
